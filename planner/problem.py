"""SearchProblem: arrays and names, the only input of a solver; Solution, the only output.

Decision: cut a chain of layers into ``num_stages`` consecutive non-empty stages and give every
layer one strategy. With T_s the time of stage s (a fixed part, its layers, and resharding
between neighbours of different strategy inside the stage), minimise

    sum_s T_s + (repeats - 1) * max_s T_s

subject, for every stage s, to  sum of memory[s] of its layers + the greatest working memory of any
of its layers <= limit[s]. With repeats = micro-batches x chunks this is the time of a pipeline
with flush, in units of 1 / chunks (UniAP, CVPR'25; Narayanan et al. 2021 for chunks > 1).

All numbers are integers (nanoseconds, bytes), so that solvers can be compared exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SearchProblem", "Solution"]


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """One problem. ``chain[i]`` is the class of layer i; equal layers share a class.

    ``time_ns[class][strategy]``; ``memory[stage][class][strategy]`` bytes that stay;
    ``working[class][strategy]`` bytes while the layer runs; ``reshard_ns[strategy][strategy]``
    between neighbours, empty where changing strategy is free. A class may allow only some
    strategies: ``allowed[class]``. ``stage_ns[stage]`` is the fixed part of a stage's time. A
    stage holds at least ``least_layers`` layers, one for each of its chunks.
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

    @cached_property
    def least_time_ns(self) -> tuple[int, ...]:
        """Prefix sums of each layer's fastest time: what no assignment can beat."""
        fastest = [
            min(self.time_ns[c][j] for j in allowed) for c, allowed in enumerate(self.allowed)
        ]
        return (0, *accumulate(fastest[c] for c in self.chain))

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
        before, after = self._counts[first], self._counts[stop]
        return tuple(b - a for a, b in zip(before, after, strict=True))

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
        if self.reshard_ns:
            total += sum(self.reshard_ns[a][b] for a, b in pairwise(strategies))
        return total

    def stage_fits(self, stage: int, first: int, strategies: tuple[int, ...]) -> bool:
        """Whether such a stage keeps its limit."""
        chain = self.chain[first : first + len(strategies)]
        pairs = list(zip(chain, strategies, strict=True))
        held = sum(self.memory[stage][c][j] for c, j in pairs)
        return held + max(self.working[c][j] for c, j in pairs) <= self.limit[stage]

    def objective_ns(self, sums: int, greatest: int) -> int:
        """The objective from the sum and the greatest of the stage times."""
        return sums + (self.repeats - 1) * greatest


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
