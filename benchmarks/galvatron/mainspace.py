"""The space of main: for each number of micro-batches and stages, TP and SP up to a degree that
sets the buffer, or SP alone without a buffer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.galvatron import mainrules
from benchmarks.galvatron.space import (
    Family,
    Vocab,
    degrees,
    even_cut,
    kinds_of_stages,
    measured_degrees,
)
from benchmarks.galvatron.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures


def families(case: Case, figures: Figures) -> Iterator[Family]:
    """Every family; TP alone is contained in TP with SP, which has the same buffer."""
    most_pp = 1 if case.options["disable_pp"] else case.options["max_pp_deg"]
    for chunks in case.chunk_counts:
        for pp in degrees(case.world, most_pp):
            if pp <= min(chunks, case.num_layers):
                yield from _families_of(case, figures, pp, chunks)


def _families_of(case: Case, figures: Figures, pp: int, chunks: int) -> Iterator[Family]:
    layers = [
        each for each in strategies(case, figures, pp) if each.dp <= case.global_batch // chunks
    ]
    if not layers:
        return
    cut = even_cut(case.num_layers, pp)
    costs = [
        [mainrules.layer_ms(case, figures, kind, each, chunks) for each in layers]
        for kind in range(len(case.kinds))
    ]
    times = np.array(costs)
    mib = np.array(
        [
            [
                [
                    math.ceil(
                        mainrules.layer_mib(case, figures, kind, each, chunks=chunks, stage=stage)
                    )
                    for each in layers
                ]
                for kind in range(len(case.kinds))
            ]
            for stage in range(pp)
        ]
    )
    most = max(each.degree for each in layers)
    modes = [("sp", most)]
    modes += [("both", degree) for degree in sorted({each.degree for each in layers})]
    for mode, degree in modes:
        own = [
            index
            for index, each in enumerate(layers)
            if each.degree <= degree and (mode == "both" or each.tp == 1)
        ]
        if not own:
            continue
        chosen = [layers[index] for index in own]
        vocabs = _own_vocabs(chosen) if case.coarse else _vocabs(case, figures, chosen)
        if not vocabs:
            continue
        buffered = mode == "both" and case.options["sequence_parallel"]
        buffered = buffered and case.options["global_memory_buffer"]
        buffer = mainrules.buffer_mib(case, pp, chunks, degree) if buffered else 0.0
        yield Family(
            pp=pp,
            chunks=chunks,
            mode=mode,
            least=1,
            most=degree,
            cut=cut,
            counts=kinds_of_stages(case.kinds, cut),
            strategies=tuple(chosen),
            vocabs=tuple(vocabs),
            steady_ms=times[:, own, 1],
            sync_ms=times[:, own, 0] - times[:, own, 1],
            layer_mib=mib[:, :, own],
            ends_ms=np.array(
                [mainrules.ends_ms(case, figures, each.strategy, chunks) for each in vocabs]
            ),
            fixed_mib=np.array(
                [
                    [
                        math.ceil(used) + _whole(case, buffer)
                        for used in mainrules.ends_mib(case, figures, each.strategy, chunks)
                    ]
                    for each in vocabs
                ]
            ),
            pairs=tuple((index, index) for index in range(len(own))) if case.coarse else (),
        )


def _whole(case: Case, buffer: float) -> int:
    """The buffer in whole MiB: rounded down, and up where one strategy serves all layers."""
    return math.ceil(buffer) if case.coarse else int(buffer)


def _own_vocabs(layers: list[Strategy]) -> list[Vocab]:
    """In coarse mode embedding and head take the layers' strategy."""
    return [Vocab(each._replace(recompute=False), each.sp > 1) for each in layers]


def _vocabs(case: Case, figures: Figures, layers: list[Strategy]) -> list[Vocab]:
    """Embedding and head take any layer's degrees, less what is switched off for them."""
    off_tp = case.options["disable_embedding_lmhead_tp"]
    off_sp = case.options["disable_embedding_lmhead_sp"]
    found = dict.fromkeys(
        each._replace(recompute=False)
        for each in layers
        if not (off_tp and each.tp > 1) and not (off_sp and each.sp > 1)
    )
    known = figures.ends.degrees(layers[0].pp)
    return [
        Vocab(each, each.sp > 1)
        for each in found
        if each.degree in known and (each.tp == 1 or case.options["sequence_parallel"])
    ]


def strategies(case: Case, figures: Figures, pp: int) -> list[Strategy]:
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
                    for recompute in (False, True) if recomputes(case, figures) else (False,):
                        found[Strategy(pp, tp, sp, cp, dp, zero3, recompute)] = None
    return list(found)


def recomputes(case: Case, figures: Figures) -> bool:
    known = all(layer.recomputed_mib is not None for layer in figures.layers)
    return known and not case.options["disable_ckpt"]
