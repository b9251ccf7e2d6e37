"""A plan of either side, costed layer by layer: the check of what the search says of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.galvatron import mainrules, rules24
from benchmarks.galvatron.sharedrules import iteration
from benchmarks.galvatron.space import Vocab
from benchmarks.galvatron.strategy import Strategy, parse_strategy

if TYPE_CHECKING:
    from benchmarks.galvatron.best import Chosen
    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures

ULYSSES_ONLY = 2  # v2.4.0's number of the space with SP alone


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy for every layer. ``buffered``: whether the buffer of sequence parallelism is
    set aside, for the degree ``most``; ``least`` as in ``rules24``.
    """

    chunks: int
    cut: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    vocab: Vocab
    least: int
    most: int
    buffered: bool

    def text(self) -> str:
        """Layers in short form, embedding and head."""
        runs = [f"{len(list(own))} x {name}" for name, own in groupby(map(str, self.strategies))]
        return f"c{self.chunks} {', '.join(runs)}, vocabulary {self.vocab}"

    def config(self, case: Case) -> dict[str, Any]:
        """The plan file that Galvatron's runtime reads."""

        def row(values: list[int]) -> str:
            return ",".join(map(str, values))

        return {
            "pp_deg": len(self.cut),
            "tp_sizes_enc": row([each.degree for each in self.strategies]),
            "tp_consecutive_flags": row([int(each.neighbours) for each in self.strategies]),
            "dp_types_enc": row([int(each.zero3) for each in self.strategies]),
            "use_sp": row([int(each.sp > 1) for each in self.strategies]),
            "cp_sizes_enc": row([each.cp for each in self.strategies]),
            "checkpoint": row([int(each.recompute) for each in self.strategies]),
            "world_size": case.world,
            "global_bsz": case.global_batch,
            "chunks": self.chunks,
            "pp_division": row(list(self.cut)),
            "pipeline_type": case.options["pipeline_type"],
            "default_dp_type": case.options["default_dp_type"],
            "vtp": self.vocab.strategy.degree,
            "vsp": int(self.vocab.ulysses),
            "embed_sdp": int(self.vocab.strategy.zero3),
        }


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the rules say of a plan; ``memory_mib`` by stage, the allocator's reserve included."""

    iteration_s: float
    memory_mib: tuple[int, ...]


def plan_of(chosen: Chosen) -> Plan:
    """The plan that the search chose."""
    family = chosen.family
    return Plan(
        chunks=family.chunks,
        cut=family.cut,
        strategies=tuple(chosen.strategies()),
        vocab=chosen.vocab_split,
        least=family.least,
        most=family.most,
        buffered=family.mode != "sp",
    )


def recorded_plan(case: Case, task: dict[str, Any]) -> Plan:
    """The plan of one of the peer's sub-searches, as recorded."""
    strategies = tuple(parse_strategy(text, engine=case.engine) for text in task["plan"])
    pp = strategies[0].pp
    if case.engine == "main":
        degree, ulysses = task["vocab"]["tp_sp"], bool(task["vocab"]["sp"])
        zero3, chunks, least = bool(task["vocab"]["sdp"]), task["chunks"], 1
        each = case.num_layers // pp
        cut = (*[each] * (pp - 1), case.num_layers - each * (pp - 1))
        buffered = task["mode"] != "sp_only"
    else:
        degree, ulysses, zero3 = task["vtp"], bool(task["vsp"]), bool(task["embed_sdp"])
        chunks, least, cut = task["chunk"], task["min_tp"], tuple(task["pp_stage_dict"][str(pp)])
        buffered = task["sp_search"] != ULYSSES_ONLY
    dp = case.world // pp // degree
    split = Strategy(pp, 1 if ulysses else degree, degree if ulysses else 1, 1, dp, zero3)
    return Plan(
        chunks=chunks,
        cut=cut,
        strategies=strategies,
        vocab=Vocab(split, ulysses),
        least=least,
        most=task["max_tp"],
        buffered=buffered,
    )


def cost(case: Case, figures: Figures, plan: Plan) -> Cost:
    """A plan under the rules of the case's engine."""
    rules = _main if case.engine == "main" else _v24
    return rules(case, figures, plan)


def _main(case: Case, figures: Figures, plan: Plan) -> Cost:
    vocab, chunks, pp = plan.vocab.strategy, plan.chunks, len(plan.cut)
    buffer = 0.0
    if plan.buffered and case.options["sequence_parallel"] and case.options["global_memory_buffer"]:
        buffer = mainrules.buffer_mib(case, pp, chunks, plan.most)
    fixed = math.ceil(buffer) if case.coarse else int(buffer)
    times = [
        mainrules.layer_ms(case, figures, kind, each, chunks)
        for kind, each in zip(_kinds(case), plan.strategies, strict=True)
    ]
    held = [
        mainrules.layer_mib(case, figures, kind, each, chunks=chunks, stage=stage)
        for kind, each, stage in zip(_kinds(case), plan.strategies, _stages(plan), strict=True)
    ]
    return _added(
        case,
        plan,
        times=times,
        held=held,
        ends=mainrules.ends_ms(case, figures, vocab, chunks),
        other=[math.ceil(mib) + fixed for mib in mainrules.ends_mib(case, figures, vocab, chunks)],
    )


def _v24(case: Case, figures: Figures, plan: Plan) -> Cost:
    vocab, pp = plan.vocab.strategy, len(plan.cut)
    cut = rules24.batching(case, pp, plan.chunks, plan.least)
    assert cut is not None
    buffered = case.options["sequence_parallel"] and (
        case.coarse or (plan.buffered and case.options["global_memory_buffer"])
    )
    fixed = int(rules24.buffer_mib(case, cut, plan.most)) if buffered else 0
    times = [
        rules24.layer_ms(case, figures, kind, each, plan.chunks)
        for kind, each in zip(_kinds(case), plan.strategies, strict=True)
    ]
    held = [
        rules24.layer_mib(case, figures, kind, each, cut=cut, stage=stage)
        for kind, each, stage in zip(_kinds(case), plan.strategies, _stages(plan), strict=True)
    ]
    return _added(
        case,
        plan,
        times=times,
        held=held,
        ends=rules24.ends_ms(case, figures, vocab, cut=cut, ulysses=plan.vocab.ulysses),
        other=[math.ceil(mib) + fixed for mib in rules24.ends_mib(case, figures, vocab, cut)],
    )


def _kinds(case: Case) -> list[int]:
    return [index for index, kind in enumerate(case.kinds) for _ in range(kind.count)]


def _stages(plan: Plan) -> list[int]:
    return [stage for stage, length in enumerate(plan.cut) for _ in range(length)]


def _added(
    case: Case,
    plan: Plan,
    *,
    times: list[tuple[float, float]],
    held: list[float],
    ends: list[float],
    other: list[int],
) -> Cost:
    """Layers by stage, with embedding and head."""
    steady, excess = list(ends), [-each for each in ends]
    memory = [mib + case.reserved_mib for mib in other]
    for stage, (synced, alone), mib in zip(_stages(plan), times, held, strict=True):
        steady[stage] += alone
        excess[stage] += synced - alone
        memory[stage] += math.ceil(mib)
    total = iteration(np.array(steady), np.array(excess), plan.chunks)
    return Cost(iteration_s=float(total) / 1e3, memory_mib=tuple(memory))
