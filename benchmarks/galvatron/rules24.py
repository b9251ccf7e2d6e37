"""The cost rules of Hetu-Galvatron v2.4.0.

They differ from main's: samples are not rounded; the smallest TP degree in use, ``least``, sets
how the batch is cut into micro-batches; a large TP degree lets only half of the backward pass hide
the reduction; collectives are looked up only where SP is searched too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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


class Batching(NamedTuple):
    """How one replica of ``least`` x pp GPUs cuts its ``local`` samples into ``chunks``."""

    least: int
    chunks: int
    local: int
    micro_batch: int  # the largest

    def part_in_flight(self, stages: int) -> float:
        """Part of the samples that a stage ``stages`` before the pipeline's end holds."""
        return min(min(stages, self.chunks) * self.micro_batch, self.local) / self.local


def batching(case: Case, pp: int, chunks: int, least: int) -> Batching | None:
    """None where the batch cannot be cut so."""
    if case.world % (pp * least):
        return None
    replicas = case.world // pp // least
    local = case.global_batch // replicas
    if case.global_batch % replicas or chunks > local:
        return None
    micro_batch = -(-local // chunks)
    if -(-local // micro_batch) != chunks:
        return None
    return Batching(least, chunks, local, micro_batch)


@dataclass(frozen=True, slots=True)
class Rules24:
    """What layers, embedding and head cost where the batch is cut so."""

    case: Case
    figures: Figures
    cut: Batching

    @property
    def chunks(self) -> int:
        """Micro-batches."""
        return self.cut.chunks

    def layer_ms(self, kind: int, strategy: Strategy) -> tuple[float, float]:
        """One micro-batch of a layer with and without its gradient reduction."""
        layer, links = self.figures.layers[kind], self.figures.links
        shape = self.case.kinds[kind]
        own = self.case.global_batch / self.chunks / strategy.dp
        message = own * shape.seq_len * shape.hidden_size * element_bytes(self.case) / MIB
        forward = layer.forward.at(own / strategy.degree)
        backward = forward * (BACKWARD + strategy.recompute)
        reduced = 2 * (strategy.dp - 1) / strategy.dp * layer.parameter_mib / strategy.tp
        reduced *= 0.5 if self.case.half else 1.0
        near = strategy.tp == 1 or not strategy.neighbours
        ms_per_mb = links.ms_per_mb(strategy.sharded, neighbours=near)
        other = forward
        if strategy.degree > 1:
            other += self._split_ms(strategy, message)
        if strategy.zero3:
            other += 0.5 * reduced * ms_per_mb
        if strategy.pp > 1:
            other += strategy.pp * 2 * message * links.p2p_ms_per_mb(strategy.pp) / shape.count
        if strategy.dp == 1:
            return backward + other, backward + other
        large = strategy.degree > 1 and strategy.degree >= strategy.degree * strategy.dp // 2
        alone = backward / 2 if large else 0.0
        both = alone + overlapped_ms(reduced, ms_per_mb, backward - alone, links.slowdown)
        return both + other, backward + other

    def _split_ms(self, strategy: Strategy, message: float) -> float:
        """Collectives of TP or Ulysses: four, and two more when recomputed."""
        links, times = self.figures.links, 6 if strategy.recompute else 4
        if self.case.options["sp_space"] == "tp+sp":
            curves = links.all_to_all if strategy.sp > 1 else links.gather
            return times * curves[strategy.degree].at(message)
        near = strategy.neighbours or strategy.dp == 1
        degree = strategy.degree
        ms_per_mb = links.ms_per_mb(degree, neighbours=near)
        return 2 * (degree - 1) / degree * message * times * ms_per_mb

    def layer_mib(self, kind: int, strategy: Strategy, stage: int) -> float:
        """States and activations of a layer on a stage. GPipe is priced with one micro-batch."""
        layer, cut = self.figures.layers[kind], self.cut
        states = STATES * layer.parameter_mib / strategy.tp
        if strategy.dp > 1:
            states *= states_factor(self.case, self.chunks, strategy.sharded, zero3=strategy.zero3)
        if strategy.pp > 1 and self.case.options["pipeline_type"] == "gpipe":
            held = float(cut.micro_batch)
        else:
            part = cut.part_in_flight(strategy.pp - stage)
            held = part * self.case.global_batch / strategy.dp
        if not strategy.recompute:
            return states + layer.activation_mib[strategy.degree] * held
        assert layer.recomputed_mib is not None
        split = strategy.degree if self.case.options["sequence_parallel"] else 1
        return states + layer.recomputed_mib * held / split

    def ends_ms(self, vocab: Vocab) -> list[float]:
        """Embedding and head by stage, for one micro-batch without gradient reduction.

        Both ends are priced with the states of one of them: the first with vocabulary TP, the
        last with vocabulary SP.
        """
        ends, links, split = self.figures.ends, self.figures.links, vocab.strategy
        pp = split.pp
        forward = ends.forward.at(self.cut.micro_batch / self.cut.least) / (1 if pp == 1 else 2)
        ranks = self.case.world // pp // split.tp
        near = split.tp == 1 or ranks == 1
        ms_per_mb = links.ms_per_mb(ranks, neighbours=near) * (ranks - 1) / ranks
        collectives = [self._vocab_ms(split, kind.seq_len) for kind in self.case.kinds]
        spent = [collectives[0], collectives[-1]]
        if pp == 1:
            spent = [sum(collectives) + collectives[-1]]
        position = Position.LAST if vocab.ulysses else Position.FIRST
        message = ends.state_mib[Position.ONLY if pp == 1 else position][split.tp] / STATES
        gather = message * ms_per_mb * 0.5 if split.zero3 else 0.0
        times = [ends_pass_ms(forward, gather, gather, links.slowdown, each) for each in spent]
        return between(times, pp)

    def _vocab_ms(self, split: Strategy, seq_len: int) -> float:
        """Collectives of a vocabulary split by TP, for one kind of layers' sequence."""
        if split.tp == 1:
            return 0.0
        links, width = self.figures.links, self.case.kinds[0].hidden_size
        size = self.cut.micro_batch * seq_len * width * element_bytes(self.case) / MIB
        if self.case.options["sp_space"] == "tp+sp":
            return links.gather[split.tp].line.at(size)
        ms_per_mb = links.ms_per_mb(split.tp, neighbours=split.dp == 1)
        return (split.tp - 1) / split.tp * size * ms_per_mb

    def ends_mib(self, vocab: Vocab) -> list[float]:
        """States and activations of embedding and head, and the context, by stage."""
        ends, split = self.figures.ends, vocab.strategy
        per_stage = self.case.world // split.pp
        factor = states_factor(self.case, self.chunks, per_stage // split.tp, zero3=split.zero3)
        own = self.case.global_batch * split.degree / per_stage / self.chunks
        used = []
        for position in positions(split.pp):
            first = position is Position.FIRST and self.case.options["pipeline_type"] != "gpipe"
            states = ends.state_mib[position][split.tp] * factor
            held = ends.activation_mib[position][split.degree] * own
            used.append(states + held * (split.pp if first else 1))
        return [mib + CONTEXT_MIB for mib in between(used, split.pp)]

    def buffer_mib(self, _pp: int, /, most: int, *, ulysses_only: bool) -> int:
        """The buffer of sequence parallelism in whole MiB; in coarse mode it is always there."""
        option = self.case.options
        wanted = self.case.coarse or (option["global_memory_buffer"] and not ulysses_only)
        if not option["sequence_parallel"] or not wanted:
            return 0
        return int(buffer_mib(self.case, self.cut.micro_batch / self.cut.least * most))
