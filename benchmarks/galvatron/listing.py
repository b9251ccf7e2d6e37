"""Whole counts near the relaxation.

A plan whose time is within ``gap`` of a bound q(w) spends no more than the gap on layers that
take other strategies than the relaxation's and on memory left unused: what it costs beyond the
bound is sum (surplus x count) + price x unused memory, over all stages. So the plans that can be
the best are few, and all of them are listed here, as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from benchmarks.galvatron.relaxation import Floats, Group, Weighted

MOST = 300_000
ROUNDING = 1e-12
FIRST_GAP = 1e-7  # of a stage's least: how far from it the first list reaches
WIDER = 3.0


class TooManyError(Exception):
    """More mixes than are worth listing."""


@dataclass(frozen=True, kw_only=True)
class Mixes:
    """Counts of a stage, one a row: ``counts[group][row, strategy]``, and their sums."""

    groups: tuple[Group, ...]
    counts: tuple[NDArray[np.int64], ...]
    spent: Floats
    steady: Floats
    sync: Floats
    memory: Floats

    @classmethod
    def of(
        cls, groups: Sequence[Group], counts: Sequence[NDArray[np.int64]], spent: Floats
    ) -> Self:
        """The mixes with these counts; ``spent`` is what they cost beyond the bound."""
        pairs = list(zip(groups, counts, strict=True))
        nothing = np.zeros(len(spent))
        return cls(
            groups=tuple(groups),
            counts=tuple(counts),
            spent=spent,
            steady=sum((rows @ group.steady for group, rows in pairs), nothing),
            sync=sum((rows @ group.sync for group, rows in pairs), nothing),
            memory=sum((rows @ group.memory for group, rows in pairs), nothing),
        )

    def __getitem__(self, rows: NDArray[np.int64]) -> Mixes:
        return Mixes(
            groups=self.groups,
            counts=tuple(each[rows] for each in self.counts),
            spent=self.spent[rows],
            steady=self.steady[rows],
            sync=self.sync[rows],
            memory=self.memory[rows],
        )


def mixes(groups: list[Group], stage: Weighted, memory: float, gap: float) -> Mixes:
    """All mixes of a stage that fit and cost at most ``gap`` beyond its least value."""
    gap += ROUNDING * (1 + abs(stage.least))
    found = Mixes.of((), (), np.zeros(1))
    later = sum(group.count * float(group.memory.min()) for group in groups)
    for group, surplus in zip(groups, stage.surplus, strict=True):
        later -= group.count * float(group.memory.min())
        found = _joined(found, _group_mixes(group, surplus, gap), gap, memory - later)
    total = found.spent + stage.price * (memory - found.memory)
    return replace(found, spent=total)[np.flatnonzero(total <= gap)]


def nearest(groups: list[Group], stage: Weighted, memory: float, most: float) -> Mixes | None:
    """The mixes that cost least beyond the relaxation, or None if that is more than ``most``."""
    gap = FIRST_GAP * (abs(stage.least) + 1)
    while True:
        found = mixes(groups, stage, memory, gap)
        if len(found.spent):
            return found[np.flatnonzero(found.spent <= found.spent.min() + ROUNDING)]
        if gap > most:
            return None
        gap *= WIDER


def undominated(found: Mixes, indifferent: float) -> Mixes:
    """Mixes of which no other is as good in both times; sync below ``indifferent`` is alike."""
    sync = np.maximum(found.sync, indifferent)
    order = np.lexsort((found.spent, sync, found.steady))
    best = np.minimum.accumulate(sync[order])
    kept = np.ones(len(order), dtype=bool)
    kept[1:] = best[1:] < best[:-1]
    return found[order[kept]]


def distinct(found: Mixes) -> Mixes:
    """One of the mixes of each pair of times, that which costs least beyond the relaxation."""
    order = np.lexsort((found.spent, found.sync, found.steady))
    steady, sync = found.steady[order], found.sync[order]
    kept = np.ones(len(order), dtype=bool)
    kept[1:] = (steady[1:] != steady[:-1]) | (sync[1:] != sync[:-1])
    return found[order[kept]]


def _group_mixes(group: Group, surplus: Floats, gap: float) -> Mixes:
    """Counts of one group: the strategy of no surplus takes what the others leave."""
    order = np.argsort(surplus, kind="stable")
    rows = np.zeros((1, len(order)), dtype=np.int64)
    used, spent = np.zeros(1, dtype=np.int64), np.zeros(1)
    for strategy in order[:0:-1]:
        room = group.count - used
        if surplus[strategy] > 0:
            affordable = np.minimum((gap - spent) / surplus[strategy], group.count)
            room = np.minimum(room, affordable.astype(np.int64))
        repeats = room + 1
        total = int(repeats.sum())
        if total > MOST:
            raise TooManyError
        source = np.repeat(np.arange(len(rows)), repeats)
        taken = np.arange(total) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        rows = rows[source]
        rows[:, strategy] = taken
        used, spent = used[source] + taken, spent[source] + surplus[strategy] * taken
    rows[:, order[0]] = group.count - used
    return Mixes.of([group], [rows], spent)


def _joined(left: Mixes, right: Mixes, gap: float, memory: float) -> Mixes:
    """Every pair that fits and is within the gap."""
    if len(left.spent) * len(right.spent) > MOST * 10:
        raise TooManyError
    spent = left.spent[:, None] + right.spent[None]
    held = left.memory[:, None] + right.memory[None]
    first, second = np.nonzero((spent <= gap) & (held <= memory))
    if len(first) > MOST:
        raise TooManyError
    a, b = left[first], right[second]
    return Mixes(
        groups=(*a.groups, *b.groups),
        counts=(*a.counts, *b.counts),
        spent=a.spent + b.spent,
        steady=a.steady + b.steady,
        sync=a.sync + b.sync,
        memory=a.memory + b.memory,
    )
