"""Nested dynamic programme with two-sided bounds: long chains of unequal layers.

Inner: for every row of layers that a stage may hold, the least time by memory, over layers and
layout classes (strategies that reshard alike). Memory is counted in whole units: rounded up the
times can be reached, rounded down nothing is faster. Outer: the cut, for the reachable times and
for the bounds, by the greatest stage time t: the least sum of stages that keep t is a shortest
path, and sum + (repeats - 1) t is searched over t by halving intervals whose ends bound it.

What cannot be part of an assignment better than the best one is dropped; the rest is solved
again with finer units, until the two sides meet, the gap is small enough, or time is up.
Work grows with layers x (layers of a stage) x strategies x units; nothing is coarsened.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from planner.problem import Bounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.problem import SearchProblem, Solution

__all__ = ["solve"]

Array: TypeAlias = npt.NDArray[np.int64]
NEVER: Final = 1 << 60
FIRST_UNITS: Final = 64
FINER: Final = 2
MOST_UNITS: Final = 1 << 17
FIRST_LEVELS: Final = 4


def solve(
    problem: SearchProblem,
    *,
    incumbent: Solution | None = None,
    gap: float = 0.0,
    time_limit_s: float = float("inf"),
    most_work: float = float("inf"),
) -> Bounded:
    """The optimum within the relative ``gap``, or what was known after ``time_limit_s`` of CPU or
    before a round of more than ``most_work`` (layers x units x levels; the same on every machine);
    nothing worse than ``incumbent``.

    Raises ValueError for a problem with edges beyond the chain.
    """
    if not problem.is_chain:
        raise ValueError("the nested programme solves chains: use the graph elimination")
    started, run = time.process_time(), _Run(problem)
    if incumbent is not None:
        run.start_from(incumbent)
    while True:
        before, work = time.process_time(), run.work
        run.refine()
        if run.bound >= NEVER:
            return Bounded(None, None)
        now = time.process_time()
        next_s = (now - before) * run.work / max(1, work)
        late = now - started + next_s > time_limit_s or run.work > most_work
        if late or run.exact or run.gap <= gap:
            return Bounded(run.best, min(run.bound, run.objective))


class _Run:
    """Times of stages from both sides, and what is still worth knowing."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.units, self.levels = FIRST_UNITS, FIRST_LEVELS
        self.best: Solution | None = None
        self.bound = 0
        self.exact = False
        rows: dict[object, int] = {}
        for stage in range(problem.num_stages):
            rows.setdefault((problem.memory[stage], problem.limit[stage]), stage)
        self.row_of = [
            rows[problem.memory[stage], problem.limit[stage]] for stage in range(problem.num_stages)
        ]
        size = len(problem.chain) + 1
        lengths = np.arange(size)[None, :] - np.arange(size)[:, None]
        self.alive = np.repeat((lengths >= problem.least_layers)[None], problem.num_stages, 0)
        self.cut = _Cuts(problem)

    @property
    def objective(self) -> int:
        return NEVER if self.best is None else self.best.objective_ns

    @property
    def gap(self) -> float:
        return 1.0 if self.best is None else max(0.0, 1 - self.bound / self.objective)

    @property
    def work(self) -> int:
        """Steps of the next round: layers of the stages that are alive, times units."""
        lengths = np.arange(self.alive.shape[1])
        steps = 0
        for row in dict.fromkeys(self.row_of):
            own = [stage for stage, r in enumerate(self.row_of) if r == row]
            wanted = np.logical_or.reduce(self.alive[own])
            longest = (wanted * (lengths[None, :] - lengths[:, None])).max(axis=1)
            steps += int(longest.sum())
        return steps * self.units * min(self.levels, len(self.problem.working_levels))

    def start_from(self, incumbent: Solution) -> None:
        """Drop what cannot be better even with the fastest strategy for each layer."""
        self.best = incumbent
        fastest = np.array(self.problem.least_time_ns, dtype=np.int64)
        layers = fastest[None, :] - fastest[:, None]
        fixed = np.array(self.problem.stage_ns, dtype=np.int64)[:, None, None]
        low = np.where(self.alive, layers[None] + fixed, NEVER)
        self.alive &= self.cut.worth(low, self.objective)

    def refine(self) -> None:
        """Solve what is alive with the present units, then drop what cannot be better."""
        stages: list[_Stages] = []
        low, high = self._sides(stages)
        self.exact = all(each.exact for each in stages) or self.units >= MOST_UNITS
        self.bound = max(self.bound, self.cut.least(low, self.objective)[0])
        found, starts = self.cut.least(high, self.objective)
        if found < self.objective:
            self.best = self._solution(starts, {each.row: each for each in stages})
        self.alive &= self.cut.worth(low, self.objective)
        self.units, self.levels = self.units * FINER, self.levels * FINER

    def _sides(self, stages: list[_Stages]) -> tuple[Array, Array]:
        low = np.full(self.alive.shape, NEVER, dtype=np.int64)
        high = low.copy()
        for row in dict.fromkeys(self.row_of):
            own = [stage for stage, r in enumerate(self.row_of) if r == row]
            solved = _Stages(self.problem, row, self.units, self.levels)
            stages.append(solved)
            wanted = np.logical_or.reduce(self.alive[own])
            below, above = (solved.times(wanted, up=up) for up in (False, True))
            for stage in own:
                fixed = self.problem.stage_ns[stage]
                low[stage] = np.where(self.alive[stage], below + fixed, NEVER)
                high[stage] = np.where(self.alive[stage], above + fixed, NEVER)
        return low, high

    def _solution(self, starts: Sequence[int], stages: dict[int, _Stages]) -> Solution:
        stops = (*starts[1:], len(self.problem.chain))
        strategies: list[int] = []
        for stage, (first, stop) in enumerate(zip(starts, stops, strict=True)):
            strategies += stages[self.row_of[stage]].strategies(first, stop)
        solution = self.problem.cost(tuple(starts), tuple(strategies))
        assert solution is not None, "the programme broke a rule of the problem"
        return solution


class _Cuts:
    """Where to cut, given the times of all stages as [stage][first][stop]."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        handover = [problem.handover(first) for first in range(len(problem.chain))]
        self.handover = np.array([*handover, 0], dtype=np.int64)

    def least(self, times: Array, below: int) -> tuple[int, list[int]]:
        """The least objective under ``below`` and its stage starts; NEVER where there is none."""
        entering = self._entering(times)
        greatest = np.maximum(times, self.handover[None, :, None])
        values = np.unique(greatest[greatest < NEVER])
        if not len(values):
            return NEVER, []
        best: tuple[int, list[int]] = (below, [])
        pauses = self.problem.repeats - 1
        sums: dict[int, tuple[int, list[int]]] = {}

        def keeping(k: int) -> tuple[int, list[int]]:
            if k not in sums:
                sums[k] = _shortest(np.where(greatest <= values[k], entering, NEVER))
            return sums[k]

        waiting = [(0, len(values) - 1)]
        while waiting:
            left, right = waiting.pop()
            total, starts = keeping(right)
            if total + pauses * int(values[left]) >= best[0] or total >= NEVER:
                continue
            objective = total + pauses * self._slowest(greatest, starts)
            if objective < best[0]:
                best = (objective, starts)
            if left == right:
                continue
            middle = (left + right) // 2
            waiting += [(middle + 1, right), (left, middle)]
        return best if best[1] else (min(NEVER, below), [])

    def worth(self, times: Array, objective: int) -> npt.NDArray[np.bool_]:
        """Which stages may belong to an assignment below ``objective``."""
        entering = self._entering(times)
        ahead = _distances(entering)
        behind = _distances(entering[::-1].transpose(0, 2, 1))[::-1]
        greatest = np.maximum(times, self.handover[None, :, None])
        slowest = self._least_greatest(greatest)
        through = ahead[:-1, :, None] + entering + behind[1:, None, :]
        pauses = self.problem.repeats - 1
        worth: npt.NDArray[np.bool_] = through + pauses * np.maximum(greatest, slowest) < objective
        return worth

    def _entering(self, times: Array) -> Array:
        entering: Array = np.minimum(times + self.handover[None, :, None], NEVER)
        return entering

    def _slowest(self, greatest: Array, starts: list[int]) -> int:
        stops = (*starts[1:], len(self.problem.chain))
        return max(
            int(greatest[stage, first, stop])
            for stage, (first, stop) in enumerate(zip(starts, stops, strict=True))
        )

    def _least_greatest(self, greatest: Array) -> int:
        """The least greatest time of any cut."""
        reach = greatest[0, 0]
        for own in greatest[1:]:
            reach = np.maximum(reach[:, None], own).min(axis=0)
        return int(reach[-1])


def _shortest(times: Array) -> tuple[int, list[int]]:
    """The least sum of stage times over all cuts and its starts."""
    distances = _distances(times)
    total = int(distances[-1, -1])
    if total >= NEVER:
        return NEVER, []
    starts, stop = [], times.shape[1] - 1
    for stage in range(len(times) - 1, -1, -1):
        stop = int(np.argmin(distances[stage] + times[stage, :, stop]))
        starts.append(stop)
    return total, starts[::-1]


def _distances(times: Array) -> Array:
    """[stage][position]: least sum of the stages before, from the first position on."""
    start = 0 if times[0, 0].min() < NEVER or times.shape[1] == 1 else times.shape[1] - 1
    rows = [np.full(times.shape[1], NEVER, dtype=np.int64)]
    rows[0][start] = 0
    for own in times:
        rows.append(np.minimum((rows[-1][:, None] + own).min(axis=0), NEVER))
    return np.stack(rows)


class _Stages:
    """Stage times of one row of memory, counted in ``units`` parts of its limit."""

    def __init__(self, problem: SearchProblem, row: int, units: int, levels: int) -> None:
        self.problem, self.row = problem, row
        self.limit = problem.limit[row]
        self.unit = max(1, self.limit // units)
        self.levels = _grouped(problem.working_levels, levels)
        self.groups = _alike(problem)
        self.between = _between(problem, self.groups)
        self.exact = self.unit == 1 and all(low == high for low, high in self.levels)

    def times(self, wanted: npt.NDArray[np.bool_], *, up: bool) -> Array:
        """Least time of every wanted stage, [first][stop], without its fixed part."""
        least = np.full(wanted.shape, NEVER, dtype=np.int64)
        for low, high in self.levels:
            room = (self.limit - (high if up else low)) // self.unit
            if room >= 0:
                self._sweep(wanted, self._options(high, up=up), room, least)
        return least

    def _options(self, level: int, *, up: bool) -> list[list[list[tuple[int, int, int]]]]:
        """[class][group]: undominated (time, units, strategy) with at most ``level`` at work."""
        problem, away = self.problem, self.unit - 1 if up else 0
        options = []
        for c, allowed in enumerate(problem.allowed):
            memory, times = problem.memory[self.row][c], problem.time_ns[c]
            by_group: list[list[tuple[int, int, int]]] = []
            for group in self.groups:
                own: list[tuple[int, int, int]] = []
                for option in sorted(
                    (times[j], (memory[j] + away) // self.unit, j)
                    for j in group
                    if j in allowed and problem.working[c][j] <= level
                ):
                    if not own or option[1] < own[-1][1]:
                        own.append(option)
                by_group.append(own)
            options.append(by_group)
        return options

    def _sweep(
        self,
        wanted: npt.NDArray[np.bool_],
        options: list[list[list[tuple[int, int, int]]]],
        room: int,
        least: Array,
    ) -> None:
        """Walk along the chain with one state for every first layer of a wanted stage."""
        lasts = [int(stops[-1]) if len(stops := np.flatnonzero(own)) else 0 for own in wanted]
        firsts: list[int] = []
        states = np.empty((0, len(self.groups), room + 1), dtype=np.int64)
        for layer, c in enumerate(self.problem.chain):
            keep = [k for k, first in enumerate(firsts) if lasts[first] > layer]
            firsts = [firsts[k] for k in keep]
            before = self._resharded(states[keep])
            if lasts[layer] > layer:
                firsts.append(layer)
                fresh = np.zeros((1, len(self.groups), room + 1), dtype=np.int64)
                before = np.concatenate([before, fresh])
            states = _with_layer(before, options[c])
            if firsts:
                ends = states[:, :, -1].min(axis=1)
                least[firsts, layer + 1] = np.minimum(least[firsts, layer + 1], ends)

    def _resharded(self, states: Array) -> Array:
        """Least time of everything before, for each group that the next layer may be in."""
        if len(self.groups) == 1 or not len(states):
            return states
        return np.stack(
            [
                (states + self.between[:, target][None, :, None]).min(axis=1)
                for target in range(len(self.groups))
            ],
            axis=1,
        )

    def strategies(self, first: int, stop: int) -> list[int]:
        """Strategies of the least reachable time of one stage."""
        found: tuple[int, list[int]] = (NEVER, [])
        for _, high in self.levels:
            room = (self.limit - high) // self.unit
            if room >= 0:
                found = min(found, self._trace(first, stop, self._options(high, up=True), room))
        return found[1]

    def _trace(
        self, first: int, stop: int, options: list[list[list[tuple[int, int, int]]]], room: int
    ) -> tuple[int, list[int]]:
        chain = self.problem.chain[first:stop]
        before = [np.zeros((1, len(self.groups), room + 1), dtype=np.int64)]
        states = [_with_layer(before[0], options[chain[0]])]
        for c in chain[1:]:
            before.append(self._resharded(states[-1]))
            states.append(_with_layer(before[-1], options[c]))
        group = int(np.argmin(states[-1][0, :, -1]))
        total = int(states[-1][0, group, -1])
        if total >= NEVER:
            return NEVER, []
        chosen, left, value = [], room, total
        for k in range(len(chain) - 1, -1, -1):
            for spent, units, strategy in options[chain[k]][group]:
                if units <= left and int(before[k][0, group, left - units]) + spent == value:
                    chosen.append(strategy)
                    left, value = left - units, value - spent
                    break
            if k:
                column = states[k - 1][0, :, left] + self.between[:, group]
                group = int(np.argmin(column))
                value = int(states[k - 1][0, group, left])
        return total, chosen[::-1]


def _with_layer(before: Array, options: list[list[tuple[int, int, int]]]) -> Array:
    """Least times, by group and memory, once a layer has been added to what was before."""
    states = np.full_like(before, NEVER)
    count, _, room = before.shape
    scratch = np.empty((count, room), dtype=np.int64)
    for group, own in enumerate(options):
        for spent, units, _ in own:
            if units < room:
                target = states[:, group, units:]
                longer = np.add(
                    before[:, group, : room - units], spent, out=scratch[:, : room - units]
                )
                np.minimum(target, longer, out=target)
    return states


def _alike(problem: SearchProblem) -> list[list[int]]:
    """Strategies that reshard alike."""
    count = max(len(row) for row in problem.time_ns)
    if not problem.reshard_ns:
        return [list(range(count))]
    groups: dict[object, list[int]] = {}
    for j in range(count):
        key = (problem.reshard_ns[j], tuple(row[j] for row in problem.reshard_ns))
        groups.setdefault(key, []).append(j)
    return list(groups.values())


def _between(problem: SearchProblem, groups: list[list[int]]) -> Array:
    if not problem.reshard_ns:
        return np.zeros((1, 1), dtype=np.int64)
    heads = [group[0] for group in groups]
    return np.array([[problem.reshard_ns[a][b] for b in heads] for a in heads], dtype=np.int64)


def _grouped(levels: Sequence[int], most: int) -> list[tuple[int, int]]:
    """(least, greatest) of at most ``most`` runs of neighbouring levels."""
    size = -(-len(levels) // most)
    return [(part[0], part[-1]) for part in _parts(levels, size)]


def _parts(levels: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(levels), size):
        yield levels[start : start + size]
