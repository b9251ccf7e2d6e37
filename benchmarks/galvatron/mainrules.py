"""The cost rules of Hetu-Galvatron's main branch (June 2026)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.galvatron.sharedrules import (
    BACKWARD,
    CONTEXT_MIB,
    STATES,
    between,
    buffer_mib,
    element_bytes,
    ends_pass_ms,
    overlapped_ms,
    positions,
    states_factor,
)
from profiles.measured import Position
from profiles.units import MIB

if TYPE_CHECKING:
    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures
    from benchmarks.galvatron.strategy import Strategy, Vocab


@dataclass(frozen=True, slots=True)
class MainRules:
    """What layers, embedding and head cost where the batch is cut into ``chunks``."""

    case: Case
    figures: Figures
    chunks: int

    def samples(self, strategy: Strategy) -> int:
        """Of a micro-batch on each rank: what does not divide is not priced."""
        return self.case.global_batch // self.chunks // strategy.dp

    def layer_ms(self, kind: int, strategy: Strategy) -> tuple[float, float]:
        """One micro-batch of a layer with and without its gradient reduction.

        With TP six all-gathers of the whole activations, with Ulysses four all-to-alls, half as
        many again when recomputed, none hidden. ZeRO-3 adds one all-gather of the parameters, not
        hidden. Transfers between stages are shared out among all layers of the kind.
        """
        layer, links = self.figures.layers[kind], self.figures.links
        shape = self.case.kinds[kind]
        own = self.samples(strategy)
        message = own * shape.seq_len * shape.hidden_size * element_bytes(self.case) / MIB
        forward = layer.forward.at(own / strategy.degree)
        backward = forward * (BACKWARD + strategy.recompute)
        ranks = strategy.sharded
        reduced = 2 * (ranks - 1) / ranks * layer.parameter_mib / strategy.tp
        reduced *= 0.5 if self.case.half else 1.0
        ms_per_mb = links.ms_per_mb(ranks, neighbours=strategy.tp == 1)
        other = forward
        if strategy.tp > 1:
            other += links.gather[strategy.tp].at(message) * (9 if strategy.recompute else 6)
        elif strategy.sp > 1:
            other += links.all_to_all[strategy.sp].at(message) * (6 if strategy.recompute else 4)
        if strategy.zero3:
            other += 0.5 * reduced * ms_per_mb
        if strategy.pp > 1:
            other += strategy.pp * 2 * message * links.p2p_ms_per_mb(strategy.pp) / shape.count
        if strategy.dp == 1:
            return backward + other, backward + other
        both = overlapped_ms(reduced, ms_per_mb, backward, links.slowdown)
        return both + other, backward + other

    def layer_mib(self, kind: int, strategy: Strategy, stage: int) -> float:
        """States and activations of a layer on a stage."""
        layer = self.figures.layers[kind]
        states = STATES * layer.parameter_mib / strategy.tp
        if strategy.dp > 1:
            states *= states_factor(self.case, self.chunks, strategy.sharded, zero3=strategy.zero3)
        held = self.samples(strategy) * self.in_flight(strategy.pp, stage)
        if not strategy.recompute:
            return states + layer.activation_mib[strategy.degree] * held
        assert layer.recomputed_mib is not None
        split = strategy.sp > 1 or self.case.options["sequence_parallel"]
        return states + layer.recomputed_mib * held / (strategy.degree if split else 1)

    def in_flight(self, pp: int, stage: int) -> int:
        """Micro-batches whose activations a stage holds."""
        if pp == 1:
            return 1
        return self.chunks if self.case.options["pipeline_type"] == "gpipe" else pp - stage

    def ends_ms(self, vocab: Vocab) -> list[float]:
        """Embedding and head by stage, for one micro-batch without gradient reduction. The
        search's objective knows no other.
        """
        ends, links, split = self.figures.ends, self.figures.links, vocab.strategy
        own = self.samples(split)
        forward = ends.forward.at(own / split.degree / split.cp) / (1 if split.pp == 1 else 2)
        ranks = split.sharded
        ms_per_mb = links.ms_per_mb(ranks, neighbours=split.tp == 1) * (ranks - 1) / ranks
        width = self.case.kinds[0].hidden_size * element_bytes(self.case)
        gathers = [
            links.gather[split.tp].at(own * kind.seq_len * width / MIB) if split.tp > 1 else 0.0
            for kind in (self.case.kinds[0], self.case.kinds[-1])
        ]
        if split.pp == 1:
            gathers = [sum(gathers)]
        times = []
        for position, collectives in zip(positions(split.pp), gathers, strict=True):
            message = ends.state_mib[position][split.tp] / STATES
            message *= 0.5 if self.case.half else 1.0
            gather = message * ms_per_mb * 0.5 if split.zero3 else 0.0
            times.append(ends_pass_ms(forward, gather, gather, links.slowdown, collectives))
        return between(times, split.pp)

    def ends_mib(self, vocab: Vocab) -> list[float]:
        """States and activations of embedding and head, and the context, by stage."""
        ends, split = self.figures.ends, vocab.strategy
        factor = 1.0
        if split.dp > 1:
            factor = states_factor(self.case, self.chunks, split.sharded, zero3=split.zero3)
        used = []
        for position in positions(split.pp):
            stage = split.pp - 1 if position is Position.LAST else 0
            held = self.samples(split) * self.in_flight(split.pp, stage)
            states = ends.state_mib[position][split.tp] * factor
            used.append(states + ends.activation_mib[position][split.degree] * held)
        return [mib + CONTEXT_MIB for mib in between(used, split.pp)]

    def buffer_mib(self, pp: int, /, most: int, *, ulysses_only: bool) -> int:
        """The buffer of sequence parallelism: the whole activations of a micro-batch at the
        greatest degree, in whole MiB: rounded down, and up where one strategy serves all layers.
        """
        option = self.case.options
        if ulysses_only or not option["sequence_parallel"] or not option["global_memory_buffer"]:
            return 0
        replicas = self.case.world // pp // most
        size = buffer_mib(self.case, self.case.global_batch / self.chunks / replicas)
        return math.ceil(size) if self.case.coarse else int(size)
