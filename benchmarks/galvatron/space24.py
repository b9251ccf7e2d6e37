"""The space of v2.4.0: least and greatest degree, and SP or not, set the batch's cut and buffer."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

from benchmarks.galvatron.rules24 import Rules24, batching
from benchmarks.galvatron.sharedrules import CONTEXT_MIB, STATES, between, states_factor
from benchmarks.galvatron.space import (
    Choices,
    Family,
    degrees,
    even_cut,
    measured_degrees,
    recomputations,
)
from benchmarks.galvatron.strategy import Strategy, Vocab
from profiles.measured import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures
    from benchmarks.galvatron.rules24 import Batching


ULYSSES: Final[dict[str, tuple[bool, ...]]] = {
    "tp": (False,),
    "sp": (True,),
    "tp+sp": (False, True),
}


def families(case: Case, figures: Figures) -> Iterator[Family]:
    """Every family; TP alone is contained in TP with SP, which has the same buffer."""
    option = case.options
    tried = [1] if option["disable_vtp"] else degrees(case.world, option["max_tp_deg"])
    most_pp = 1 if option["disable_pp"] else option["max_pp_deg"]
    for chunks in case.chunk_counts:
        for pp in degrees(case.world, most_pp):
            for least in tried:
                cut = batching(case, pp, chunks, least)
                if cut is not None:
                    yield from _families_of(case, figures, pp, cut, tried)


def _families_of(
    case: Case, figures: Figures, pp: int, cut: Batching, tried: list[int]
) -> Iterator[Family]:
    layers = [each for each in strategies(case, figures, pp) if each.degree % cut.least == 0]
    stages = stage_cut(case, figures, pp, cut)
    if not layers or min(stages) < 1:
        return
    choices = Choices.of(Rules24(case, figures, cut), case, stages, layers)
    buffered = case.options["global_memory_buffer"]
    tops = [top for top in tried if top >= cut.least] if buffered else [max(tried)]
    ways = ULYSSES[case.options["sp_space"]]
    for most, ulysses_only in product(tops, ways if buffered else ways[:1]):
        own = [
            index
            for index, each in enumerate(layers)
            if each.degree <= most and (each.tp == 1 or not ulysses_only)
        ]
        vocabs = [
            vocab
            for ulysses in ((True,) if ulysses_only else ways)
            for vocab in _vocabs(case, figures, pp, cut.least, most, ulysses=ulysses)
        ]
        if own and vocabs:
            yield choices.family(
                vocabs,
                own,
                ulysses_only=ulysses_only,
                least=cut.least,
                most=most,
                pairs=[*product(range(len(vocabs)), range(len(own)))] if case.coarse else (),
            )


def _vocabs(
    case: Case, figures: Figures, pp: int, least: int, most: int, *, ulysses: bool
) -> Iterator[Vocab]:
    """Degrees from ``least`` to ``most``, with or without ZeRO-3."""
    per_stage = case.world // pp
    looked_up = case.options["sp_space"] == "tp+sp" and not ulysses
    for degree in degrees(per_stage, most):
        split = Strategy(pp, degree, 1, 1, per_stage // degree, zero3=False)
        known = all(figures.ends.covers(split._replace(pp=stages)) for stages in (1, 2))
        if degree % least or not known or (looked_up and degree not in {1, *figures.links.gather}):
            continue
        if ulysses:
            split = split._replace(tp=1, sp=degree)
        for zero3 in (False,) if case.options["disable_sdp"] else (False, True):
            yield Vocab(split._replace(zero3=zero3), ulysses)


def strategies(case: Case, figures: Figures, pp: int) -> list[Strategy]:
    """Every strategy of a layer on one of ``pp`` stages."""
    option, per_stage = case.options, case.world // pp
    found: dict[Strategy, None] = {}
    curves = option["sp_space"] == "tp+sp"
    for ulysses in ULYSSES[option["sp_space"]]:
        known = measured_degrees(figures, curves=curves, ulysses=ulysses)
        for degree in degrees(per_stage, 1 if option["disable_tp"] else option["max_tp_deg"]):
            if degree not in known:
                continue
            tp, sp = (1, degree) if ulysses else (degree, 1)
            dp = per_stage // degree
            apart = degree > 1 and dp > 1 and not option["disable_tp_consec"]
            sides = (True, False) if apart else (True,)
            for zero3 in _shards(case, dp):
                for recompute in recomputations(case, figures):
                    for near in sides:
                        found[Strategy(pp, tp, sp, 1, dp, zero3, recompute, near)] = None
    return list(found)


def _shards(case: Case, dp: int) -> tuple[bool, ...]:
    if dp == 1:
        return (False,)
    without = case.options["disable_sdp"] or case.options["disable_fsdp"]
    return tuple(
        zero3 for zero3, off in ((False, case.options["disable_dp"]), (True, without)) if not off
    )


def stage_cut(case: Case, figures: Figures, pp: int, cut: Batching) -> tuple[int, ...]:
    """Equal stages where all layers are alike; else balanced by the memory of plain data
    parallelism under GPipe, in the peer's greedy way.
    """
    if pp == 1 or len(case.kinds) == 1:
        return even_cut(case.num_layers, pp)
    return _balanced(*_plain_mib(case, figures, pp, cut))


def _plain_mib(
    case: Case, figures: Figures, pp: int, cut: Batching
) -> tuple[list[float], list[float]]:
    """MiB of each layer, and of embedding and head by stage, without any sharding of layers."""
    per_stage = case.world // pp
    local = case.global_batch // per_stage
    chunks = max(1, min(-(-local // cut.micro_batch), local))
    held = -(-local // chunks)
    layers = [
        STATES * figure.parameter_mib + figure.activation_mib[1] * held
        for kind, figure in zip(case.kinds, figures.layers, strict=True)
        for _ in range(kind.count)
    ]
    factor = states_factor(case, chunks, per_stage, zero3=False)
    own = case.global_batch / per_stage / chunks
    ends = [
        figures.ends.state_mib[at][1] * factor + figures.ends.activation_mib[at][1] * own
        for at in (Position.FIRST, Position.LAST)
    ]
    return layers, [mib + CONTEXT_MIB for mib in between(ends, pp)]


def _balanced(layers: list[float], ends: list[float]) -> tuple[int, ...]:
    """Fill each stage to the mean, then move layers on from stages 30 % above it, then see that
    no stage is empty.
    """
    pp, mean = len(ends), (sum(layers) + sum(ends)) / len(ends)
    lengths, used, index = [0] * pp, list(ends), 0
    for stage in range(pp):
        while index < len(layers):
            if stage < pp - 1 and mean - used[stage] < 0.5 * layers[index]:
                break
            used[stage] += layers[index]
            index += 1
            lengths[stage] += 1
    for stage in range(pp - 1):
        start = sum(lengths[:stage])
        stop = start + lengths[stage]
        held = sum(layers[start:stop]) + ends[stage]
        while held > mean * 1.3 and lengths[stage] > 0:
            lengths[stage] -= 1
            lengths[stage + 1] += 1
            stop -= 1
            held -= layers[stop]
    for stage in range(pp - 1):
        while lengths[stage] <= 0:
            lengths[stage] += 1
            lengths[stage + 1] -= 1
    for stage in range(pp - 1, 0, -1):
        while lengths[stage] <= 0:
            lengths[stage] += 1
            lengths[stage - 1] -= 1
    return tuple(lengths)
