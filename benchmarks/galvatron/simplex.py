"""A small dense simplex for one shape of linear programme.

    minimise t   subject to   P x - t <= -f  (pieces),   M x <= m  (limits),   E x = n  (counts)

with x >= 0, t free, and one row of E for each group of columns. It starts from a feasible corner,
so there is no first phase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_PIVOTS = 400
TINY = 1e-9


def multipliers(
    matrix: NDArray[np.float64],
    right: NDArray[np.float64],
    *,
    num_pieces: int,
    num_limits: int,
    start: list[int],
) -> NDArray[np.float64]:
    """Multipliers of the pieces: non-negative, with sum 1.

    ``matrix`` and ``right`` have the rows of the pieces (right: -f), limits and counts; ``start``
    is the column of each count row that holds all of its count in a feasible corner.
    """
    rows, width = matrix.shape
    scale = np.abs(matrix[:num_pieces]).max() or 1.0
    slacks = num_pieces + num_limits
    table = np.zeros((rows + 1, width + 1 + slacks + 1))
    table[:rows, :width] = matrix
    table[:num_pieces, :width] /= scale
    table[:num_pieces, width] = -1
    table[:slacks, width + 1 : -1] = np.eye(slacks)
    table[:rows, -1] = right
    table[:num_pieces, -1] /= scale
    limits = slice(num_pieces, slacks)
    size = np.abs(table[limits, :width]).max(1, initial=1.0)
    table[limits, : width + 1] /= size[:, None]
    table[limits, -1] /= size
    table[rows, width] = 1  # the objective, in reduced form below
    basis = [width + 1 + row for row in range(slacks)] + start
    for row, column in enumerate(start):
        _pivot(table, slacks + row, column)
    worst = int(table[:num_pieces, -1].argmin())
    _pivot(table, worst, width)
    basis[worst] = width
    _descend(table, basis, width)
    weights = np.maximum(table[rows, width + 1 : width + 1 + num_pieces], 0)
    total = weights.sum()
    return weights / total if total > 0 else np.full(num_pieces, 1 / num_pieces)


def _descend(table: NDArray[np.float64], basis: list[int], free: int) -> None:
    """Pivots until no column improves; the free variable never leaves."""
    for pivots in range(MOST_PIVOTS):
        reduced = table[-1, :-1]
        improving = np.flatnonzero(reduced < -TINY)
        if not len(improving):
            return
        by_rule = pivots > MOST_PIVOTS // 2  # Bland's rule ends every cycle
        column = int(improving[0] if by_rule else improving[reduced[improving].argmin()])
        steps = table[:-1, column]
        rising = np.flatnonzero(steps > TINY)
        rising = rising[[basis[row] != free for row in rising]]
        if not len(rising):
            return
        ratios = np.maximum(table[rising, -1], 0) / steps[rising]
        row = int(rising[ratios.argmin()])
        _pivot(table, row, column)
        basis[row] = column


def _pivot(table: NDArray[np.float64], row: int, column: int) -> None:
    table[row] /= table[row, column]
    factors = table[:, column].copy()
    factors[row] = 0
    table -= np.outer(factors, table[row])
