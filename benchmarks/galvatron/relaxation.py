"""Lower bounds: the relaxation with fractional counts.

The objective of ``sharedrules.iteration`` is the greatest of linear functions of the stages'
times without reduction N_i and of what the reductions add S_i:

    L(f, i) = F_f(C) + D_i     with F_f one of its three ways to fill the pipeline, D_i or 0

For weights w of those functions (w >= 0, sum 1) no plan is faster than

    q(w) = sum_i min_x (a_i N_i(x) + t_i S_i(x)) + fixed

where a, t and the fixed part (embedding and head) are the weighted sums of their factors, and
each stage takes its least over fractional counts x under its memory: a linear programme with one
memory constraint, solved by its multiplier. The weights with the greatest bound are the
multipliers of the whole relaxation, a small linear programme (``simplex``). Any weights give a
valid bound, so nothing here rests on the simplex being exact.
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
    """Equal layers of one stage: for each strategy the time without reduction, what the
    reduction adds, and memory.
    """

    count: int
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


def pieces(stages: int, chunks: int) -> tuple[Floats, Floats]:
    """Factors of C and of D's excess in each linear function, one a row."""
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
    return own, np.tile(late, (3, 1))


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
    stages: list[list[Group]], ends: Floats, memory: Floats, chunks: int
) -> tuple[Floats, Floats, float]:
    """(a, t, fixed part) of the weights with the greatest bound."""
    own, late = pieces(len(stages), chunks)
    fixed = own @ ends - late @ ends
    columns = [
        (index, group) for index, groups in enumerate(stages) for group in groups
    ]
    width = sum(len(group.steady) for _, group in columns)
    rows = len(own) + len(stages) + len(columns)
    matrix = np.zeros((rows, width))
    right = np.concatenate([-fixed, memory, [group.count for _, group in columns]])
    start = []
    first = 0
    for number, (index, group) in enumerate(columns):
        part = slice(first, first + len(group.steady))
        matrix[: len(own), part] = np.outer(own[:, index], group.steady)
        matrix[: len(own), part] += np.outer(late[:, index], group.sync)
        matrix[len(own) + index, part] = group.memory
        matrix[len(own) + len(stages) + number, part] = 1
        start.append(first + int(group.memory.argmin()))
        first = part.stop
    weights = multipliers(matrix, right, num_pieces=len(own), num_limits=len(stages), start=start)
    return weights @ own, weights @ late, float(weights @ fixed)
