"""The optimum under the peer's cost rules, with its proof.

Families are visited by a bound that ignores memory; inside one, each split of embedding and head
is bounded by the relaxation, and where the bound is below the best time so far, the counts of
layers by strategy are solved (``counts``). All that is left out is left out by a bound, so the
answer is the optimum of the space, unless ``counts`` had to leave something unlisted; then the
answer's bound is below its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.galvatron.best import Best, Chosen
from benchmarks.galvatron.counts import Counts, groups_of
from benchmarks.galvatron.relaxation import INFINITE, least
from benchmarks.galvatron.sharedrules import iteration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.galvatron.relaxation import Floats, Group
    from benchmarks.galvatron.space import Family

__all__ = ["Answer", "solve"]

CERTAIN = 1e-9  # relative: how near a bound counts as met


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
        return self.chosen is None or self.bound_ms >= self.chosen.iteration_ms * (1 - CERTAIN)


def solve(families: Iterable[Family], budget_mib: float) -> Answer:
    """The fastest plan of all families within the memory of each GPU. Of equally fast plans the
    one whose family and split of embedding and head come first by their bounds.
    """
    best = Best()
    ordered = sorted(
        ((_without_memory(family), number, family) for number, family in enumerate(families)),
        key=lambda each: each[:2],
    )
    for bound, _, family in ordered:
        if bound < best.worth:
            memory = np.float64(budget_mib) - family.fixed_mib
            (_solve_uniform if family.pairs else _solve_counts)(best, family, memory)
    chosen = best.chosen
    reached = INFINITE if chosen is None else chosen.iteration_ms
    return Answer(
        chosen=chosen,
        bound_ms=min(reached, best.unlisted),
        short_mib=math.ceil(best.short) if chosen is None and ordered else None,
        num_families=len(ordered),
        num_solved=best.num_solved,
    )


def _without_memory(family: Family) -> float:
    """Least time with the fastest strategy and the fastest ends everywhere."""
    counts = np.array(family.counts)
    steady = counts @ family.steady_ms.min(1) + family.ends_ms.min(0)
    return float(iteration(steady, np.zeros_like(steady), family.chunks))


def _solve_uniform(best: Best, family: Family, memory: Floats) -> None:
    """One strategy for all layers: every pair of it and a split of embedding and head."""
    counts = np.array(family.counts)
    vocabs, strategies = np.array(family.pairs).T
    held = np.einsum("sk,skj->js", counts, family.layer_mib)[strategies]
    short = held - memory[vocabs]
    best.note_shortage(short)
    steady = (counts @ family.steady_ms).T[strategies] + family.ends_ms[vocabs]
    excess = (counts @ family.sync_ms).T[strategies] - family.ends_ms[vocabs]
    times = iteration(steady, excess, family.chunks)
    times[(short > 0).any(1)] = INFINITE
    least_at = int(times.argmin())
    taken = np.zeros(family.layer_mib.shape, dtype=np.int64)
    taken[:, :, strategies[least_at]] = counts
    best.take(Chosen(float(times[least_at]), family, int(vocabs[least_at]), taken))


def _solve_counts(best: Best, family: Family, memory: Floats) -> None:
    """Any strategy for any layer: each split of embedding and head that its bound does not rule
    out.
    """
    stages = [groups_of(family, stage) for stage in range(family.pp)]
    needs = [sum(group.count * float(group.memory.min()) for group in own) for own in stages]
    best.note_shortage(np.array(needs)[None] - memory)
    bounds = _quick_bounds(family, stages, memory)
    counts = Counts(best, family, stages)
    for vocab in np.argsort(bounds, kind="stable"):
        if bounds[vocab] < best.worth:
            best.num_solved += 1
            counts.solve(int(vocab), memory[vocab])


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
