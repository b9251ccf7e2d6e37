"""The optimum under the peer's cost rules, with its proof.

Families are visited by a bound that ignores memory; inside one, each split of embedding and head
is bounded by the relaxation, and where the bound is below the best time so far, the whole counts
near it are listed (``enumerate``). All that is left out is left out by a bound, so the answer is
the optimum of the space unless a list grew too long, which the answer's bound then says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.galvatron.enumerate import Mixes, TooManyError, mixes, undominated
from benchmarks.galvatron.relaxation import (
    INFINITE,
    Floats,
    Group,
    best_weights,
    least,
    Weighted,
    weighted,
)
from benchmarks.galvatron.sharedrules import iteration
from benchmarks.galvatron.space import Family, Vocab
from benchmarks.galvatron.strategy import Strategy

FIRST_GAP = 1e-6  # of the bound: how far from it the first list reaches
WIDER = 4.0
EQUAL = 1e-12


class Chosen(NamedTuple):
    """A plan: its time, its family and split of embedding and head, and how many layers of each
    kind take each strategy, by stage.
    """

    iteration_ms: float
    family: Family
    vocab: int
    counts: tuple[tuple[tuple[int, ...], ...], ...]  # stage, kind, strategy

    @property
    def vocab_split(self) -> Vocab:
        return self.family.vocabs[self.vocab]

    def strategies(self) -> list[Strategy]:
        """Of every layer in order; equal ones of a stage stand together."""
        return [
            strategy
            for stage in self.counts
            for kind in stage
            for strategy, count in zip(self.family.strategies, kind, strict=True)
            for _ in range(count)
        ]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``chosen`` None: no plan fits. ``bound_ms``: no plan of the space is faster. ``short_mib``:
    what the plan with the least need lacks, where none fits; None where the space is empty.
    """

    chosen: Chosen | None
    bound_ms: float
    short_mib: int | None
    num_families: int
    num_solved: int

    @property
    def proven(self) -> bool:
        """Whether the bound meets the answer."""
        return self.chosen is None or self.bound_ms >= self.chosen.iteration_ms * (1 - 1e-9)


class _Search:
    """The best plan so far, and the least bound of what could not be listed."""

    def __init__(self, budget_mib: float) -> None:
        self.budget_mib = budget_mib
        self.best: Chosen | None = None
        self.unlisted = INFINITE
        self.short: float | None = None
        self.num_solved = 0

    @property
    def worth(self) -> float:
        """Only less than this is of interest."""
        return INFINITE if self.best is None else self.best.iteration_ms * (1 - EQUAL)

    def take(self, chosen: Chosen) -> None:
        if chosen.iteration_ms < self.worth:
            self.best = chosen


def solve(families: Iterable[Family], budget_mib: float) -> Answer:
    """The fastest plan of all families within the memory of each GPU."""
    search = _Search(budget_mib)
    ordered = sorted(
        ((_without_memory(family), number, family) for number, family in enumerate(families)),
        key=lambda each: each[:2],
    )
    for bound, _, family in ordered:
        if bound < search.worth:
            _solve_family(search, family)
    best = search.best
    reached = INFINITE if best is None else best.iteration_ms
    return Answer(
        chosen=best,
        bound_ms=min(reached, search.unlisted),
        short_mib=None if search.short is None or best is not None else int(-(-search.short // 1)),
        num_families=len(ordered),
        num_solved=search.num_solved,
    )


def _groups(family: Family, stage: int, kinds: Iterable[int]) -> list[Group]:
    return [
        Group(
            count=family.counts[stage][kind],
            steady=family.steady_ms[kind],
            sync=family.sync_ms[kind],
            memory=family.layer_mib[stage, kind].astype(np.float64),
        )
        for kind in kinds
    ]


def _kinds(family: Family, stage: int) -> list[int]:
    return [kind for kind, count in enumerate(family.counts[stage]) if count]


def _without_memory(family: Family) -> float:
    """Least time with the fastest strategy and the fastest ends everywhere."""
    counts = np.array(family.counts)
    steady = counts @ family.steady_ms.min(1) + family.ends_ms.min(0)
    return float(iteration(steady, np.zeros_like(steady), family.chunks))


def _solve_family(search: _Search, family: Family) -> None:
    memory = search.budget_mib - family.fixed_mib
    if family.uniform:
        _solve_uniform(search, family, memory)
        return
    stages = [_groups(family, stage, _kinds(family, stage)) for stage in range(family.pp)]
    bounds, steady = _quick_bounds(family, stages, memory)
    _note_shortage(search, stages, memory)
    for vocab in np.argsort(bounds, kind="stable"):
        if bounds[vocab] < search.worth:
            search.num_solved += 1
            _solve_counts(search, family, stages, int(vocab), memory[vocab], steady[vocab])


def _note_shortage(search: _Search, stages: list[list[Group]], memory: Floats) -> None:
    """How much the smallest plan of a family lacks on its tightest stage."""
    needs = [
        sum(group.count * float(group.memory.min()) for group in groups) for groups in stages
    ]
    short = float((np.array(needs)[None] - memory).max(1).min())
    search.short = short if search.short is None else min(search.short, short)


def _solve_uniform(search: _Search, family: Family, memory: Floats) -> None:
    """One strategy for all layers: a plan for each split of embedding and head."""
    counts = np.array(family.counts)
    held = np.einsum("sk,sk->s", counts, family.layer_mib[:, :, 0])
    short = (held[None] - memory).max(1)
    search.short = min(float(short.min()), INFINITE if search.short is None else search.short)
    steady = (counts @ family.steady_ms[:, 0])[None] + family.ends_ms
    excess = (counts @ family.sync_ms[:, 0])[None] - family.ends_ms
    times = np.where(short <= 0, iteration(steady, excess, family.chunks), INFINITE)
    vocab = int(times.argmin())
    if times[vocab] < search.worth:
        own = tuple(tuple((count,) for count in stage) for stage in family.counts)
        search.take(Chosen(float(times[vocab]), family, vocab, own))


def _quick_bounds(
    family: Family, stages: list[list[Group]], memory: Floats
) -> tuple[Floats, Floats]:
    """For each split of embedding and head: a bound of the time, and of each stage's C."""
    steady = family.ends_ms + np.stack(
        [least(groups, 1.0, 0.0, memory[:, stage]) for stage, groups in enumerate(stages)], axis=1
    )
    fitting = np.isfinite(steady).all(1)
    bounds = np.full(len(steady), INFINITE)
    bounds[fitting] = iteration(
        steady[fitting], np.zeros_like(steady[fitting]), family.chunks
    )
    first = family.chunks if family.pp == 1 else 1.0
    if fitting.any():  # the same with the first stage's reduction added
        after = least(stages[0], first, 1.0, memory[fitting, 0])
        rest = steady[fitting, 1:].sum(1) + (
            (family.chunks - 1) * steady[fitting, -1] if family.pp > 1 else 0.0
        )
        bounds[fitting] = np.maximum(
            bounds[fitting], after + (first - 1) * family.ends_ms[fitting, 0] + rest
        )
    return bounds, steady


def _solve_counts(
    search: _Search,
    family: Family,
    stages: list[list[Group]],
    vocab: int,
    memory: Floats,
    steady: Floats,
) -> None:
    """The best counts for one split of embedding and head, if below the best so far."""
    ends = family.ends_ms[vocab]
    own, sync, fixed = best_weights(stages, ends, memory, family.chunks)
    relaxed = [
        weighted(groups, own[index], sync[index], memory[index])
        for index, groups in enumerate(stages)
    ]
    bound = fixed + sum(each.least for each in relaxed)
    try:
        firsts = [
            _nearest(groups, each, limit, search.worth - bound)
            for groups, each, limit in zip(stages, relaxed, memory, strict=True)
        ]
        bound += sum(firsts)  # no whole counts are nearer
        gap = FIRST_GAP * bound
        while bound < search.worth:
            reach = min(gap, search.worth - bound)
            listed = [
                mixes(groups, each, limit, first + reach)
                for groups, each, limit, first in zip(stages, relaxed, memory, firsts, strict=True)
            ]
            for chosen in _combined(family, vocab, listed, steady, sum(firsts) + reach):
                search.take(chosen)
            if search.worth - bound <= reach:
                return
            gap = reach * WIDER
    except TooManyError:
        search.unlisted = min(search.unlisted, bound)


def _nearest(groups: list[Group], stage: Weighted, memory: float, most: float) -> float:
    """What the mix that costs least beyond the relaxation does cost; infinite beyond ``most``."""
    gap = FIRST_GAP * (abs(stage.least) + 1)
    while True:
        found = mixes(groups, stage, memory, gap)
        if len(found.spent):
            return float(found.spent.min())
        if gap > most:
            return INFINITE
        gap *= WIDER


def _combined(
    family: Family, vocab: int, listed: list[Mixes], steady: Floats, gap: float
) -> Iterator[Chosen]:
    """The best combination of the stages' mixes, if there is any within the gap."""
    ends = family.ends_ms[vocab]
    before = np.concatenate([[0.0], np.cumsum(steady)[:-1]])
    late = [each.sync.max(initial=0.0) - ends[i] - before[i] for i, each in enumerate(listed)]
    if family.chunks >= family.pp and max(late[2:], default=0.0) <= 0:  # else slower may be better
        listed = [
            undominated(each, ends[index] + before[index]) for index, each in enumerate(listed)
        ]
    chosen = np.zeros((1, 0), dtype=np.int64)
    spent = np.zeros(1)
    for each in listed:
        if len(spent) * len(each.spent) > MOST_COMBINATIONS:
            raise TooManyError
        total = spent[:, None] + each.spent[None]
        first, second = np.nonzero(total <= gap * (1 + EQUAL) + EQUAL)
        chosen = np.column_stack([chosen[first], second])
        spent = total[first, second]
    if not len(chosen):
        return
    own = np.column_stack([each.steady[chosen[:, i]] for i, each in enumerate(listed)]) + ends
    excess = np.column_stack([each.sync[chosen[:, i]] for i, each in enumerate(listed)]) - ends
    times = iteration(own, excess, family.chunks)
    best = int(times.argmin())
    yield Chosen(
        float(times[best]), family, vocab, _all_kinds(family, listed, chosen[best])
    )


MOST_COMBINATIONS = 2_000_000


def _all_kinds(
    family: Family, listed: list[Mixes], rows: Floats
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Counts by stage, kind and strategy, with nothing for kinds that a stage does not hold."""
    nothing = (0,) * len(family.strategies)
    found = []
    for stage, (each, row) in enumerate(zip(listed, rows, strict=True)):
        own = iter(each.counts)
        found.append(
            tuple(
                tuple(int(n) for n in next(own)[int(row)]) if count else nothing
                for count in family.counts[stage]
            )
        )
    return tuple(found)
