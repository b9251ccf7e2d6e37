"""Layers of one model under different tp, dp, ZeRO and recomputation (as in Galvatron).

The outer loop gives all layers the same degrees. From its best layouts on, each layer may divide
the ranks of its stage in its own way: another tp with as much less dp, another ZeRO stage (a layer
of a ZeRO-3 job that keeps its weights is one of stage 2: DeepCompile's choice between "persist"
and "gather"), another recomputation. Activations that change hands between unlike neighbours
cost their resharding. The cut and all strategies are chosen together by the nested programme,
starting from the layout as it was, and the result is simulated like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Final

from costmodel.estimate import LayoutCost
from costmodel.layout import NO_RECOMPUTE, Chunk, LayerSpan, Layout
from costmodel.resharding import reshard_s
from costmodel.schedules import Shape
from costmodel.simulate import in_flight
from planner import nested
from planner.build import NANO, CandidateProblem
from planner.finalists import Finalist
from planner.problem import SearchProblem
from planner.searchrun import TIGHTENINGS
from profiles.layers import Block, Embedding, Head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.context import CostContext
    from costmodel.layerstep import LayerStep
    from costmodel.layout import Strategy
    from planner.choices import Candidate
    from planner.problem import Solution
    from planner.space import SearchSpace

__all__ = ["MixedProblem", "best_mix"]

WORTH: Final = 0.995  # of the step with equal degrees: a mixed job must be faster than that
NEAR: Final = 1e-3  # gap at which the nested programme may stop
MOST_WORK: Final = 1_500_000  # of a round of the nested programme: about half a second


def best_mix(
    context: CostContext, space: SearchSpace, finalists: tuple[Finalist, ...], *, min_fit: float
) -> Finalist | None:
    """The fastest layout of mixed degrees made from ``finalists``, if it is worth its mixture."""
    if not finalists or not space.rules.mixes_degrees:
        return None
    limit_s = finalists[0].estimate.step_s * WORTH
    best: Finalist | None = None
    groups = {_fixed(finalist): finalist for finalist in reversed(finalists)}
    for finalist in reversed(groups.values()):
        if finalist.layout.num_chunks > 1:
            continue
        options = tuple(_options(space, finalist))
        if len(options) == len(finalist.candidate.recomputes):
            continue
        for ends in _ends(context, space, options):
            found = _mixed(context, space, finalist, min_fit, (options, ends))
            if found is not None and found.estimate.step_s < limit_s:
                best, limit_s = found, found.estimate.step_s
    return best


def _fixed(finalist: Finalist) -> Candidate:
    """What mixing leaves as it is; layouts that have it in common mix to the same."""
    degrees = finalist.candidate.degrees
    ranks, sequences = degrees.tp * degrees.dp, degrees.micro_batch * degrees.dp
    alike = degrees._replace(tp=1, dp=ranks, micro_batch=sequences, sequence_parallel=False)
    return finalist.candidate._replace(degrees=alike, zero=0, shard_group=1)


def _ends(
    context: CostContext, space: SearchSpace, options: tuple[Strategy, ...]
) -> tuple[Strategy | None, ...]:
    """Strategies to try for embedding and head, where they share a matrix and must be alike."""
    if not (space.rules.tied_alike and context.model.tied):
        return (None,)
    return tuple(dict.fromkeys(each for each in options if each.recompute == NO_RECOMPUTE))


def _mixed(
    context: CostContext,
    space: SearchSpace,
    finalist: Finalist,
    min_fit: float,
    choices: tuple[tuple[Strategy, ...], Strategy | None],
) -> Finalist | None:
    base = CandidateProblem(context=context, candidate=finalist.candidate, min_fit=min_fit)
    for _ in range(TIGHTENINGS):
        mixed = MixedProblem(base, *choices)
        incumbent = mixed.assignment(finalist.layout)
        answer = nested.solve(mixed.problem, incumbent=incumbent, gap=NEAR, most_work=MOST_WORK)
        if answer.solution is None or answer.solution == incumbent:
            return None
        if not space.rules.empty_stages and not all(answer.solution.stage_blocks(base.is_block)):
            return None
        layout = mixed.layout(answer.solution)
        cost = LayoutCost(context, layout)
        if cost.fit_probability >= min_fit:
            own = cost.estimate(min_fit=min_fit)
            return Finalist(candidate=finalist.candidate, layout=layout, estimate=own)
        base = base.with_less(cost.fullest)
    return None


def _options(space: SearchSpace, finalist: Finalist) -> Iterator[Strategy]:
    """Strategies that divide the same ranks: those of the layout's candidate, then others."""
    own, degrees = finalist.candidate, finalist.candidate.degrees
    yield from (own.strategy(option) for option in own.recomputes)
    ranks, sequences = degrees.tp * degrees.dp, degrees.micro_batch * degrees.dp
    for tp in _nested_degrees(space, degrees.tp):
        if ranks % tp or sequences % (ranks // tp):
            continue
        if tp != degrees.tp and not own.mesh.regroups:
            continue
        dp = ranks // tp
        like = degrees._replace(
            tp=tp,
            dp=dp,
            micro_batch=sequences // dp,
            sequence_parallel=tp > 1 and space.sequence_splits(tp, degrees.cp),
        )
        if degrees.ep * degrees.expert_tp > 1 and tp != degrees.tp:
            continue
        for candidate in space.candidates(like):
            alike = candidate.rank_order == own.rank_order
            if alike and candidate != own and set(candidate.recomputes) <= set(own.recomputes):
                yield from (candidate.strategy(option) for option in candidate.recomputes)


def _nested_degrees(space: SearchSpace, own: int) -> list[int]:
    """Legal tp degrees of which each divides the next, the layout's own among them."""
    kept = [own]
    for tp in space.tp_degrees():
        if tp != own and all(max(tp, k) % min(tp, k) == 0 for k in kept):
            kept.append(tp)
    return kept


@dataclass(frozen=True)
class MixedProblem:
    """The choice of a strategy for each layer and of the cut, as a solver's problem. ``ends``: the
    one of embedding and head, where they have no choice.
    """

    base: CandidateProblem
    options: tuple[Strategy, ...]
    ends: Strategy | None = None

    @property
    def context(self) -> CostContext:
        """The inputs of every cost."""
        return self.base.context

    @cached_property
    def skeleton(self) -> Layout:
        """Mesh and batch of the candidate, without layers."""
        degrees = self.base.candidate.degrees
        return Layout(
            mesh=self.base.candidate.mesh,
            schedule=degrees.schedule,
            num_chunks=1,
            micro_batch=degrees.micro_batch,
            num_microbatches=self.base.microbatches,
            chunks=(),
        )

    def _allowed(self, c: int) -> tuple[int, ...]:
        if isinstance(self.base.classes[c], Block):
            return tuple(range(len(self.options)))
        return tuple(
            j
            for j, each in enumerate(self.options)
            if each.recompute == NO_RECOMPUTE and self.ends in (None, each)
        )

    def _step(self, c: int, strategy: Strategy) -> LayerStep:
        layer, classes = self.base.classes[c], self.base.classes
        together = self.base.candidate.degrees.pp == 1 and any(
            isinstance(each, Embedding) for each in classes
        )
        return self.context.layer(
            layer,
            strategy,
            self.skeleton.micro_batch_of(strategy),
            self.skeleton.mesh_of(strategy),
            shares_embedding=isinstance(layer, Head) and layer.tied and together,
            share_gather=self.base.schedule.microbatches_per_gather(self.skeleton.num_stages),
        )

    def _time_ns(self, step: LayerStep) -> int:
        forward, backward = step.forward.total_s, step.backward.total_s
        once = self.context.once_s(step.states, forward_s=forward, backward_s=backward)
        return int((forward + backward + once / self.base.microbatches) * NANO)

    def _gathered(self, strategy: Strategy) -> int:
        return self.context.gathered_bytes(strategy, self.skeleton.micro_batch_of(strategy))

    @cached_property
    def problem(self) -> SearchProblem:
        """Strategies that a class may not take cost nothing there and are not allowed."""
        classes, options = range(len(self.base.classes)), self.options
        allowed = tuple(self._allowed(c) for c in classes)
        steps = [{j: self._step(c, options[j]) for j in allowed[c]} for c in classes]
        kept = self._gathered(self.base.strategies[0])
        beside, every = self.context.beside_activations, range(len(options))
        stages = self.base.candidate.degrees.pp
        flights = in_flight(self.base.schedule, Shape(stages, 1, self.base.microbatches))

        def held(step: LayerStep, flight: float) -> int:
            states = math.ceil(beside(step.states.resident_bytes))
            return states + math.ceil(step.saved_bytes * flight)

        def working(j: int, step: LayerStep) -> int:
            return step.transient_bytes + max(0, self._gathered(options[j]) - kept)

        return SearchProblem(
            chain=self.base.chain,
            num_stages=stages,
            repeats=self.base.microbatches,
            time_ns=tuple(
                tuple(self._time_ns(own[j]) if j in own else 0 for j in every) for own in steps
            ),
            memory=tuple(
                tuple(tuple(held(own[j], f) if j in own else 0 for j in every) for own in steps)
                for f in flights
            ),
            working=tuple(
                tuple(working(j, own[j]) if j in own else 0 for j in every) for own in steps
            ),
            limit=(self.base.allocated_limit,) * stages,
            allowed=allowed,
            stage_ns=self.base.stage_ns,
            reshard_ns=tuple(tuple(self._reshard_ns(a, b) for b in options) for a in options),
        )

    def _reshard_ns(self, before: Strategy, after: Strategy) -> int:
        return int(sum(reshard_s(self.context, self.skeleton, before, after)) * NANO)

    def assignment(self, layout: Layout) -> Solution | None:
        """A layout of these strategies as the solver's answer, None where its closed form of memory
        does not hold it, or its ends lie otherwise than they must.
        """
        if self.ends is not None and layout.ends != (self.ends, self.ends):
            return None
        starts = tuple(chunk.first for chunk in layout.chunks)
        spans = [span for chunk in layout.chunks for span in chunk.spans]
        strategies = [self.options.index(s.strategy) for s in spans for _ in range(s.first, s.stop)]
        return self.problem.cost(starts, tuple(strategies))

    def layout(self, solution: Solution) -> Layout:
        """The layout of an answer; its mesh is divided as its first layer has it."""
        first = self.options[solution.strategies[0]]
        stops = (*solution.starts[1:], len(self.problem.chain))
        chunks = []
        for stage, (start, stop) in enumerate(zip(solution.starts, stops, strict=True)):
            spans, at = [], start
            for j, group in groupby(solution.strategies[start:stop]):
                end = at + len(list(group))
                spans.append(LayerSpan(at, end, self.options[j]))
                at = end
            chunks.append(Chunk(stage, 0, tuple(spans)))
        return replace(
            self.skeleton,
            mesh=self.skeleton.mesh_of(first),
            micro_batch=self.skeleton.micro_batch_of(first),
            chunks=tuple(chunks),
        )
