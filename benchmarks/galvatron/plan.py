"""A plan of either side, costed layer by layer: the check of what the search says of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.galvatron.mainrules import MainRules
from benchmarks.galvatron.rules24 import Rules24, batching
from benchmarks.galvatron.sharedrules import iteration
from benchmarks.galvatron.space import degrees, even_cut
from benchmarks.galvatron.strategy import Strategy, Vocab, parse_strategy

if TYPE_CHECKING:
    from benchmarks.galvatron.best import Chosen
    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures
    from benchmarks.galvatron.sharedrules import Rules

ULYSSES_ONLY = 2  # v2.4.0's number of the space with SP alone


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy for every layer; ``ulysses_only``, ``least`` and ``most`` as in ``space``."""

    chunks: int
    cut: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    vocab: Vocab
    least: int
    most: int
    ulysses_only: bool

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
        ulysses_only=family.ulysses_only,
    )


def recorded_plan(case: Case, task: dict[str, Any], *, vocab_cp: int = 1) -> Plan:
    """The plan of one of the peer's sub-searches, as recorded. The record does not name context
    parallelism: that of layers is what is left of the GPUs, that of the vocabulary is a guess.
    """
    strategies = tuple(_parsed(case, text) for text in task["plan"])
    pp = strategies[0].pp
    if case.engine == "main":
        degree, ulysses = task["vocab"]["tp_sp"], bool(task["vocab"]["sp"])
        zero3, chunks, least = bool(task["vocab"]["sdp"]), task["chunks"], 1
        cut = even_cut(case.num_layers, pp)
        ulysses_only = task["mode"] == "sp_only"
    else:
        degree, ulysses, zero3 = task["vtp"], bool(task["vsp"]), bool(task["embed_sdp"])
        chunks, least, cut = task["chunk"], task["min_tp"], tuple(task["pp_stage_dict"][str(pp)])
        ulysses_only = task["sp_search"] == ULYSSES_ONLY
    dp = case.world // pp // degree // vocab_cp
    split = Strategy(pp, 1 if ulysses else degree, degree if ulysses else 1, vocab_cp, dp, zero3)
    return Plan(
        chunks=chunks,
        cut=cut,
        strategies=strategies,
        vocab=Vocab(split, ulysses),
        least=least,
        most=task["max_tp"],
        ulysses_only=ulysses_only,
    )


def recorded_cost(case: Case, figures: Figures, task: dict[str, Any]) -> tuple[Plan, Cost]:
    """A recorded plan and its cost; of the vocabulary's possible degrees of context parallelism
    that which comes nearest to what was recorded.
    """
    told = case.global_batch / task["throughput"]
    tried = [1] if case.options["disable_cp"] else degrees(case.world)
    degree = task["vocab"]["tp_sp"] if case.engine == "main" else task["vtp"]
    per_stage = case.world // parse_strategy(task["plan"][0]).pp // degree
    plans = [recorded_plan(case, task, vocab_cp=cp) for cp in tried if per_stage % cp == 0]
    costed = [(plan, cost(case, figures, plan)) for plan in plans]
    return min(costed, key=lambda each: abs(each[1].iteration_s - told))


def _parsed(case: Case, text: str) -> Strategy:
    """A strategy in short form, which leaves context parallelism out."""
    own = parse_strategy(text, engine=case.engine)
    return own._replace(cp=case.world // (own.pp * own.degree * own.dp))


def cost(case: Case, figures: Figures, plan: Plan) -> Cost:
    """A plan under the rules of the case's engine, layer by layer."""
    rules, pp = _rules(case, figures, plan), len(plan.cut)
    ends = rules.ends_ms(plan.vocab)
    buffer = rules.buffer_mib(pp, plan.most, ulysses_only=plan.ulysses_only)
    steady, excess = list(ends), [-each for each in ends]
    memory = [math.ceil(mib) + buffer + case.reserved_mib for mib in rules.ends_mib(plan.vocab)]
    kinds = [index for index, kind in enumerate(case.kinds) for _ in range(kind.count)]
    stages = [stage for stage, length in enumerate(plan.cut) for _ in range(length)]
    for kind, stage, strategy in zip(kinds, stages, plan.strategies, strict=True):
        synced, alone = rules.layer_ms(kind, strategy)
        steady[stage] += alone
        excess[stage] += synced - alone
        memory[stage] += math.ceil(rules.layer_mib(kind, strategy, stage))
    total = iteration(np.array(steady), np.array(excess), plan.chunks)
    return Cost(iteration_s=float(total) / 1e3, memory_mib=tuple(memory))


def _rules(case: Case, figures: Figures, plan: Plan) -> Rules:
    if case.engine == "main":
        return MainRules(case, figures, plan.chunks)
    cut = batching(case, len(plan.cut), plan.chunks, plan.least)
    assert cut is not None
    return Rules24(case, figures, cut)
