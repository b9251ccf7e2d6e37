"""Undominated mixes: the ways to give some layers one strategy each of which no other is as fast
and as small. Time and memory add up, so a dominated part never belongs to an undominated whole, and
a front grows layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from planner.counts import Option

__all__ = ["Front"]


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The mixes of some layers by rising ``times`` and falling ``memories`` (int64, one each).

    Mix i is mix ``parents[i]`` of ``shorter`` and one more layer of class ``added`` under
    ``strategies[i]``.
    """

    times: NDArray[np.int64]
    memories: NDArray[np.int64]
    shorter: Self | None = None
    added: int = 0
    parents: NDArray[np.int64] | None = None
    strategies: Sequence[int] = ()

    @classmethod
    def of_nothing(cls) -> Self:
        """The one mix of no layers."""
        nothing = np.zeros(1, dtype=np.int64)
        return cls(nothing, nothing)

    def longer(self, added: int, options: Sequence[Option]) -> Self:
        """The mixes with one more layer of class ``added``."""
        own = np.array([(o.time, o.memory, o.strategy) for o in options], dtype=np.int64)
        times = (self.times[:, None] + own[:, 0]).ravel()
        memories = (self.memories[:, None] + own[:, 1]).ravel()
        order = np.lexsort((memories, times))
        sorted_memories = memories[order]
        least_before = np.minimum.accumulate(sorted_memories)[:-1]
        kept = order[np.concatenate(([True], sorted_memories[1:] < least_before))]
        parents, options_taken = np.divmod(kept, len(own))
        return type(self)(
            times[kept], memories[kept], self, added, parents, own[options_taken, 2].tolist()
        )

    def layers(self, point: int) -> Iterator[tuple[int, int]]:
        """(class, strategy) of every layer of mix ``point``."""
        front: Front = self
        while front.parents is not None and front.shorter is not None:
            yield front.added, front.strategies[point]
            point, front = int(front.parents[point]), front.shorter

    def best_with(self, other: Self, memory: int) -> tuple[int, int, int] | None:
        """Least time of a mix of this front and one of ``other`` in ``memory`` together, and the
        two mixes; None if none fits.
        """
        partners = np.searchsorted(-other.memories, self.memories - memory)
        fits = partners < len(other.times)
        if not fits.any():
            return None
        times = self.times[fits] + other.times[partners[fits]]
        least = int(times.argmin())
        point = int(np.flatnonzero(fits)[least])
        return int(times[least]), point, int(partners[point])
