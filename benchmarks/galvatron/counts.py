"""How many layers of each stage take each strategy, for one split of embedding and head.

Each stage first takes the counts of least time without reduction, by the house's closed form over
counts. They are the best of all wherever their reductions end in time, as nearly always behind the
first stage: a stage that is no slower and no later is never worse (``relaxation``). For the stages
where they do not, the whole counts near the relaxation's weighing of both times are listed
(``listing``), out to the best time so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.galvatron.best import EQUAL, Best, Chosen
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
    pieces,
    weighted,
)
from benchmarks.galvatron.sharedrules import iteration
from planner.closed_form import CountingStages
from planner.problem import SearchProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from benchmarks.galvatron.space import Family

UNITS = 1e9  # of a ms: the house's solver wants whole numbers
MOST_COMBINATIONS = 2_000_000
TRADES = (0.25, 0.5, 1.0)  # weights of reductions to try where nothing can be listed


def groups_of(family: Family, stage: int, *, every: bool = False) -> list[Group]:
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
            steady, memory, sync = figures[:, kept]
            groups.append(
                Group(
                    kind=kind,
                    count=count,
                    strategies=kept,
                    steady=steady,
                    sync=sync,
                    memory=memory,
                )
            )
    return groups


def _unbeaten(figures: Floats) -> NDArray[np.int64]:
    """Columns that no other column is as good as in every row; the first of equal ones."""
    number = np.arange(figures.shape[1])
    as_good = (figures[:, :, None] <= figures[:, None, :]).all(0)
    better = as_good & (~as_good.T | (number[:, None] < number[None]))
    return np.flatnonzero(~better.any(0))


class Counts:
    """Solves the counts of one family; what is found goes to ``best``."""

    def __init__(self, best: Best, family: Family, stages: list[list[Group]]) -> None:
        """``stages``: the groups of each stage."""
        self.best = best
        self.family = family
        self.stages = stages
        self.every = [groups_of(family, stage, every=True) for stage in range(family.pp)]
        self.chain = tuple(
            kind for own in family.counts for kind, count in enumerate(own) for _ in range(count)
        )
        self.times = tuple(map(tuple, np.rint(family.steady_ms * UNITS).astype(int).tolist()))
        self.memories = tuple(tuple(map(tuple, stage)) for stage in family.layer_mib.tolist())

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
        if unreached < self.best.worth:
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
            found.append(self._only(stage, stages.strategies(stage, first, stop)))
            first = stop
        return found

    def _only(self, stage: int, strategies: Sequence[int]) -> Mixes:
        """A stage's strategies, layer by layer, as its only mix."""
        groups, rows, first = self.every[stage], [], 0
        for group in groups:
            own = strategies[first : first + group.count]
            rows.append(np.bincount(own, minlength=len(group.strategies))[None])
            first += group.count
        return Mixes.of(groups, rows, np.zeros(1))

    def weigh(
        self,
        vocab: int,
        memory: Floats,
        fastest: list[Mixes],
        wanted: list[int],
        unreached: float | None = None,
    ) -> float:
        """Weigh both times against each other in the ``wanted`` stages; the others stay. Gives
        the least floor that was not reached; where one is given, the objective itself is searched.
        """
        family, whole, lowest = self.family, unreached is not None, INFINITE
        stages: list[list[Group]] = [[] for _ in fastest]
        steady, excess = family.ends_ms[vocab].copy(), -family.ends_ms[vocab]
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
        try:
            firsts = {}
            for i, stage in relaxed.items():
                found = nearest(stages[i], stage, memory[i], self.best.worth - bound)
                if found is None:
                    return lowest
                firsts[i] = float(found.spent[0])
            bound += sum(firsts.values())  # no whole counts are nearer
            gap = FIRST_GAP * (1 + abs(bound))
            while bound < self.best.worth:
                reach = min(gap, self.best.worth - bound)
                listed = list(fastest)
                for i in wanted:
                    listed[i] = mixes(stages[i], relaxed[i], memory[i], firsts[i] + reach)
                beyond = sum(firsts.values()) + reach
                lowest = min(lowest, self.take(vocab, listed, beyond, whole=whole))
                if self.best.worth - bound <= reach:
                    break
                gap = reach * WIDER
        except TooManyError:
            self.best.leave(bound if unreached is None else max(bound, unreached))
            self.guess(vocab, memory, fastest, wanted)
        return lowest

    def guess(self, vocab: int, memory: Floats, fastest: list[Mixes], wanted: list[int]) -> None:
        """Take the mixes of some weights, where all that could be better are too many."""
        for trade in TRADES:
            tried = list(fastest)
            for i in wanted:
                own = weighted(self.stages[i], 1.0, trade, memory[i])
                try:
                    tried[i] = nearest(self.stages[i], own, memory[i], INFINITE) or fastest[i]
                except TooManyError:
                    continue
            self.take(vocab, tried)

    def take(
        self, vocab: int, listed: list[Mixes], gap: float = INFINITE, *, whole: bool = False
    ) -> float:
        """Take the best combination of the stages' mixes that costs at most ``gap`` beyond the
        bound. Of mixes whose reductions end in time only the fastest counts, unless the ``whole``
        objective is searched. Gives the least floor that is below its combination's time.
        """
        ends = self.family.ends_ms[vocab]
        rows, spent, before, kept = np.zeros((1, 0), dtype=np.int64), np.zeros(1), 0.0, []
        for own, each in zip(ends, listed, strict=True):
            mine = distinct(each) if whole else undominated(each, own + before)
            before += float(each.steady.min(initial=INFINITE)) + own
            if len(spent) * len(mine.spent) > MOST_COMBINATIONS:
                raise TooManyError
            kept.append(mine)
            total = spent[:, None] + mine.spent[None]
            first, second = np.nonzero(total <= gap * (1 + EQUAL) + EQUAL)
            rows, spent = np.column_stack([rows[first], second]), total[first, second]
        if not len(rows):
            return INFINITE
        steady = np.column_stack([each.steady[rows[:, i]] for i, each in enumerate(kept)]) + ends
        excess = np.column_stack([each.sync[rows[:, i]] for i, each in enumerate(kept)]) - ends
        times = iteration(steady, excess, self.family.chunks)
        least = int(times.argmin())
        if times[least] < self.best.worth:
            counts = self._counted([each[rows[least, i : i + 1]] for i, each in enumerate(kept)])
            self.best.take(Chosen(float(times[least]), self.family, vocab, counts))
        if whole:
            return INFINITE
        floors = floor(steady, excess, self.family.chunks)
        return float(floors[floors < times * (1 - EQUAL)].min(initial=INFINITE))

    def _counted(self, only: list[Mixes]) -> NDArray[np.int64]:
        """One mix of each stage as counts by stage, kind and strategy of the family."""
        found = np.zeros(self.family.layer_mib.shape, dtype=np.int64)
        for stage, mix in enumerate(only):
            for group, counts in zip(mix.groups, mix.counts, strict=True):
                found[stage, group.kind, group.strategies] = counts[0]
        return found
