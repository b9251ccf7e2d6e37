"""The optimum under the peer's cost rules, with its proof.

Families are visited by a bound that ignores memory; inside one, each split of embedding and head
is bounded by the relaxation. Where the bound is below the best time so far, each stage first takes
the counts of least time without reduction; they are the best wherever their reductions end in
time, as nearly always behind the first stage. For stages where they do not, the whole counts near
the relaxation's weighing of both times are listed (``listing``).

What is left out is left out by a bound. So the answer is the optimum of the space, unless a list
grew too long or the floor of the objective was not reached (``relaxation``); then the answer's
bound is below its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.galvatron.listing import (
    FIRST_GAP,
    WIDER,
    Mixes,
    TooManyError,
    distinct,
    mixes,
    nearest,
    undominated,
)
from benchmarks.galvatron.relaxation import (
    INFINITE,
    Floats,
    Group,
    best_weights,
    floor,
    least,
    pieces,
    weighted,
)
from benchmarks.galvatron.sharedrules import iteration
from benchmarks.galvatron.space import Family, Vocab
from benchmarks.galvatron.strategy import Strategy
from planner.closed_form import CountingStages
from planner.problem import SearchProblem

EQUAL = 1e-12
UNITS = 1e9  # of a ms, so that the house's solver has whole numbers
MOST_COMBINATIONS = 2_000_000
TRADES = (0.25, 0.5, 1.0)  # weights of reductions to try where nothing can be listed


class Chosen(NamedTuple):
    """A plan: its time, its family and split of embedding and head, and how many layers of each
    kind take each strategy, by stage.
    """

    iteration_ms: float
    family: Family
    vocab: int
    counts: NDArray[np.int64]  # [stage, kind, strategy]

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
            for _ in range(int(count))
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
        self.short = INFINITE
        self.num_solved = 0

    @property
    def worth(self) -> float:
        """Only less than this is of interest."""
        return INFINITE if self.best is None else self.best.iteration_ms * (1 - EQUAL)

    def note_shortage(self, short: Floats) -> None:
        """What plans lack, a row a plan and a column a stage."""
        self.short = min(self.short, float(short.max(1).min()))

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
        short_mib=math.ceil(search.short) if best is None and ordered else None,
        num_families=len(ordered),
        num_solved=search.num_solved,
    )


def _groups(family: Family, stage: int, *, every: bool = False) -> list[Group]:
    """The layers of a stage by kind, each with the strategies that no other one beats in both
    times and memory, or with ``every`` one.
    """
    groups = []
    for kind, count in enumerate(family.counts[stage]):
        if count:
            figures = np.stack(
                [family.steady_ms[kind], family.layer_mib[stage, kind], family.sync_ms[kind]]
            )
            kept = np.arange(figures.shape[1]) if every else _unbeaten(figures)
            groups.append(
                Group(
                    kind=kind,
                    count=count,
                    strategies=kept,
                    steady=figures[0, kept],
                    memory=figures[1, kept],
                    sync=figures[2, kept],
                )
            )
    return groups


def _unbeaten(figures: Floats) -> NDArray[np.int64]:
    """Columns that no other column is as good as in every row; the first of equal ones."""
    better = (figures[:, :, None] <= figures[:, None, :]).all(0)
    better &= ~better.T | np.tri(len(better), k=-1, dtype=bool).T
    return np.flatnonzero(~better.any(0))


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
    stages = [_groups(family, stage) for stage in range(family.pp)]
    needs = [sum(group.count * float(group.memory.min()) for group in own) for own in stages]
    search.note_shortage(np.array(needs)[None] - memory)
    bounds = _quick_bounds(family, stages, memory)
    solver = _Counts(search, family, stages)
    for vocab in np.argsort(bounds, kind="stable"):
        if bounds[vocab] < search.worth:
            search.num_solved += 1
            solver.solve(int(vocab), memory[vocab])


def _solve_uniform(search: _Search, family: Family, memory: Floats) -> None:
    """One strategy for all layers: every pair of it and a split of embedding and head."""
    counts = np.array(family.counts)
    vocabs, strategies = np.array(family.pairs).T
    held = np.einsum("sk,skj->js", counts, family.layer_mib)[strategies]
    short = held - memory[vocabs]
    search.note_shortage(short)
    steady = (counts @ family.steady_ms).T[strategies] + family.ends_ms[vocabs]
    excess = (counts @ family.sync_ms).T[strategies] - family.ends_ms[vocabs]
    times = iteration(steady, excess, family.chunks)
    times[(short > 0).any(1)] = INFINITE
    best = int(times.argmin())
    if times[best] < search.worth:
        taken = np.zeros((*counts.shape, len(family.strategies)), dtype=np.int64)
        taken[:, :, strategies[best]] = counts
        search.take(Chosen(float(times[best]), family, int(vocabs[best]), taken))


def _quick_bounds(family: Family, stages: list[list[Group]], memory: Floats) -> Floats:
    """A bound of the time for each split of embedding and head, infinite where none fits."""
    steady = family.ends_ms + np.stack(
        [least(groups, 1.0, 0.0, memory[:, stage]) for stage, groups in enumerate(stages)], axis=1
    )
    bounds = np.full(len(steady), INFINITE)
    fitting = np.flatnonzero(np.isfinite(steady).all(1))
    if len(fitting):
        own = steady[fitting]
        bounds[fitting] = iteration(own, np.zeros_like(own), family.chunks)
        first = family.chunks if family.pp == 1 else 1  # the same with the first stage's reduction
        rest = own[:, 1:].sum(1) + (family.chunks - 1) * own[:, -1] * (family.pp > 1)
        after = least(stages[0], first, 1.0, memory[fitting, 0])
        after += (first - 1) * family.ends_ms[fitting, 0] + rest
        bounds[fitting] = np.maximum(bounds[fitting], after)
    return bounds


class _Counts:
    """Finds the best counts of one family, for one split of embedding and head at a time."""

    def __init__(self, search: _Search, family: Family, stages: list[list[Group]]) -> None:
        self.search = search
        self.family = family
        self.stages = stages
        self.every = [_groups(family, stage, every=True) for stage in range(family.pp)]
        self.times = tuple(map(tuple, np.rint(family.steady_ms * UNITS).astype(int).tolist()))
        self.memories = tuple(tuple(map(tuple, stage)) for stage in family.layer_mib.tolist())
        self.chain = tuple(
            kind for own in family.counts for kind, count in enumerate(own) for _ in range(count)
        )

    def solve(self, vocab: int, memory: Floats) -> None:
        """Take the best counts if they are below the best so far."""
        ends = self.family.ends_ms[vocab]
        fastest = self.fastest(memory)
        steady = np.array([each.steady[0] for each in fastest]) + ends
        excess = np.array([each.sync[0] for each in fastest]) - ends
        before = steady.cumsum() - steady  # no stage starts earlier than this
        late = np.flatnonzero(excess > before).tolist()
        unreached = self.take(vocab, fastest)
        if late:
            unreached = min(unreached, self.weigh(vocab, memory, fastest, late))
        if unreached < self.search.worth:
            self.weigh(vocab, memory, fastest, list(range(len(memory))), unreached=unreached)

    def fastest(self, memory: Floats) -> list[Mixes]:
        """The mix of each stage of least time without reduction."""
        family, (kinds, strategies) = self.family, self.family.steady_ms.shape
        problem = SearchProblem(
            chain=self.chain,
            num_stages=family.pp,
            repeats=1,
            time_ns=self.times,
            memory=self.memories,
            working=((0,) * strategies,) * kinds,
            limit=tuple(int(limit // 1) for limit in memory),
            allowed=(tuple(range(strategies)),) * kinds,
            stage_ns=(0,) * family.pp,
        )
        stages, first, found = CountingStages(problem), 0, []
        for stage, own in enumerate(family.counts):
            stop = first + sum(own)
            found.append(self.row(stage, stages.strategies(stage, first, stop)))
            first = stop
        return found

    def row(self, stage: int, strategies: Sequence[int]) -> Mixes:
        """A stage's strategies by layer as its only mix."""
        groups, rows, first = self.every[stage], [], 0
        for group in groups:
            own = strategies[first : first + group.count]
            rows.append(np.bincount(own, minlength=len(group.strategies))[None])
            first += group.count
        pairs = list(zip(groups, rows, strict=True))
        return Mixes(
            groups=tuple(groups),
            counts=tuple(rows),
            spent=np.zeros(1),
            steady=sum(counts @ group.steady for group, counts in pairs),
            sync=sum(counts @ group.sync for group, counts in pairs),
            memory=sum(counts @ group.memory for group, counts in pairs),
        )

    def weigh(
        self,
        vocab: int,
        memory: Floats,
        fastest: list[Mixes],
        wanted: list[int],
        unreached: float | None = None,
    ) -> float:
        """Weigh both times against each other in the ``wanted`` stages; the others stay. The
        least floor that was not reached; where one is given, the objective itself is searched.
        """
        family, ends, worth = self.family, self.family.ends_ms[vocab], self.search.worth
        whole = unreached is not None
        stages: list[list[Group]] = [[] for _ in fastest]
        steady, excess = ends.copy(), -ends
        for i, each in enumerate(fastest):
            if i in wanted:
                stages[i] = self.every[i] if whole else self.stages[i]
            else:
                steady[i] += each.steady[0]
                excess[i] += each.sync[0]
        functions = pieces(family.pp, family.chunks, whole=whole)
        own, sync, fixed = best_weights(stages, steady, excess, memory, functions)
        relaxed = {i: weighted(stages[i], own[i], sync[i], memory[i]) for i in wanted}
        bound = fixed + sum(each.least for each in relaxed.values())
        lowest = INFINITE
        try:
            firsts = {}
            for i, each in relaxed.items():
                found = nearest(stages[i], each, memory[i], worth - bound)
                if found is None:
                    return lowest
                firsts[i] = float(found.spent[0])
            bound += sum(firsts.values())  # no whole counts are nearer
            gap = FIRST_GAP * (1 + abs(bound))
            while bound < self.search.worth:
                reach = min(gap, self.search.worth - bound)
                listed = list(fastest)
                for i in wanted:
                    listed[i] = mixes(stages[i], relaxed[i], memory[i], firsts[i] + reach)
                beyond = sum(firsts.values()) + reach
                lowest = min(lowest, self.take(vocab, listed, beyond, whole=whole))
                if self.search.worth - bound <= reach:
                    break
                gap = reach * WIDER
        except TooManyError:
            certain = bound if unreached is None else max(bound, unreached)
            self.search.unlisted = min(self.search.unlisted, certain)
            self.guess(vocab, memory, fastest, wanted)
        return lowest

    def guess(self, vocab: int, memory: Floats, fastest: list[Mixes], wanted: list[int]) -> None:
        """Take the mixes of some weights, where all that could be better are too many."""
        for trade in TRADES:
            tried = list(fastest)
            for i in wanted:
                each = weighted(self.stages[i], 1.0, trade, memory[i])
                try:
                    tried[i] = nearest(self.stages[i], each, memory[i], INFINITE) or fastest[i]
                except TooManyError:
                    continue
            self.take(vocab, tried)

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
        short_mib=math.ceil(search.short) if best is None and ordered else None,
        num_families=len(ordered),
        num_solved=search.num_solved,
    )


def _groups(family: Family, stage: int, *, every: bool = False) -> list[Group]:
    """The layers of a stage by kind, each with the strategies that no other one beats in both
    times and memory, or with ``every`` one.
    """
    groups = []
    for kind, count in enumerate(family.counts[stage]):
        if count:
            figures = np.stack(
                [family.steady_ms[kind], family.layer_mib[stage, kind], family.sync_ms[kind]]
            )
            kept = np.arange(figures.shape[1]) if every else _unbeaten(figures)
            groups.append(
                Group(
                    kind=kind,
                    count=count,
                    strategies=kept,
                    steady=figures[0, kept],
                    memory=figures[1, kept],
                    sync=figures[2, kept],
                )
            )
    return groups


def _unbeaten(figures: Floats) -> NDArray[np.int64]:
    """Columns that no other column is as good as in every row; the first of equal ones."""
    better = (figures[:, :, None] <= figures[:, None, :]).all(0)
    better &= ~better.T | np.tri(len(better), k=-1, dtype=bool).T
    return np.flatnonzero(~better.any(0))


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
    stages = [_groups(family, stage) for stage in range(family.pp)]
    needs = [sum(group.count * float(group.memory.min()) for group in own) for own in stages]
    search.note_shortage(np.array(needs)[None] - memory)
    bounds = _quick_bounds(family, stages, memory)
    solver = _Counts(search, family, stages)
    for vocab in np.argsort(bounds, kind="stable"):
        if bounds[vocab] < search.worth:
            search.num_solved += 1
            solver.solve(int(vocab), memory[vocab])


def _solve_uniform(search: _Search, family: Family, memory: Floats) -> None:
    """One strategy for all layers: every pair of it and a split of embedding and head."""
    counts = np.array(family.counts)
    vocabs, strategies = np.array(family.pairs).T
    held = np.einsum("sk,skj->js", counts, family.layer_mib)[strategies]
    short = held - memory[vocabs]
    search.note_shortage(short)
    steady = (counts @ family.steady_ms).T[strategies] + family.ends_ms[vocabs]
    excess = (counts @ family.sync_ms).T[strategies] - family.ends_ms[vocabs]
    times = iteration(steady, excess, family.chunks)
    times[(short > 0).any(1)] = INFINITE
    best = int(times.argmin())
    if times[best] < search.worth:
        taken = np.zeros((*counts.shape, len(family.strategies)), dtype=np.int64)
        taken[:, :, strategies[best]] = counts
        search.take(Chosen(float(times[best]), family, int(vocabs[best]), taken))


def _quick_bounds(family: Family, stages: list[list[Group]], memory: Floats) -> Floats:
    """A bound of the time for each split of embedding and head, infinite where none fits."""
    steady = family.ends_ms + np.stack(
        [least(groups, 1.0, 0.0, memory[:, stage]) for stage, groups in enumerate(stages)], axis=1
    )
    bounds = np.full(len(steady), INFINITE)
    fitting = np.flatnonzero(np.isfinite(steady).all(1))
    if len(fitting):
        own = steady[fitting]
        bounds[fitting] = iteration(own, np.zeros_like(own), family.chunks)
        first = family.chunks if family.pp == 1 else 1  # the same with the first stage's reduction
        rest = own[:, 1:].sum(1) + (family.chunks - 1) * own[:, -1] * (family.pp > 1)
        after = least(stages[0], first, 1.0, memory[fitting, 0])
        after += (first - 1) * family.ends_ms[fitting, 0] + rest
        bounds[fitting] = np.maximum(bounds[fitting], after)
    return bounds


class _Counts:
    """Finds the best counts of one family, for one split of embedding and head at a time."""

    def __init__(self, search: _Search, family: Family, stages: list[list[Group]]) -> None:
        self.search = search
        self.family = family
        self.stages = stages
        self.every = [_groups(family, stage, every=True) for stage in range(family.pp)]
        self.times = tuple(map(tuple, np.rint(family.steady_ms * UNITS).astype(int).tolist()))
        self.memories = tuple(tuple(map(tuple, stage)) for stage in family.layer_mib.tolist())
        self.chain = tuple(
            kind for own in family.counts for kind, count in enumerate(own) for _ in range(count)
        )

    def solve(self, vocab: int, memory: Floats) -> None:
        """Take the best counts if they are below the best so far."""
        ends = self.family.ends_ms[vocab]
        fastest = self.fastest(memory)
        steady = np.array([each.steady[0] for each in fastest]) + ends
        excess = np.array([each.sync[0] for each in fastest]) - ends
        before = steady.cumsum() - steady  # no stage starts earlier than this
        late = np.flatnonzero(excess > before).tolist()
        unreached = self.take(vocab, fastest)
        if late:
            unreached = min(unreached, self.weigh(vocab, memory, fastest, late))
        if unreached < self.search.worth:
            self.weigh(vocab, memory, fastest, list(range(len(memory))), unreached=unreached)

    def fastest(self, memory: Floats) -> list[Mixes]:
        """The mix of each stage of least time without reduction."""
        family, (kinds, strategies) = self.family, self.family.steady_ms.shape
        problem = SearchProblem(
            chain=self.chain,
            num_stages=family.pp,
            repeats=1,
            time_ns=self.times,
            memory=self.memories,
            working=((0,) * strategies,) * kinds,
            limit=tuple(int(limit // 1) for limit in memory),
            allowed=(tuple(range(strategies)),) * kinds,
            stage_ns=(0,) * family.pp,
        )
        stages, first, found = CountingStages(problem), 0, []
        for stage, own in enumerate(family.counts):
            stop = first + sum(own)
            found.append(self.row(stage, stages.strategies(stage, first, stop)))
            first = stop
        return found

    def row(self, stage: int, strategies: Sequence[int]) -> Mixes:
        """A stage's strategies by layer as its only mix."""
        groups, rows, first = self.every[stage], [], 0
        for group in groups:
            own = strategies[first : first + group.count]
            rows.append(np.bincount(own, minlength=len(group.strategies))[None])
            first += group.count
        pairs = list(zip(groups, rows, strict=True))
        return Mixes(
            groups=tuple(groups),
            counts=tuple(rows),
            spent=np.zeros(1),
            steady=sum(counts @ group.steady for group, counts in pairs),
            sync=sum(counts @ group.sync for group, counts in pairs),
            memory=sum(counts @ group.memory for group, counts in pairs),
        )

    def weigh(
        self,
        vocab: int,
        memory: Floats,
        fastest: list[Mixes],
        wanted: list[int],
        unreached: float | None = None,
    ) -> float:
        """Weigh both times against each other in the ``wanted`` stages; the others stay. The
        least floor that was not reached; where one is given, the objective itself is searched.
        """
        family, ends, worth = self.family, self.family.ends_ms[vocab], self.search.worth
        whole = unreached is not None
        stages: list[list[Group]] = [[] for _ in fastest]
        steady, excess = ends.copy(), -ends
        for i, each in enumerate(fastest):
            if i in wanted:
                stages[i] = self.every[i] if whole else self.stages[i]
            else:
                steady[i] += each.steady[0]
                excess[i] += each.sync[0]
        functions = pieces(family.pp, family.chunks, whole=whole)
        own, sync, fixed = best_weights(stages, steady, excess, memory, functions)
        relaxed = {i: weighted(stages[i], own[i], sync[i], memory[i]) for i in wanted}
        bound = fixed + sum(each.least for each in relaxed.values())
        lowest = INFINITE
        try:
            firsts = {}
            for i, each in relaxed.items():
                found = nearest(stages[i], each, memory[i], worth - bound)
                if found is None:
                    return lowest
                firsts[i] = float(found.spent[0])
            bound += sum(firsts.values())  # no whole counts are nearer
            gap = FIRST_GAP * (1 + abs(bound))
            while bound < self.search.worth:
                reach = min(gap, self.search.worth - bound)
                listed = list(fastest)
                for i in wanted:
                    listed[i] = mixes(stages[i], relaxed[i], memory[i], firsts[i] + reach)
                beyond = sum(firsts.values()) + reach
                lowest = min(lowest, self.take(vocab, listed, beyond, whole=whole))
                if self.search.worth - bound <= reach:
                    break
                gap = reach * WIDER
        except TooManyError:
            certain = bound if unreached is None else max(bound, unreached)
            self.search.unlisted = min(self.search.unlisted, certain)
            self.guess(vocab, memory, fastest, wanted)
        return lowest

    def guess(self, vocab: int, memory: Floats, fastest: list[Mixes], wanted: list[int]) -> None:
        """Take the mixes of some weights, where all that could be better are too many."""
        for trade in TRADES:
            tried = list(fastest)
            for i in wanted:
                each = weighted(self.stages[i], 1.0, trade, memory[i])
                tried[i] = nearest(self.stages[i], each, memory[i], INFINITE) or fastest[i]
            self.take(vocab, tried)

    def take(
        self, vocab: int, listed: list[Mixes], gap: float = INFINITE, *, whole: bool = False
    ) -> float:
        """Take the best combination of the stages' mixes that costs at most ``gap`` beyond the
        bound. Of mixes whose reductions end in time only the fastest counts, unless the ``whole``
        objective is searched. The least floor below its combination's time.
        """
        family, ends = self.family, self.family.ends_ms[vocab]
        chosen, spent, before = np.zeros((1, 0), dtype=np.int64), np.zeros(1), 0.0
        kept = []
        for own, each in zip(ends, listed, strict=True):
            mine = distinct(each) if whole else undominated(each, own + before)
            before += float(each.steady.min(initial=INFINITE)) + own
            if len(spent) * len(mine.spent) > MOST_COMBINATIONS:
                raise TooManyError
            kept.append(mine)
            total = spent[:, None] + mine.spent[None]
            first, second = np.nonzero(total <= gap * (1 + EQUAL) + EQUAL)
            chosen = np.column_stack([chosen[first], second])
            spent = total[first, second]
        if not len(chosen):
            return INFINITE
        steady = np.column_stack([each.steady[chosen[:, i]] for i, each in enumerate(kept)]) + ends
        excess = np.column_stack([each.sync[chosen[:, i]] for i, each in enumerate(kept)]) - ends
        times = iteration(steady, excess, family.chunks)
        best = int(times.argmin())
        if times[best] < self.search.worth:
            rows = [each[chosen[best, i : i + 1]] for i, each in enumerate(kept)]
            self.search.take(Chosen(float(times[best]), family, vocab, self.counts(rows)))
        floors = floor(steady, excess, family.chunks)
        return (
            INFINITE if whole else float(floors[floors < times * (1 - EQUAL)].min(initial=INFINITE))
        )

    def counts(self, rows: list[Mixes]) -> NDArray[np.int64]:
        """One mix of each stage as counts by stage, kind and strategy of the family."""
        found = np.zeros(self.family.layer_mib.shape, dtype=np.int64)
        for stage, mix in enumerate(rows):
            for group, counts in zip(mix.groups, mix.counts, strict=True):
                found[stage, group.kind, group.strategies] = counts[0]
        return found
