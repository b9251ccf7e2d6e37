"""Measured times of one operation in one kind of group, by size of the message.

Between two points time is a straight line: a latency and a bandwidth of its own for each piece, as
libraries change protocols with size, and some get slower. Noise only adds time, so a point never
takes longer than a larger one, and the curve grows with size. Beyond the largest point the last
piece goes on. For people, ``pieces`` draws it with as few lines as stay near all points.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from costmodel.interpolation import Basis

if TYPE_CHECKING:
    from collections.abc import Iterable

    from profiles.measured import CollectiveTime

__all__ = ["LinkCurve", "Piece", "curve_of"]

NEAR: Final = 0.1  # of a point's time, within which a piece stays


@dataclass(frozen=True, slots=True)
class Piece:
    """From ``num_bytes`` on, ``seconds`` and then ``bytes_per_s`` (inf: no longer for more)."""

    num_bytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """``seconds[i]`` of ``sizes[i]`` bytes, both growing; ``doubtful`` are places in them."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    doubtful: frozenset[int] = frozenset()

    def at(self, size: float) -> tuple[float, Basis]:
        """Seconds of ``size`` bytes, never less than the smallest point's, and their basis."""
        after = bisect_left(self.sizes, size)
        if after == len(self.sizes):
            return self._beyond(size), Basis.EXTRAPOLATED
        if self.sizes[after] == size:
            return self.seconds[after], self._basis(Basis.MEASURED, after)
        if after == 0:
            return self.seconds[0], Basis.EXTRAPOLATED
        part = (size - self.sizes[after - 1]) / (self.sizes[after] - self.sizes[after - 1])
        low, high = self.seconds[after - 1], self.seconds[after]
        return low + part * (high - low), self._basis(Basis.INTERPOLATED, after - 1, after)

    def _basis(self, basis: Basis, *places: int) -> Basis:
        return Basis.DOUBTFUL if self.doubtful.intersection(places) else basis

    def _beyond(self, size: float) -> float:
        if len(self.sizes) == 1:
            return self.seconds[0] * size / self.sizes[0]
        (before, largest), (shorter, longest) = self.sizes[-2:], self.seconds[-2:]
        return longest + (size - largest) * (longest - shorter) / (largest - before)

    def pieces(self) -> tuple[tuple[Piece, ...], float]:
        """The fewest lines, each from one point to another, that stay within a tenth of all points
        between, and the greatest part by which they miss one.
        """
        last = len(self.sizes) - 1
        reached = [(0, 0, 0.0)]  # for each end: lines, the start of the last one, the worst miss
        for end in range(1, last + 1):
            tried = []
            for start in range(end):
                miss = self._miss(start, end)
                if miss <= NEAR:
                    lines, _, worst = reached[start]
                    tried.append((lines + 1, max(worst, miss), start))
            lines, worst, start = min(tried)
            reached.append((lines, start, worst))
        starts, end = [], last
        while end > 0:
            starts.append((reached[end][1], end))
            end = reached[end][1]
        found = tuple(self._piece(*ends) for ends in reversed(starts))
        return found or (Piece(self.sizes[0], self.seconds[0], self.sizes[0] / self.seconds[0]),), (
            reached[last][2]
        )

    def _piece(self, start: int, end: int) -> Piece:
        longer = self.seconds[end] - self.seconds[start]
        size = self.sizes[end] - self.sizes[start]
        return Piece(
            self.sizes[start], self.seconds[start], size / longer if longer else float("inf")
        )

    def _miss(self, start: int, end: int) -> float:
        line = LinkCurve(
            (self.sizes[start], self.sizes[end]), (self.seconds[start], self.seconds[end])
        )
        inner = range(start + 1, end)
        return max(
            (abs(line.at(self.sizes[i])[0] / self.seconds[i] - 1) for i in inner), default=0.0
        )


def curve_of(rows: Iterable[CollectiveTime]) -> LinkCurve:
    """The curve of at least one row; of several of one size the least counts."""
    least: dict[int, CollectiveTime] = {}
    for row in sorted(rows, key=lambda row: row.seconds):
        least.setdefault(row.num_bytes, row)
    sizes = sorted(least)
    seconds = [least[size].seconds for size in sizes]
    for place in range(len(seconds) - 2, -1, -1):
        seconds[place] = min(seconds[place], seconds[place + 1])
    doubtful = frozenset(place for place, size in enumerate(sizes) if least[size].doubtful)
    return LinkCurve(tuple(sizes), tuple(seconds), doubtful)
