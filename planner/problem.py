"""SearchProblem: arrays and names, the only input of a solver; Solution, the only output.

Decision: cut a row of layers into ``num_stages`` consecutive non-empty stages and give every
layer one strategy. With T_s the time of stage s (a fixed part, its layers, and resharding along
the edges inside the stage) and o_s that of the hand-over from stage s to the next, minimise

    sum_s T_s + sum_s o_s + (repeats - 1) * max_s (T_s, o_s)

subject, for every stage s, to  sum of memory[s] of its layers + the greatest working memory of any
of its layers <= limit[s]. With repeats = micro-batches x chunks this is the time of a pipeline
with flush, in units of 1 / chunks (UniAP, CVPR'25; Narayanan et al. 2021 for chunks > 1).

The layers are a chain, each feeding the next, unless ``edges`` says who feeds whom.

All numbers are integers (nanoseconds, bytes), so that solvers can be compared exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Bounded", "Edge", "SearchProblem", "Solution"]


class Edge(NamedTuple):
    """Layer ``source`` feeds layer ``target``, a later one; ``cost_ns[i][j]`` if they have
    strategies i and j and lie in one stage.
    """

    source: int
    target: int
    cost_ns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """One problem. ``chain[i]`` is the class of layer i; equal layers share a class.

    ``time_ns[class][strategy]``; ``memory[stage][class][strategy]`` bytes that stay;
    ``working[class][strategy]`` bytes while the layer runs; ``reshard_ns[strategy][strategy]``
    between neighbours, empty where changing strategy is free. A class may allow only some
    strategies: ``allowed[class]``. ``stage_ns[stage]`` is the fixed part of a stage's time. A
    stage holds at least ``least_layers`` layers, one for each of its chunks. ``edges`` replaces
    the chain and its ``reshard_ns``. ``handover_ns[i]`` is the time to hand over to a stage that
    starts with layer i, empty where it is free.
    """

    chain: tuple[int, ...]
    num_stages: int
    repeats: int
    time_ns: tuple[tuple[int, ...], ...]
    memory: tuple[tuple[tuple[int, ...], ...], ...]
    working: tuple[tuple[int, ...], ...]
    limit: tuple[int, ...]
    allowed: tuple[tuple[int, ...], ...]
    stage_ns: tuple[int, ...]
    least_layers: int = 1
    reshard_ns: tuple[tuple[int, ...], ...] = ()
    edges: tuple[Edge, ...] | None = None
    handover_ns: tuple[int, ...] = ()

    @cached_property
    def links(self) -> tuple[Edge, ...]:
        """All edges that cost something: those given, or those between neighbours."""
        if self.edges is not None:
            return self.edges
        if not self.reshard_ns:
            return ()
        return tuple(Edge(i, i + 1, self.reshard_ns) for i in range(len(self.chain) - 1))

    @property
    def is_chain(self) -> bool:
        """Whether edges join neighbours only."""
        return self.edges is None

    @cached_property
    def least_time_ns(self) -> tuple[int, ...]:
        """Prefix sums of each layer's fastest time: what no assignment can beat."""
        fastest = [
            min(self.time_ns[c][j] for j in allowed) for c, allowed in enumerate(self.allowed)
        ]
        return (0, *accumulate(fastest[c] for c in self.chain))

    def least_stage_ns(self, stage: int, first: int, stop: int) -> int:
        """Time of a stage whose layers ``first`` .. ``stop - 1`` are all at their fastest."""
        return self.stage_ns[stage] + self.least_time_ns[stop] - self.least_time_ns[first]

    @cached_property
    def _counts(self) -> tuple[tuple[int, ...], ...]:
        """Prefix counts of layers by class."""
        counts = [0] * len(self.time_ns)
        rows = [tuple(counts)]
        for c in self.chain:
            counts[c] += 1
            rows.append(tuple(counts))
        return tuple(rows)

    def class_counts(self, first: int, stop: int) -> tuple[int, ...]:
        """How many layers of each class lie in ``first`` .. ``stop - 1``."""
        known = self._counts_between
        if (first, stop) not in known:
            known[first, stop] = tuple(map(sub, self._counts[stop], self._counts[first]))
        return known[first, stop]

    @cached_property
    def _counts_between(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The answers of ``class_counts`` so far."""
        return {}

    @cached_property
    def working_levels(self) -> tuple[int, ...]:
        """Distinct amounts of working memory that a stage may have to set aside."""
        return tuple(
            sorted({self.working[c][j] for c, own in enumerate(self.allowed) for j in own})
        )

    def stage_time_ns(self, stage: int, first: int, strategies: tuple[int, ...]) -> int:
        """Time of a stage whose layers from ``first`` on have ``strategies``."""
        chain = self.chain[first : first + len(strategies)]
        total = self.stage_ns[stage]
        total += sum(self.time_ns[c][j] for c, j in zip(chain, strategies, strict=True))
        stop = first + len(strategies)
        return total + sum(
            edge.cost_ns[strategies[edge.source - first]][strategies[edge.target - first]]
            for edge in self.links
            if first <= edge.source and edge.target < stop
        )

    def stage_fits(self, stage: int, first: int, strategies: tuple[int, ...]) -> bool:
        """Whether such a stage keeps its limit."""
        chain = self.chain[first : first + len(strategies)]
        pairs = list(zip(chain, strategies, strict=True))
        held = sum(self.memory[stage][c][j] for c, j in pairs)
        return held + max(self.working[c][j] for c, j in pairs) <= self.limit[stage]

    def handover(self, first: int) -> int:
        """Time to hand over to a stage that starts with layer ``first``."""
        return self.handover_ns[first] if first and self.handover_ns else 0

    def objective_ns(self, sums: int, greatest: int) -> int:
        """The objective from the sum and the greatest of the times of stages and hand-overs."""
        return sums + (self.repeats - 1) * greatest

    def cost(self, starts: tuple[int, ...], strategies: tuple[int, ...]) -> Solution | None:
        """What an assignment costs, None if it breaks a rule: how every answer is checked."""
        stops = (*starts[1:], len(self.chain))
        if starts[0] != 0 or len(starts) != self.num_stages:
            return None
        if any(b - a < self.least_layers for a, b in zip(starts, stops, strict=True)):
            return None
        if any(j not in self.allowed[c] for c, j in zip(self.chain, strategies, strict=True)):
            return None
        parts = [strategies[a:b] for a, b in zip(starts, stops, strict=True)]
        if not all(self.stage_fits(s, starts[s], part) for s, part in enumerate(parts)):
            return None
        times = [self.stage_time_ns(s, starts[s], part) for s, part in enumerate(parts)]
        both = times + [self.handover(first) for first in starts]
        return Solution(
            starts=starts,
            strategies=strategies,
            stage_times_ns=tuple(times),
            objective_ns=self.objective_ns(sum(both), max(both)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment: first layer of each stage, strategy of each layer, its stage times.

    Among equal objectives a solver returns the first cut in lexicographic order of stage starts
    that it meets; equal layers of a stage stand in order of strategy number.
    """

    starts: tuple[int, ...]
    strategies: tuple[int, ...]
    stage_times_ns: tuple[int, ...]
    objective_ns: int

    def stage_blocks(self, is_block: Sequence[bool]) -> list[int]:
        """Blocks of each stage; ``is_block`` tells of each layer whether it is one."""
        stops = (*self.starts[1:], len(is_block))
        return [sum(is_block[a:b]) for a, b in zip(self.starts, stops, strict=True)]


@dataclass(frozen=True, slots=True)
class Bounded:
    """The best assignment found, and an objective that none is below (the same if proven).

    ``solution`` is None where none was found; with a ``bound_ns`` of None there is none.
    """

    solution: Solution | None
    bound_ns: int | None

    @property
    def gap(self) -> float:
        """Relative distance of the two; 0 where it is proven that there is no assignment."""
        if self.bound_ns is None:
            return 0.0
        if self.solution is None:
            return 1.0
        return 1 - self.bound_ns / self.solution.objective_ns if self.solution.objective_ns else 0.0
