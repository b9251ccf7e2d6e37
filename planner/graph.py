"""Graph elimination: layers that feed several others, or are fed by several.

Inside a stage, OptCNN's two reductions (Jia et al., ICML 2018) shrink the graph of layers: a layer
with at most two neighbours is *eliminated*, its choices moved into the edge between them, and
edges that join the same two layers are *merged* into their sum. When every layer left has three
neighbours or more, the strategies of the one with most are tried in turn. OptCNN keeps one time
for each pair of strategies; here each pair keeps the undominated pairs (time, memory), which
makes it exact under a memory limit. Over the cuts it is the programme of ``planner.cuts``.

O(E C^3 + K C^K) for E edges, C strategies and K layers that remain, times the size of the fronts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from planner.cuts import best_cuts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from planner.problem import SearchProblem, Solution

__all__ = ["GraphStages", "solve"]

Chosen: TypeAlias = tuple[tuple[int, int], ...]  # (layer, strategy) of what was eliminated
Point: TypeAlias = tuple[int, int, Chosen]  # time, memory
Front: TypeAlias = list[Point]
Nodes: TypeAlias = dict[int, dict[int, Front]]  # layer, strategy
Edges: TypeAlias = dict[tuple[int, int], dict[tuple[int, int], Front]]  # layers, strategies

NOTHING: Front = [(0, 0, ())]


def solve(problem: SearchProblem) -> Solution | None:
    """The optimum, or None if nothing fits."""
    found = best_cuts(problem, GraphStages(problem))
    return found[0] if found else None


class GraphStages:
    """Solves stages by elimination, each at most once."""

    def __init__(self, problem: SearchProblem) -> None:
        """Bind the problem."""
        self.problem = problem
        self._best: dict[tuple[int, int, int], Point | None] = {}

    def time_ns(self, stage: int, first: int, stop: int) -> int | None:
        """Least time of layers ``first`` .. ``stop - 1`` on ``stage``."""
        best = self._solved(stage, first, stop)
        return None if best is None else best[0] + self.problem.stage_ns[stage]

    def least_ns(self, stage: int, first: int, stop: int) -> float:
        """What that time cannot be below."""
        return self.problem.least_stage_ns(stage, first, stop)

    def strategies(self, stage: int, first: int, stop: int) -> tuple[int, ...]:
        """Strategies of that time, one per layer."""
        best = self._solved(stage, first, stop)
        assert best is not None
        return tuple(j for _, j in sorted(best[2]))

    def _solved(self, stage: int, first: int, stop: int) -> Point | None:
        key = (stage, first, stop)
        if key not in self._best:
            points = [
                point
                for level in self.problem.working_levels
                for point in self._front(stage, range(first, stop), level)
            ]
            self._best[key] = min(points, default=None)
        return self._best[key]

    def _front(self, stage: int, layers: range, level: int) -> Front:
        """Undominated points of the stage with at most ``level`` of working memory."""
        problem, room = self.problem, self.problem.limit[stage] - level
        nodes: Nodes = {}
        most = sum(max(problem.memory[stage][problem.chain[i]]) for i in layers)
        counts = most > room  # where all of it fits, memory need not be told apart
        for i in layers:
            c = problem.chain[i]
            nodes[i] = {
                j: [(problem.time_ns[c][j], counts * problem.memory[stage][c][j], ((i, j),))]
                for j in problem.allowed[c]
                if problem.working[c][j] <= level and problem.memory[stage][c][j] <= room
            }
        graph = _Graph(nodes, {}, room)
        for edge in problem.links:
            if edge.source in layers and edge.target in layers:
                cost: dict[tuple[int, int], Front] = {
                    (i, j): [(edge.cost_ns[i][j], 0, ())]
                    for i in nodes[edge.source]
                    for j in nodes[edge.target]
                }
                graph.join(edge.source, edge.target, cost)
        return graph.solve()


@dataclass
class _Graph:
    """What is left of a stage: fronts of its layers and of the edges between them."""

    nodes: Nodes
    edges: Edges
    room: int

    def join(self, a: int, b: int, costs: dict[tuple[int, int], Front]) -> None:
        """Add an edge, or merge it into the one that joins the same layers."""
        if a > b:
            a, b, costs = b, a, {(j, i): front for (i, j), front in costs.items()}
        if (a, b) in self.edges:
            known = self.edges[a, b]
            costs = {pair: self._sum(known.get(pair, []), front) for pair, front in costs.items()}
        self.edges[a, b] = costs

    def solve(self) -> Front:
        """Eliminate, branch where that ends, and return the front of the whole."""
        done = NOTHING
        while self.nodes:
            degrees = {i: len(self._neighbours(i)) for i in self.nodes}
            least = min(degrees, key=lambda i: (degrees[i], i))
            if degrees[least] > 2:  # noqa: PLR2004 - between two neighbours there is one edge
                busiest = max(degrees, key=lambda i: (degrees[i], -i))
                return self._sum(done, self._branched(busiest))
            done = self._sum(done, self._eliminate(least))
        return done

    def _neighbours(self, i: int) -> list[int]:
        return sorted({a + b - i for a, b in self.edges if i in (a, b)})

    def _towards(self, i: int, other: int) -> dict[tuple[int, int], Front]:
        """Fronts of the edge between two layers by (strategy of ``i``, of ``other``)."""
        if i < other:
            return self.edges[i, other]
        return {(b, a): front for (a, b), front in self.edges[other, i].items()}

    def _eliminate(self, i: int) -> Front:
        """Take out a layer with at most two neighbours; what it costs by itself, if it has none."""
        around, own = self._neighbours(i), self.nodes[i]
        ways = [self._towards(i, other) for other in around]
        for other in around:
            del self.edges[min(i, other), max(i, other)]
        del self.nodes[i]
        if not around:
            return self._least(own.values())
        if len(around) == 1:
            (k,) = around
            self.nodes[k] = {
                b: self._sum(
                    front,
                    self._least(self._sum(own[j], ways[0].get((j, b), [])) for j in own),
                )
                for b, front in self.nodes[k].items()
            }
            return NOTHING
        a, b = around
        between = {
            (p, q): self._least(
                self._sum(self._sum(own[j], ways[0].get((j, p), [])), ways[1].get((j, q), []))
                for j in own
            )
            for p in self.nodes[a]
            for q in self.nodes[b]
        }
        self.join(a, b, between)
        return NOTHING

    def _branched(self, i: int) -> Front:
        """Try each strategy of a layer: its edges become costs of its neighbours."""
        fronts = []
        around = self._neighbours(i)
        for j, own in self.nodes[i].items():
            nodes = {k: dict(by_strategy) for k, by_strategy in self.nodes.items() if k != i}
            for k in around:
                way = self._towards(i, k)
                nodes[k] = {q: self._sum(f, way.get((j, q), [])) for q, f in nodes[k].items()}
            edges = {pair: costs for pair, costs in self.edges.items() if i not in pair}
            fronts.append(self._sum(own, _Graph(nodes, edges, self.room).solve()))
        return self._least(fronts)

    def _least(self, fronts: Iterable[Front]) -> Front:
        return _undominated(point for front in fronts for point in front)

    def _sum(self, a: Front, b: Front) -> Front:
        """All sums that keep the limit."""
        if a is NOTHING:
            return b
        return _undominated(
            (t + u, m + n, p + q) for t, m, p in a for u, n, q in b if m + n <= self.room
        )


def _undominated(points: Iterable[Point]) -> Front:
    kept: Front = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
