"""The cost rules of Hetu-Galvatron v2.4.0.

They differ from main's: samples are not rounded; the smallest TP degree in use, ``least``, sets
how the batch is cut into micro-batches; a large TP degree lets only half of the backward pass hide
the reduction; collectives are looked up only where SP is searched too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from benchmarks.galvatron.mainrules import between, positions
from benchmarks.galvatron.sharedrules import (
    BACKWARD,
    CONTEXT_MIB,
    STATES,
    element_bytes,
    ends_pass_ms,
    overlapped_ms,
    states_factor,
)
from profiles.measured import Position
from profiles.units import MIB

if TYPE_CHECKING:
    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures
    from benchmarks.galvatron.strategy import Strategy


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
    return (
        Batching(least, chunks, local, micro_batch) if -(-local // micro_batch) == chunks else None
    )


def layer_ms(
    case: Case, figures: Figures, kind: int, strategy: Strategy, chunks: int
) -> tuple[float, float]:
    """One micro-batch of a layer with and without its gradient reduction."""
    layer, shape, links = figures.layers[kind], case.kinds[kind], figures.links
    own = case.global_batch / chunks / strategy.dp
    message = own * shape.seq_len * shape.hidden_size * element_bytes(case) / MIB
    forward = layer.forward.at(own / strategy.degree)
    backward = forward * (BACKWARD + strategy.recompute)
    reduced = 2 * (strategy.dp - 1) / strategy.dp * layer.parameter_mib / strategy.tp
    reduced *= 0.5 if case.half else 1.0
    near = strategy.sp > 1 or strategy.tp == 1 or not strategy.neighbours
    ms_per_mb = links.ms_per_mb(strategy.sharded, neighbours=near)
    other = forward
    if strategy.degree > 1:
        other += _split_ms(case, figures, strategy, message)
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


def _split_ms(case: Case, figures: Figures, strategy: Strategy, message: float) -> float:
    """Collectives of TP or Ulysses: four, and two more when recomputed."""
    links, times = figures.links, 6 if strategy.recompute else 4
    if case.options["sp_space"] == "tp+sp":
        curves = links.all_to_all if strategy.sp > 1 else links.gather
        return times * curves[strategy.degree].at(message)
    near = strategy.neighbours or strategy.dp == 1
    ms_per_mb = links.ms_per_mb(strategy.tp, neighbours=near)
    return 2 * (strategy.tp - 1) / strategy.tp * message * times * ms_per_mb


def layer_mib(
    case: Case, figures: Figures, kind: int, strategy: Strategy, *, cut: Batching, stage: int
) -> float:
    """States and activations of a layer on a stage. GPipe is priced with one micro-batch."""
    layer = figures.layers[kind]
    states = STATES * layer.parameter_mib / strategy.tp
    if strategy.dp > 1:
        states *= states_factor(case, cut.chunks, strategy.sharded, zero3=strategy.zero3)
    if strategy.pp > 1 and case.options["pipeline_type"] == "gpipe":
        held = float(cut.micro_batch)
    else:
        held = cut.part_in_flight(strategy.pp - stage) * case.global_batch / strategy.dp
    if not strategy.recompute:
        return states + layer.activation_mib[strategy.degree] * held
    assert layer.recomputed_mib is not None
    split = strategy.degree if case.options["sequence_parallel"] else 1
    return states + layer.recomputed_mib * held / split


def ends_ms(
    case: Case, figures: Figures, vocab: Strategy, *, cut: Batching, ulysses: bool
) -> list[float]:
    """Embedding and head by stage, for one micro-batch without gradient reduction.

    Both ends are priced with the states of one of them: the first with vocabulary TP, the last
    with vocabulary SP, ``ulysses`` (which may have the degree 1).
    """
    ends, links, pp = figures.ends, figures.links, vocab.pp
    forward = ends.forward.at(cut.micro_batch / cut.least) / (1 if pp == 1 else 2)
    per_stage = case.world // pp
    ranks = per_stage // vocab.tp
    near = vocab.tp == 1 or ranks == 1
    ms_per_mb = links.ms_per_mb(ranks, neighbours=near) * (ranks - 1) / ranks
    collectives = [_vocab_ms(case, figures, vocab, cut, kind.seq_len) for kind in case.kinds]
    spent = [collectives[0], collectives[-1]]
    if pp == 1:
        spent = [sum(collectives) + collectives[-1]]
    position = Position.ONLY if pp == 1 else Position.LAST if ulysses else Position.FIRST
    message = ends.state_mib[position][vocab.tp] / STATES
    gather = message * ms_per_mb * 0.5 if vocab.zero3 else 0.0
    return between(
        [ends_pass_ms(forward, gather, gather, links.slowdown, each) for each in spent], pp
    )


def _vocab_ms(case: Case, figures: Figures, vocab: Strategy, cut: Batching, seq_len: int) -> float:
    """Collectives of a vocabulary split by TP, for one kind of layers' sequence."""
    if vocab.tp == 1:
        return 0.0
    size = cut.micro_batch * seq_len * case.kinds[0].hidden_size * element_bytes(case) / MIB
    if case.options["sp_space"] == "tp+sp":
        return figures.links.gather[vocab.tp].line.at(size)
    ms_per_mb = figures.links.ms_per_mb(vocab.tp, neighbours=vocab.dp == 1)
    return (vocab.tp - 1) / vocab.tp * size * ms_per_mb


def ends_mib(case: Case, figures: Figures, vocab: Strategy, cut: Batching) -> list[float]:
    """States and activations of embedding and head, and the context, by stage."""
    pp = vocab.pp
    per_stage = case.world // pp
    factor = states_factor(case, cut.chunks, per_stage // vocab.tp, zero3=vocab.zero3)
    own = case.global_batch * vocab.degree / per_stage / cut.chunks
    used = []
    for position in positions(pp):
        first = position is Position.FIRST and case.options["pipeline_type"] != "gpipe"
        states = figures.ends.state_mib[position][vocab.tp] * factor
        held = figures.ends.activation_mib[position][vocab.degree] * own
        used.append(states + held * (pp if first else 1))
    return [mib + CONTEXT_MIB for mib in between(used, pp)]


def buffer_mib(case: Case, cut: Batching, most: int) -> float:
    """The buffer of Megatron's sequence parallelism, in two bytes whatever the precision."""
    longest = max(kind.seq_len for kind in case.kinds)
    return cut.micro_batch / cut.least * most * case.kinds[0].hidden_size * longest * 2 / MIB
