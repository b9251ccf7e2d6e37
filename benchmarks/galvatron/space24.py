"""The space of v2.4.0: least and greatest degree, and SP or not, set the batch's cut and buffer."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.galvatron import rules24
from benchmarks.galvatron.mainrules import between
from benchmarks.galvatron.mainspace import recomputes
from benchmarks.galvatron.sharedrules import CONTEXT_MIB, STATES, states_factor
from benchmarks.galvatron.space import (
    Family,
    Vocab,
    degrees,
    even_cut,
    kinds_of_stages,
    measured_degrees,
)
from benchmarks.galvatron.strategy import Strategy
from profiles.measured import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures


def families(case: Case, figures: Figures) -> Iterator[Family]:
    """Every family; TP alone is contained in TP with SP, which has the same buffer."""
    option = case.options
    tried = [1] if option["disable_vtp"] else degrees(case.world, option["max_tp_deg"])
    tops = tried if option["global_memory_buffer"] else [option["max_tp_deg"]]
    both = option["sp_space"] == "tp+sp"
    most_pp = 1 if option["disable_pp"] else option["max_pp_deg"]
    for chunks in case.chunk_counts:
        for pp in degrees(case.world, most_pp):
            layers = strategies(case, figures, pp)
            for least in tried:
                cut = rules24.batching(case, pp, chunks, least)
                if cut is None:
                    continue
                for most in (top for top in tops if top >= least):
                    yield from _family(case, figures, layers, cut, most, "both" if both else "tp")
                    if both and option["global_memory_buffer"]:
                        yield from _family(case, figures, layers, cut, most, "sp")


def _family(
    case: Case,
    figures: Figures,
    layers: list[Strategy],
    cut: rules24.Batching,
    most: int,
    mode: str,
) -> Iterator[Family]:
    own = [
        each
        for each in layers
        if each.degree <= most and each.degree % cut.least == 0 and (mode != "sp" or each.tp == 1)
    ]
    if not own:
        return
    pp = own[0].pp
    vocabs = _vocabs(case, figures, pp, cut.least, most, mode)
    stages = stage_cut(case, figures, pp, cut)
    if not vocabs or min(stages) < 1:
        return
    times = np.array(
        [
            [rules24.layer_ms(case, figures, kind, each, cut.chunks) for each in own]
            for kind in range(len(case.kinds))
        ]
    )
    mib = [
        [
            [
                math.ceil(rules24.layer_mib(case, figures, kind, each, cut=cut, stage=stage))
                for each in own
            ]
            for kind in range(len(case.kinds))
        ]
        for stage in range(pp)
    ]
    buffered = case.options["sequence_parallel"] and (
        case.coarse or (case.options["global_memory_buffer"] and mode != "sp")
    )
    buffer = int(rules24.buffer_mib(case, cut, most)) if buffered else 0
    yield Family(
        pp=pp,
        chunks=cut.chunks,
        mode=mode,
        least=cut.least,
        most=most,
        cut=stages,
        counts=kinds_of_stages(case.kinds, stages),
        strategies=tuple(own),
        vocabs=tuple(vocabs),
        steady_ms=times[:, :, 1],
        sync_ms=times[:, :, 0] - times[:, :, 1],
        layer_mib=np.array(mib),
        ends_ms=np.array(
            [
                rules24.ends_ms(case, figures, each.strategy, cut=cut, ulysses=each.ulysses)
                for each in vocabs
            ]
        ),
        fixed_mib=np.array(
            [
                [
                    math.ceil(used) + buffer
                    for used in rules24.ends_mib(case, figures, each.strategy, cut)
                ]
                for each in vocabs
            ]
        ),
        pairs=tuple(product(range(len(vocabs)), range(len(own)))) if case.coarse else (),
    )


def _vocabs(case: Case, figures: Figures, pp: int, least: int, most: int, mode: str) -> list[Vocab]:
    """Degrees from ``least`` to ``most``, by TP or by SP, with or without ZeRO-3."""
    per_stage = case.world // pp
    ways = {"tp": (False,), "sp": (True,), "both": (False, True)}[mode]
    known = figures.ends.degrees(1) & figures.ends.degrees(2)
    shards = (False,) if case.options["disable_sdp"] else (False, True)
    curves = case.options["sp_space"] == "tp+sp"
    return [
        Vocab(Strategy(pp, *((1, k) if ulysses else (k, 1)), 1, per_stage // k, zero3), ulysses)
        for ulysses in ways
        for k in degrees(per_stage, most)
        if k % least == 0 and k in known
        if k == 1 or ulysses or not curves or k in figures.links.gather
        for zero3 in shards
    ]  # fmt: skip


def strategies(case: Case, figures: Figures, pp: int) -> list[Strategy]:
    """Every strategy of a layer on one of ``pp`` stages."""
    option, per_stage = case.options, case.world // pp
    found: dict[Strategy, None] = {}
    curves = option["sp_space"] == "tp+sp"
    for ulysses in (False, True) if curves else (False,):
        known = measured_degrees(figures, curves=curves, ulysses=ulysses)
        for degree in degrees(per_stage, 1 if option["disable_tp"] else option["max_tp_deg"]):
            if degree not in known:
                continue
            tp, sp = (1, degree) if ulysses else (degree, 1)
            dp = per_stage // degree
            apart = degree > 1 and dp > 1 and not option["disable_tp_consec"]
            sides = (True, False) if apart else (True,)
            for zero3 in _shards(case, dp):
                for recompute in (False, True) if recomputes(case, figures) else (False,):
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


def stage_cut(case: Case, figures: Figures, pp: int, cut: rules24.Batching) -> tuple[int, ...]:
    """Equal stages where all layers are alike; else balanced by the memory of plain data
    parallelism under GPipe, in the peer's greedy way.
    """
    if pp == 1 or len(case.kinds) == 1:
        return even_cut(case.num_layers, pp)
    return _balanced(*_plain_mib(case, figures, pp, cut))


def _plain_mib(
    case: Case, figures: Figures, pp: int, cut: rules24.Batching
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
