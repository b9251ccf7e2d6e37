"""The space of main: for each number of micro-batches and stages, TP and SP up to a degree that
sets the buffer, or SP alone without a buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.galvatron.mainrules import MainRules
from benchmarks.galvatron.space import (
    Choices,
    Family,
    degrees,
    even_cut,
    measured_degrees,
    recomputations,
)
from benchmarks.galvatron.strategy import Strategy, Vocab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures


def families(case: Case, figures: Figures) -> Iterator[Family]:
    """Every family; TP alone is contained in TP with SP, which has the same buffer."""
    most_pp = 1 if case.options["disable_pp"] else case.options["max_pp_deg"]
    offered = {pp: strategies_of(case, figures, pp) for pp in degrees(case.world, most_pp)}
    for chunks in case.chunk_counts:
        for pp, layers in offered.items():
            if pp <= min(chunks, case.num_layers):
                yield from _families_of(case, figures, chunks, layers)


def _families_of(
    case: Case, figures: Figures, chunks: int, strategies: list[Strategy]
) -> Iterator[Family]:
    samples = case.global_batch // chunks
    layers = [each for each in strategies if each.dp <= samples]
    if not layers:
        return
    rules = MainRules(case, figures, chunks)
    choices = Choices.of(rules, case, even_cut(case.num_layers, layers[0].pp), layers)
    offered = sorted({each.degree for each in layers})
    for most, ulysses_only in [(offered[-1], True), *((degree, False) for degree in offered)]:
        own = [
            index
            for index, each in enumerate(layers)
            if each.degree <= most and (each.tp == 1 or not ulysses_only)
        ]
        if case.coarse:  # embedding and head take the layers' strategy
            own = [index for index in own if _vocabs(case, figures, [layers[index]], free=False)]
        chosen = [layers[index] for index in own]
        vocabs = _vocabs(case, figures, chosen, free=not case.coarse)
        if vocabs:
            yield choices.family(
                vocabs,
                own,
                ulysses_only=ulysses_only,
                least=1,
                most=most,
                pairs=[(number, number) for number in range(len(own))] if case.coarse else (),
            )


def _vocabs(case: Case, figures: Figures, layers: list[Strategy], *, free: bool) -> list[Vocab]:
    """Embedding and head split as layers are, one for each layer or, where they are ``free``,
    every different way that is not switched off for them. A vocabulary under TP is only priced
    with sequence parallelism.
    """
    off_tp = free and case.options["disable_embedding_lmhead_tp"]
    off_sp = free and case.options["disable_embedding_lmhead_sp"]
    ways = [each._replace(recompute=False) for each in layers]
    return [
        Vocab(each, each.sp > 1)
        for each in (dict.fromkeys(ways) if free else ways)
        if not (off_tp and each.tp > 1) and not (off_sp and each.sp > 1)
        if figures.ends.covers(each) and (each.tp == 1 or case.options["sequence_parallel"])
    ]


def strategies_of(case: Case, figures: Figures, pp: int) -> list[Strategy]:
    """Every strategy of a layer on one of ``pp`` stages."""
    option, per_stage = case.options, case.world // pp
    most = {
        "tp": 1 if option["disable_tp"] else option["max_tp_deg"],
        "sp": 1 if option["disable_sp"] else option["max_sp_deg"],
        "cp": 1 if option["disable_cp"] else option["max_cp_deg"],
    }
    limit = per_stage if option["max_tp_deg"] == -1 else min(per_stage, option["max_tp_deg"])
    found: dict[Strategy, None] = {}
    for kind in ("tp", "sp"):
        known = measured_degrees(figures, curves=True, ulysses=kind == "sp")
        for degree in degrees(per_stage, most[kind]):
            if degree > limit or degree not in known:
                continue
            for cp in degrees(per_stage // degree, most["cp"]):
                dp = per_stage // degree // cp
                if option["disable_dp"] and dp > 1:
                    continue
                tp, sp = (degree, 1) if kind == "tp" else (1, degree)
                for zero3 in (False, True) if dp > 1 and not option["disable_fsdp"] else (False,):
                    for recompute in recomputations(case, figures):
                        found[Strategy(pp, tp, sp, cp, dp, zero3, recompute)] = None
    return list(found)
