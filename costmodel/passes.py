"""PassCost: the seconds of one pass, by cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NOTHING", "PassCost", "total"]


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass of one micro-batch, by cause; communication is what is exposed, and
    ``host_s`` what the device waits for the host to launch its kernels.
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    tp_s: float = 0.0
    cp_s: float = 0.0
    ep_s: float = 0.0
    zero_s: float = 0.0
    host_s: float = 0.0

    @property
    def device_s(self) -> float:
        """What the device is busy with."""
        return self.compute_s + self.recompute_s + self.tp_s + self.cp_s + self.ep_s + self.zero_s

    @property
    def total_s(self) -> float:
        """All causes together."""
        return self.device_s + self.host_s

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            self.compute_s + other.compute_s,
            self.recompute_s + other.recompute_s,
            self.tp_s + other.tp_s,
            self.cp_s + other.cp_s,
            self.ep_s + other.ep_s,
            self.zero_s + other.zero_s,
            self.host_s + other.host_s,
        )

    def __mul__(self, count: float) -> PassCost:
        return PassCost(
            self.compute_s * count,
            self.recompute_s * count,
            self.tp_s * count,
            self.cp_s * count,
            self.ep_s * count,
            self.zero_s * count,
            self.host_s * count,
        )

    @property
    def again(self) -> PassCost:
        """Computing it again: its arithmetic is recomputation, its communication stays named."""
        return PassCost(0.0, self.compute_s, self.tp_s, self.cp_s, self.ep_s, 0.0, self.host_s)


NOTHING = PassCost()


def total(costs: Iterable[PassCost]) -> PassCost:
    """The sum of some passes."""
    compute = recompute = tp = cp = ep = zero = host = 0.0
    for each in costs:
        compute += each.compute_s
        recompute += each.recompute_s
        tp += each.tp_s
        cp += each.cp_s
        ep += each.ep_s
        zero += each.zero_s
        host += each.host_s
    return PassCost(compute, recompute, tp, cp, ep, zero, host)
