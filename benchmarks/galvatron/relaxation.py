"""Lower bounds: the relaxation with fractional counts.

The objective of ``sharedrules.iteration`` is the greatest of linear functions of the stages'
times C_i of one micro-batch and of what the reductions leave behind, D_i:

    F_f(C) + D_i  or  F_f(C)      with F_f one of its three ways to fill the pipeline

In a few of them a slower stage gives a shorter iteration, because reductions hide behind it
(a factor of some C_j is negative). Without these the objective is a floor, never above the real
one, that rises with every C and D; the search works on the floor and costs what it finds in full.

For weights w of the functions (w >= 0, sum 1) no plan is faster than

    q(w) = sum_i min_x (a_i N_i(x) + t_i S_i(x)) + fixed

where N_i is the layers' part of C_i and S_i what their reductions add, a, t and the fixed part
(embedding and head) are the weighted sums of the functions' factors, and each stage takes its
least over fractional counts x under its memory: a linear programme with one limit, solved by its
multiplier. The weights with the greatest bound are the multipliers of the whole relaxation, a
small linear programme (``simplex``). Any weights give a valid bound, so nothing rests on the
simplex being exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.galvatron.simplex import multipliers

Floats: TypeAlias = NDArray[np.float64]
INFINITE = float("inf")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal layers of one stage: for each of some strategies of the family the time without
    reduction, what the reduction adds, and memory.
    """

    kind: int
    count: int
    strategies: NDArray[np.int64]
    steady: Floats
    sync: Floats
    memory: Floats


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A stage under weights: its least value, the price of memory, and by group what each layer
    of each strategy costs beyond the least.
    """

    least: float
    price: float
    surplus: tuple[Floats, ...]


def pieces(stages: int, chunks: int, *, whole: bool = False) -> tuple[Floats, Floats]:
    """Factors of C, and of S less embedding and head, in each function of the floor (or of the
    ``whole`` objective), one a row.
    """
    fills = np.zeros((3, stages))
    fills[0] = 1
    fills[0, -1] += chunks - 1
    steady = max(0, chunks + 1 - stages)
    fills[1, 0] = min(stages - 1, chunks - 1) + steady
    fills[2] = 1
    fills[2, 0] = steady
    late = np.vstack([np.zeros(stages), np.eye(stages)])
    before = np.vstack([np.zeros(stages), np.tri(stages, k=-1)])
    own = (fills[:, None] - before[None]).reshape(-1, stages)
    rising = (own >= 0).all(1) | whole
    return own[rising], np.tile(late, (3, 1))[rising]


def floor(steady: Floats, excess: Floats, chunks: int) -> Floats:
    """The floor of ``sharedrules.iteration``, of the same arguments."""
    own, late = pieces(steady.shape[-1], chunks)
    highest: Floats = (steady @ own.T + excess @ late.T).max(-1)
    return highest


def prices(groups: list[Group], values: list[Floats]) -> Floats:
    """Prices of memory at which the best strategy of a group changes, and 0."""
    found = [np.zeros(1)]
    for group, value in zip(groups, values, strict=True):
        saved = group.memory[:, None] - group.memory[None, :]
        lost = value[None, :] - value[:, None]
        useful = (saved > 0) & (lost > 0)
        found.append(lost[useful] / saved[useful])
    return np.concatenate(found)


def least(groups: list[Group], steady: float, sync: float, memory: Floats) -> Floats:
    """Least of ``steady`` x N + ``sync`` x S over fractional counts, for several memories."""
    values = [steady * group.steady + sync * group.sync for group in groups]
    tried = prices(groups, values)
    total = np.zeros(len(tried))
    smallest = 0.0
    for group, value in zip(groups, values, strict=True):
        total += group.count * (value[None] + tried[:, None] * group.memory[None]).min(1)
        smallest += group.count * float(group.memory.min())
    bound: Floats = (total[:, None] - tried[:, None] * memory[None]).max(0)
    bound[memory < smallest] = INFINITE
    return bound


def weighted(groups: list[Group], steady: float, sync: float, memory: float) -> Weighted:
    """A stage under weights, with the price of memory that gives the greatest bound."""
    values = [steady * group.steady + sync * group.sync for group in groups]
    tried = prices(groups, values)
    total = -tried * memory
    for group, value in zip(groups, values, strict=True):
        total += group.count * (value[None] + tried[:, None] * group.memory[None]).min(1)
    best = int(total.argmax())
    price = float(tried[best])
    costs = [value + price * group.memory for group, value in zip(groups, values, strict=True)]
    return Weighted(
        least=float(total[best]),
        price=price,
        surplus=tuple(cost - cost.min() for cost in costs),
    )


def best_weights(
    stages: list[list[Group]],
    steady: Floats,
    excess: Floats,
    memory: Floats,
    functions: tuple[Floats, Floats],
) -> tuple[Floats, Floats, float]:
    """(a, t, fixed part) of the weights with the greatest bound. ``steady`` and ``excess``: what
    is fixed in each stage; a stage without groups is fixed altogether. ``functions``: ``pieces``.
    """
    own, late = functions
    fixed = own @ steady + late @ excess
    columns = [(index, group) for index, groups in enumerate(stages) for group in groups]
    limited = [index for index, groups in enumerate(stages) if groups]
    matrix = np.zeros(
        (len(own) + len(limited) + len(columns), sum(len(g.steady) for _, g in columns))
    )
    start, first = [], 0
    for number, (index, group) in enumerate(columns):
        part = slice(first, first + len(group.steady))
        matrix[: len(own), part] = np.outer(own[:, index], group.steady)
        matrix[: len(own), part] += np.outer(late[:, index], group.sync)
        matrix[len(own) + limited.index(index), part] = group.memory
        matrix[len(own) + len(limited) + number, part] = 1
        start.append(first + int(group.memory.argmin()))
        first = part.stop
    right = np.concatenate([-fixed, memory[limited], [group.count for _, group in columns]])
    weights = multipliers(matrix, right, num_pieces=len(own), num_limits=len(limited), start=start)
    return weights @ own, weights @ late, float(weights @ fixed)
