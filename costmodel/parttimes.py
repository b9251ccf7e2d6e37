"""Operators in a row on a device and its links -> their seconds by cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from costmodel.collectives import collective_seconds
from costmodel.passes import NOTHING, PassCost, total
from costmodel.work import AttentionCore, Collective, CollectiveKind, Gemm, Group, Stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from costmodel.compute import DeviceModel
    from costmodel.operators import Operator
    from costmodel.work import Work
    from profiles.topology import GroupLink

__all__ = ["PartTimer", "TimedPart"]

SHARPNESS = 4  # of the change from launch-bound to device-bound layers
# Part of a collective that running beside a GEMM saves: both want the same multiprocessors and
# memory. Of 0.9 ms a layer that sequence parallelism takes off the backward pass of a 22B model,
# the second gather leaves 0.1 (Korthikanti et al. 2022, table 4), which says less; the layouts of
# Hagemann et al. 2023, where it saves 8 % of a step, say more.
HIDDEN_BESIDE = 2 / 3
# Of the host's time for a kernel, what one more expert of a grouped GEMM takes: its launch comes
# from a loop inside the library (Transformer Engine's grouped linear layer), not from Python.
ONE_MORE_EXPERT = 0.2
# Of the tokens' way to the experts, what hides where micro-batches are interleaved for it: all but
# the first one's (Megatron-Core's ``overlap_moe_expert_parallel_comm``).
HIDDEN_EXPERTS = 0.9


class TimedPart(NamedTuple):
    """Operators in a row with the seconds of their passes together, the kernels that they launch
    forward and backward, and the elements of their results that count. ``by_module``, ``saved``
    and ``transient_bytes`` are their share of what ``TimedLayer`` has; ``routed``: they are the
    routed experts.
    """

    forward: PassCost
    backward: PassCost
    weight_s: float
    kernels: tuple[float, float]
    by_module: Mapping[str, PassCost]
    saved: Mapping[str | None, int]
    outputs: int
    transient_bytes: int
    routed: bool = False


@dataclass(frozen=True, slots=True)
class PartTimer:
    """Times operators on one device, whose groups have these links."""

    device: DeviceModel
    links: Mapping[Group, GroupLink]

    def part(self, operators: Sequence[Operator]) -> TimedPart:
        """The times of operators in a row."""
        by_module: dict[str, list[PassCost]] = {}
        saved: dict[str | None, int] = {}
        backward, weights = [], []
        forward_kernels = backward_kernels = 0.0
        outputs = 0
        for each in operators:
            by_module.setdefault(each.module, []).append(self.seconds(each.forward, each.module))
            weights.append(self.seconds(each.backward_weight, each.module))
            backward += [self.seconds(each.backward_input, each.module), weights[-1]]
            if each.beside:
                backward.append(self.beside(each.beside, each.backward_input))
            forward_kernels += _kernels(each.forward)
            backward_kernels += _kernels(each.backward_input) + _kernels(each.backward_weight)
            outputs += sum(_output_elements(work) for work in each.forward)
            for tensor in each.saved:
                saved[tensor.dropped_by] = saved.get(tensor.dropped_by, 0) + tensor.bytes
        totals = {module: total(own) for module, own in by_module.items()}
        return TimedPart(
            forward=total(totals.values()),
            backward=total(backward),
            weight_s=sum(each.total_s for each in weights),
            kernels=(forward_kernels, backward_kernels),
            by_module=totals,
            saved=saved,
            outputs=outputs,
            transient_bytes=max((each.transient_bytes for each in operators), default=0),
        )

    def beside_experts(self, cost: PassCost, *, overlaps: bool) -> PassCost:
        """A layer's pass with what of its tokens' way to the experts hides behind the layer's
        compute: that of another micro-batch, where software interleaves them.
        """
        own = self.device.efficiencies
        part = max(own.ep_overlap, HIDDEN_EXPERTS) if overlaps else own.ep_overlap
        hidden = part * min(cost.ep_s, cost.compute_s)
        return cost + PassCost(ep_s=-hidden * (1 - own.overlap_slowdown))

    def launched(self, cost: PassCost, kernels: float) -> PassCost:
        """A layer's pass with what the device waits for the host.

        The host runs ahead of the device, so the greater of the two counts; near equality each
        waits for the other at times: (device^4 + host^4)^(1/4), at most 19 % above the greater.
        """
        device = cost.device_s
        host = kernels * self.device.efficiencies.kernel_launch_s
        both = (device**SHARPNESS + host**SHARPNESS) ** (1 / SHARPNESS)
        return cost + PassCost(host_s=both - device)

    def beside(self, works: tuple[Work, ...], others: tuple[Work, ...]) -> PassCost:
        """What remains of tensor-parallel collectives that run beside the compute of others."""
        own = self.device.efficiencies
        compute = sum(self.device.seconds(w) for w in others if not isinstance(w, Collective))
        traffic = sum(
            collective_seconds(work.kind, work.bytes, self.links[work.group], own)
            for work in works
            if isinstance(work, Collective)
        )
        return PassCost(tp_s=traffic - HIDDEN_BESIDE * min(compute, traffic))

    def seconds(self, works: tuple[Work, ...], module: str) -> PassCost:
        """Communication hides behind its own operator's compute: T3's
        T = T_compute + T_collective - overlap * min(T_compute, T_collective), and what hides
        slows the compute down by a stated part.
        """
        if not works:
            return NOTHING
        own = self.device.efficiencies
        compute = sum(self.device.seconds(w) for w in works if not isinstance(w, Collective))
        if module == "experts":
            compute *= own.moe_imbalance
        exposed: dict[Group, float] = {Group.TP: 0.0, Group.CP: 0.0, Group.EP: 0.0}
        overlaps = {Group.TP: own.tp_overlap, Group.CP: 0.0}
        for work in works:
            if isinstance(work, Collective):
                if work.kind is CollectiveKind.RING_EXCHANGE:  # attention waits for all other kinds
                    overlaps[Group.CP] = own.cp_overlap
                axis: Group = Group.EP if work.group is Group.EXPERT_TP else work.group
                link = self.links[work.group]
                exposed[axis] += collective_seconds(
                    work.kind, work.bytes, link, own, copies=work.copies
                )
        for axis, overlap in overlaps.items():
            hidden = overlap * min(compute, exposed[axis])
            exposed[axis] -= hidden * (1 - own.overlap_slowdown)
        return PassCost(
            compute_s=compute,
            tp_s=exposed[Group.TP],
            cp_s=exposed[Group.CP],
            ep_s=exposed[Group.EP],
        )


def _output_elements(work: Work) -> int:
    """Elements of what attention makes, and of every second GEMM: half of each GEMM's."""
    if isinstance(work, AttentionCore):
        return work.batch * work.heads * work.query_len * work.value_head_dim
    return work.m * work.n * work.groups // 2 if isinstance(work, Gemm) else 0


def _kernels(works: tuple[Work, ...]) -> float:
    """Launches of the host for some works, those of a grouped GEMM's experts by their part."""
    return sum(map(_launches, works))


def _launches(work: Work) -> float:
    if isinstance(work, Stream):
        return work.kernels
    return 1 + ONE_MORE_EXPERT * (work.groups - 1) if isinstance(work, Gemm) else 1
