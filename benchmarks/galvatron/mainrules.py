"""The cost rules of Hetu-Galvatron's main branch (June 2026)."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def samples(case: Case, chunks: int, strategy: Strategy) -> int:
    """Samples of a micro-batch on each rank: what does not divide is not priced."""
    return case.global_batch // chunks // strategy.dp


def layer_ms(
    case: Case, figures: Figures, kind: int, strategy: Strategy, chunks: int
) -> tuple[float, float]:
    """One micro-batch of a layer with and without its gradient reduction.

    With TP six all-gathers of the whole activations, with Ulysses four all-to-alls, half as many
    again when recomputed, none hidden. ZeRO-3 adds one all-gather of the parameters, not hidden.
    """
    layer, shape, links = figures.layers[kind], case.kinds[kind], figures.links
    own = samples(case, chunks, strategy)
    message = own * shape.seq_len * shape.hidden_size * element_bytes(case) / MIB
    forward = layer.forward.at(own / strategy.degree)
    backward = forward * (BACKWARD + strategy.recompute)
    ranks = strategy.sharded
    reduced = 2 * (ranks - 1) / ranks * layer.parameter_mib / strategy.tp
    reduced *= 0.5 if case.half else 1.0
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


def layer_mib(
    case: Case, figures: Figures, kind: int, strategy: Strategy, *, chunks: int, stage: int
) -> float:
    """States and activations of a layer on a stage."""
    layer = figures.layers[kind]
    states = STATES * layer.parameter_mib / strategy.tp
    if strategy.dp > 1:
        states *= states_factor(case, chunks, strategy.sharded, zero3=strategy.zero3)
    held = samples(case, chunks, strategy) * in_flight(case, strategy.pp, chunks, stage)
    if not strategy.recompute:
        return states + layer.activation_mib[strategy.degree] * held
    assert layer.recomputed_mib is not None
    split = strategy.sp > 1 or case.options["sequence_parallel"]
    return states + layer.recomputed_mib * held / (strategy.degree if split else 1)


def in_flight(case: Case, pp: int, chunks: int, stage: int) -> int:
    """Micro-batches whose activations a stage holds."""
    if pp == 1:
        return 1
    return chunks if case.options["pipeline_type"] == "gpipe" else pp - stage


def ends_ms(case: Case, figures: Figures, vocab: Strategy, chunks: int) -> list[float]:
    """Embedding and head by stage, for one micro-batch without gradient reduction. The search's
    objective knows no other.
    """
    ends, links = figures.ends, figures.links
    own = samples(case, chunks, vocab)
    forward = ends.forward.at(own / vocab.degree / vocab.cp) / (1 if vocab.pp == 1 else 2)
    ranks = vocab.sharded
    ms_per_mb = links.ms_per_mb(ranks, neighbours=vocab.tp == 1) * (ranks - 1) / ranks
    width = case.kinds[0].hidden_size * element_bytes(case)
    gathers = [
        links.gather[vocab.tp].at(own * kind.seq_len * width / MIB) if vocab.tp > 1 else 0.0
        for kind in (case.kinds[0], case.kinds[-1])
    ]
    if vocab.pp == 1:
        gathers = [sum(gathers)]
    times = []
    for position, collectives in zip(positions(vocab.pp), gathers, strict=True):
        message = ends.state_mib[position][vocab.tp] / STATES * (0.5 if case.half else 1.0)
        gather = message * ms_per_mb * 0.5 if vocab.zero3 else 0.0
        times.append(ends_pass_ms(forward, gather, gather, links.slowdown, collectives))
    return between(times, vocab.pp)


def ends_mib(case: Case, figures: Figures, vocab: Strategy, chunks: int) -> list[float]:
    """States and activations of embedding and head, and the context, by stage."""
    factor = 1.0
    if vocab.dp > 1:
        factor = states_factor(case, chunks, vocab.sharded, zero3=vocab.zero3)
    own = samples(case, chunks, vocab)
    used = []
    for position in positions(vocab.pp):
        stage = vocab.pp - 1 if position is Position.LAST else 0
        held = own * in_flight(case, vocab.pp, chunks, stage)
        states = figures.ends.state_mib[position][vocab.tp] * factor
        used.append(states + figures.ends.activation_mib[position][vocab.degree] * held)
    return [mib + CONTEXT_MIB for mib in between(used, vocab.pp)]


def positions(pp: int) -> list[Position]:
    """Where embedding and head lie."""
    return [Position.ONLY] if pp == 1 else [Position.FIRST, Position.LAST]


def between(ends: list[float], pp: int) -> list[float]:
    """Figures of the ends by stage: nothing on the stages between."""
    return ends if pp == 1 else [ends[0], *[0.0] * (pp - 2), ends[1]]


def buffer_mib(case: Case, pp: int, chunks: int, degree: int) -> float:
    """The buffer of Megatron's sequence parallelism: the whole activations of a micro-batch at
    the greatest degree, in two bytes whatever the precision.
    """
    own = case.global_batch / chunks / (case.world // pp // degree)
    longest = max(kind.seq_len for kind in case.kinds)
    return own * case.kinds[0].hidden_size * longest * 2 / MIB
