"""What it costs to hand activations, and their gradients, from one pipeline stage to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from costmodel.collectives import collective_seconds
from costmodel.layers import boundary_bytes
from costmodel.layout import Axis, Mesh, Strategy
from costmodel.measuredlinks import pair_link
from costmodel.work import CollectiveKind
from profiles.measured import Operation

if TYPE_CHECKING:
    from costmodel.measuredlinks import LinkTimes
    from profiles.calibration import Efficiencies
    from profiles.layers import Layer
    from profiles.topology import GroupLink, Level, Topology
    from profiles.training import TrainingSpec

__all__ = ["HandOvers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOvers:
    """Times of hand-overs between the stages of pipelines; ``link_times`` None: by formula."""

    topology: Topology
    link_times: LinkTimes | None
    own: Efficiencies
    training: TrainingSpec
    layers: tuple[Layer, ...]
    _known: dict[object, tuple[float, ...]] = field(default_factory=dict, init=False)

    def seconds(self, mesh: Mesh, strategy: Strategy, micro_batch: int) -> tuple[float, ...]:
        """Seconds to hand one micro-batch from each stage to the next (the last to the first).

        Without sequence parallelism all tp ranks hold the same tensor: each sends its part and
        the receivers gather it, where that is faster than sending it whole.
        """
        key = (mesh, strategy.tp, strategy.cp, strategy.sequence_parallel, micro_batch)
        if key not in self._known:
            self._known[key] = self._seconds(mesh, strategy, micro_batch)
        return self._known[key]

    def _seconds(self, mesh: Mesh, strategy: Strategy, micro_batch: int) -> tuple[float, ...]:
        if mesh.pp == 1:
            return (0.0,)
        size = max(
            boundary_bytes(layer, strategy, self.training, micro_batch)
            for layer in self.layers[:-1] or self.layers
        )
        link = self.topology.axis(mesh.dims(Axis.PP), num_ranks=mesh.num_ranks)
        firsts = [mesh.first_rank(stage) for stage in range(mesh.pp)]
        depths = [
            self.topology.num_levels(first, following)
            for first, following in zip(firsts, [*firsts[1:], firsts[0]], strict=True)
        ]
        hops = {
            depth: self._hop_s(link.levels[:depth], size, mesh, strategy) for depth in set(depths)
        }
        return tuple(hops[depth] for depth in depths)

    def _hop_s(
        self, crossed: tuple[Level, ...], size: int, mesh: Mesh, strategy: Strategy
    ) -> float:
        """Seconds of one hand-over through the narrowest of the links that it crosses."""
        seconds = self._sent_s(crossed, size)
        if not strategy.sequence_parallel and mesh.tp > 1:
            link = self.topology.axis(mesh.dims(Axis.TP), num_ranks=mesh.num_ranks)
            gather = collective_seconds(CollectiveKind.ALL_GATHER, size, link, self.own)
            seconds = min(seconds, self._sent_s(crossed, size / mesh.tp) + gather)
        return seconds

    def _sent_s(self, crossed: tuple[Level, ...], size: float) -> float:
        """Seconds until another rank has ``size`` bytes, measured ones where there are any."""

        def formula(_: object, size: float, link: GroupLink) -> float:
            rate = min(
                level.bytes_per_s * (self.own.nic if level.leaves_node else self.own.gpu_link)
                for level in link.levels
            )
            return link.levels[-1].latency_s + self.own.hand_over_s + size / rate

        pair = pair_link(crossed)
        if self.link_times is not None:
            return self.link_times.seconds(Operation.P2P, size, pair, formula)
        return formula(Operation.P2P, size, pair)

    def held_up_s(
        self,
        mesh: Mesh,
        strategy: Strategy,
        micro_batch: int,
        num_chunks: int,
        *,
        folds: bool = False,
    ) -> tuple[float, ...]:
        """Seconds for which each stage is held up by handing on both passes of one micro-batch.

        The last virtual stage sends nothing forward; a backward is charged like the forward over
        the same boundary, so the stage before it pays for both. ``folds``: chunks go down the
        stages and up again, and what turns around stays on its stage.
        """
        blocked = 2 * (1 - self.own.p2p_overlap)
        seconds = self.seconds(mesh, strategy, micro_batch)
        if folds:
            links = [0.0, *seconds[:-1], 0.0]
            legs = num_chunks // 2
            return tuple(
                legs * blocked * (links[stage] + links[stage + 1]) for stage in range(mesh.pp)
            )
        held_up = [num_chunks * blocked * each for each in seconds]
        held_up[-1] -= blocked * seconds[-1]
        return tuple(held_up)
