"""From a candidate to the solver's problem, and bounds of the solver's answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from costmodel.estimate import fit_limit
from costmodel.layout import NO_RECOMPUTE
from costmodel.schedules import SCHEDULES, Shape
from costmodel.simulate import in_flight, least_in_flight
from planner.bounds import num_waves
from planner.classcosts import held_bytes, once_ns
from planner.pipelinebound import PipelineBound
from planner.problem import SearchProblem
from profiles.layers import Block, Embedding, Head
from profiles.units import MIB

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.estimate import MemoryBytes
    from costmodel.layerstep import LayerStep
    from costmodel.layout import Recompute, Strategy
    from costmodel.schedules import Path, Schedule
    from planner.choices import Candidate
    from planner.problem import Solution
    from profiles.layers import Layer

__all__ = ["CandidateProblem"]

NANO = 10**9


@dataclass(frozen=True, kw_only=True)
class CandidateProblem:
    """A candidate with its costs. ``spare_bytes`` is kept free on every stage beyond the fit;
    ``least_in_flight``: stages hold the micro-batches that they are sure to hold.
    """

    context: CostContext
    candidate: Candidate
    min_fit: float
    spare_bytes: int = 0
    least_in_flight: bool = False

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """One per recomputation of the family."""
        return tuple(self.candidate.strategy(option) for option in self.candidate.recomputes)

    @cached_property
    def microbatches(self) -> int:
        """Micro-batches of one replica in a step."""
        return self.candidate.microbatches(self.context.training)

    @cached_property
    def classes(self) -> tuple[Layer, ...]:
        """Distinct layers of the model."""
        return self.context.classes

    @cached_property
    def schedule(self) -> Schedule:
        """The candidate's schedule."""
        return SCHEDULES[self.candidate.degrees.schedule]

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """Class of each layer, in the order in which stages are cut from it: that of the model,
        but where the model ends on the device where it starts, what is behind the last block
        comes first.
        """
        chain = self.context.chain
        blocks = [i for i, c in enumerate(chain) if isinstance(self.classes[c], Block)]
        if not self.schedule.folds or self.candidate.degrees.pp == 1 or not blocks:
            return chain
        behind = blocks[-1] + 1
        return chain[behind:] + chain[:behind]

    @cached_property
    def steps(self) -> tuple[tuple[LayerStep, ...], ...]:
        """``steps[class][strategy]``: cost of one layer of each class under each strategy."""
        degrees, mesh = self.candidate.degrees, self.candidate.mesh
        has_embedding = any(isinstance(each, Embedding) for each in self.classes)

        def step(layer: Layer, strategy: Strategy) -> LayerStep:
            together = degrees.pp == 1 or self.schedule.folds
            tied = isinstance(layer, Head) and layer.tied and together and has_embedding
            return self.context.layer(
                layer,
                strategy,
                degrees.micro_batch,
                mesh,
                shares_embedding=tied,
                share_gather=self.schedule.microbatches_per_gather(degrees.pp),
            )

        return tuple(
            tuple(step(layer, self.strategies[j]) for j in self.allowed(c))
            for c, layer in enumerate(self.classes)
        )

    def allowed(self, c: int) -> tuple[int, ...]:
        """Only blocks can be recomputed; the first strategy stands for "as is" elsewhere."""
        return tuple(range(len(self.strategies))) if isinstance(self.classes[c], Block) else (0,)

    @cached_property
    def places(self) -> Path:
        """(stage, chunk) of each chunk in model order."""
        return self.schedule.paths(self.shape)[0]

    @property
    def shape(self) -> Shape:
        """Size of the pipeline."""
        degrees = self.candidate.degrees
        return Shape(degrees.pp, degrees.chunks, self.microbatches)

    def ends_ns(self, stage: int) -> list[int]:
        """Time of the layers before the first block and behind the last one, by chunk of a
        stage.
        """
        chain = self.context.chain
        is_block = [isinstance(self.classes[c], Block) for c in chain]
        head, tail = is_block.index(True), is_block[::-1].index(True)
        places = self.places
        ends = {0: chain[:head], len(places) - 1: chain[len(chain) - tail :]}
        return [
            sum(self.time_ns[c][0] for c in ends.get(v, ()))
            for v, place in enumerate(places)
            if place[0] == stage
        ]

    @cached_property
    def once_before_ns(self) -> tuple[int, ...]:
        """What the layers before each position of the chain add once a step, divided over the
        micro-batches.
        """
        return (0, *accumulate(self.once_ns[c] for c in self.chain))

    @cached_property
    def once_ns(self) -> tuple[int, ...]:
        """As ``planner.classcosts.once_ns`` has it; the most frequent block counts."""
        main = max(self.chain, key=lambda c: (isinstance(self.classes[c], Block), self.counts[c]))
        return once_ns(self.steps, main, self.microbatches, self.context.hidden_part)

    @cached_property
    def counts(self) -> list[int]:
        """How many layers of each class there are."""
        return [self.chain.count(c) for c in range(len(self.classes))]

    @cached_property
    def time_ns(self) -> tuple[tuple[int, ...], ...]:
        """Both passes of one micro-batch and the layer's share of what happens once a step."""
        return tuple(
            tuple(int((step.forward.total_s + step.backward.total_s) * NANO) + once for step in row)
            for row, once in zip(self.steps, self.once_ns, strict=True)
        )

    @cached_property
    def link_s(self) -> tuple[float, ...]:
        """Seconds of a hand-over between each stage and the next (the last: to the first)."""
        degrees = self.candidate.degrees
        return self.context.hand_overs.seconds(
            self.candidate.mesh, self.strategies[0], degrees.micro_batch
        )

    @cached_property
    def stage_ns(self) -> tuple[int, ...]:
        """Host time and hand-over of each stage for one micro-batch."""
        degrees = self.candidate.degrees
        sends = self.context.hand_overs.held_up_s(
            self.candidate.mesh,
            self.strategies[0],
            degrees.micro_batch,
            degrees.chunks,
            folds=self.schedule.folds,
        )
        host = degrees.chunks * self.context.own.micro_batch_s
        return tuple(int((seconds + host) * NANO) for seconds in sends)

    @cached_property
    def allocated_limit(self) -> int:
        """Bytes that tensors of one rank may take so that the layout fits, states counted as
        ``CostContext.beside_activations`` has them.
        """
        own, candidate = self.context.own, self.candidate
        outside = own.context_bytes + self.context.communicator_bytes(candidate.mesh)
        gathered = self.context.gathered_bytes(self.strategies[0], candidate.degrees.micro_batch)
        reserved = fit_limit(self.context, self.min_fit) - outside
        return int(reserved / (1 + own.reserve)) - gathered - self.spare_bytes

    def with_less(self, used: MemoryBytes) -> CandidateProblem:
        """The same candidate with so much less memory that a layout which took ``used`` fits."""
        states = used.parameters + used.gradients + used.optimizer
        passing = used.activations + used.working
        over = math.ceil(self.context.beside_activations(states)) + passing - self.allocated_limit
        spare = self.spare_bytes + max(over, MIB)
        return replace(self, spare_bytes=spare)

    def with_least_in_flight(self) -> CandidateProblem | None:
        """The same candidate with the micro-batches that stages are sure to hold, where those
        known exactly would have to be read off long orders.
        """
        if self.schedule.least_held is None or self.schedule.held(self.shape) is not None:
            return None
        return replace(self, least_in_flight=True)

    @cached_property
    def problem(self) -> SearchProblem:
        """The solver's input.

        Of several chunks a stage holds the mean share in flight; only the model's last layer, at
        the end of the last chunk, is known to be there once. A layout of several chunks must fit
        by this closed form and by the exact account.
        """
        degrees = self.candidate.degrees
        stages, microbatches = degrees.pp, self.microbatches
        known = least_in_flight if self.least_in_flight else in_flight
        flights = known(self.schedule, self.shape)
        spread = degrees.chunks > 1 and not self.schedule.folds
        once = self.chain[-1] if spread and self.allowed(self.chain[-1]) == (0,) else -1
        copies = self.schedule.copies
        memory = held_bytes(self.context, self.steps, set(flights), copies=copies, once=once)
        return SearchProblem(
            chain=self.chain,
            num_stages=stages,
            repeats=microbatches * self.waves,
            time_ns=self.time_ns,
            memory=tuple(memory[flight] for flight in flights),
            working=tuple(tuple(step.transient_bytes for step in row) for row in self.steps),
            limit=(self.allocated_limit,) * stages,
            allowed=tuple(self.allowed(c) for c in range(len(self.classes))),
            stage_ns=self.stage_ns,
            least_layers=self.pipeline.least_of_stage(len(self.chain)),
        )

    @cached_property
    def waves(self) -> int:
        """As ``num_waves``."""
        return num_waves(self.candidate.degrees)

    @cached_property
    def pipeline(self) -> PipelineBound:
        """The bound that this candidate's schedule obeys."""
        degrees = self.candidate.degrees
        return PipelineBound(
            degrees.schedule,
            degrees.pp,
            degrees.chunks,
            self.microbatches,
            self._forward_part,
            self._weight_part,
        )

    def bound_s(self, cut: Solution) -> float:
        """A step time that no layout with the stages of ``cut`` can beat."""
        stops = (*cut.starts[1:], len(self.chain))
        times, once = cut.stage_times_ns, self.once_before_ns
        passes = [
            time - once[stop] + once[first]
            for time, first, stop in zip(times, cut.starts, stops, strict=True)
        ]
        least = self.least_ns(sum(times), max(times))
        copies = self.schedule.copies
        if copies > 1:
            pairs = zip(times, times[::-1], strict=True)
            least = max(least, self.microbatches / copies * max(a + b for a, b in pairs))
        elif not self.moves_blocks:
            before = 0.0
            for own, first, stop in zip(passes, cut.starts, stops, strict=True):
                least = max(least, self.way_ns(before, own, first, stop))
                before += self.lead_ns(own, first, stop)
        return self.step_s(least)

    def step_s(self, passes_ns: float) -> float:
        """The whole step in seconds from its passes in nanoseconds."""
        return self.context.whole_step_s(passes_ns / NANO, self.candidate.num_ranks)

    def passes_ns(self, step_s: float) -> float:
        """The passes in nanoseconds of a whole step in seconds."""
        return self.context.passes_s(step_s, self.candidate.num_ranks) * NANO

    def least_ns(self, sums: float, greatest: float) -> float:
        """Least nanoseconds of all passes of a layout with at least this sum and this greatest of
        its stage times. Where ``moves_blocks``, only the sum is that of the layout.
        """
        least = self.pipeline.fill * (sums - self.once_before_ns[-1])
        if self.moves_blocks:
            return max(least, self.microbatches * sums / self.candidate.degrees.pp)
        return max(least, self.microbatches / self.schedule.copies * greatest)

    def way_ns(self, before_ns: float, passes_ns: float, first: int, stop: int) -> float:
        """Least time from the start of the step to the end of all that follows the passes of a
        stage of layers ``first`` .. ``stop - 1`` with passes of ``passes_ns`` for a micro-batch:
        it works m times behind the forwards of the stages before it, of which both passes of
        the first micro-batch take ``before_ns``, and before their backwards or its own work once a
        step. Without a flush only its work is certain.
        """
        once = self.once_before_ns[stop] - self.once_before_ns[first]
        work, own = self.microbatches * passes_ns, self.microbatches * once
        if not self.schedule.drains:
            return work + own
        return work + max(before_ns * self._drains, before_ns * self._forward_part + own)

    def expected_s(self, cut: Solution) -> float:
        """The closed form of the step of ``cut``: what the solvers minimise, in seconds. The
        simulation differs from it by how unequal stages wait for one another.
        """
        return self.step_s(cut.objective_ns / self.waves)

    def lead_ns(self, passes_ns: float, first: int, stop: int) -> float:
        """Least time of both passes of the first chunk of a stage with layers ``first`` .. ``stop -
        1``: all of one chunk; of several the whole blocks that an even share is sure to have, at
        their fastest.
        """
        chunks = self.candidate.degrees.chunks
        if chunks == 1:
            return passes_ns
        held = self.chain[first:stop]
        if self.schedule.folds or not all(isinstance(self.classes[c], Block) for c in held):
            return 0.0
        fastest = min(min(self.time_ns[c]) - self.once_ns[c] for c in held)
        return len(held) // chunks * fastest

    @cached_property
    def _forward_part(self) -> float:
        """Least part of a layer's passes that is forward."""
        return min(
            step.forward.total_s / (step.forward.total_s + step.backward.total_s)
            for row in self.steps
            for step in row
        )

    @cached_property
    def _weight_part(self) -> float:
        """Greatest part of a layer's passes that makes weight gradients."""
        return max(
            step.weight_s / (step.forward.total_s + step.backward.total_s)
            for row in self.steps
            for step in row
        )

    @cached_property
    def _drains(self) -> float:
        """Part of the passes before a stage that is sure to come in front of its first pass or
        behind its last one: of whole backward passes all.
        """
        return 1.0 if self.schedule.returns_whole else self._forward_part

    @cached_property
    def is_block(self) -> list[bool]:
        """Of each layer of the chain, whether it carries a number: all but embedding and head."""
        ends = Embedding | Head
        return [not isinstance(self.classes[c], ends) for c in self.problem.chain]

    @cached_property
    def moves_blocks(self) -> bool:
        """Whether a stage does not hold what the cut gave it, as with unequal blocks in several
        chunks: then only the mean of the stages is certain.
        """
        blocks = sum(isinstance(layer, Block) for layer in self.classes)
        return blocks > 1 and self.candidate.degrees.chunks > 1

    @property
    def counts_memory(self) -> bool:
        """Whether a stage holds at least what the closed form counts. Where two directions share a
        device it also holds the opposite stage, which may hold less than the copy that counts here.
        """
        return not self.moves_blocks and self.schedule.copies == 1

    def limits_ns(self, worth_s: float) -> tuple[float, float]:
        """Greatest sum of stage times and greatest stage time of a layout that takes less than
        ``worth_s``: ``least_ns`` solved for each of them. Where ``moves_blocks``, the greatest time
        is that of the cut, and a layout made of another cut may take less.
        """
        passes_ns = self.passes_ns(worth_s)
        sums = passes_ns / self.pipeline.fill + self.once_before_ns[-1]
        return sums, passes_ns / self.microbatches * self.schedule.copies

    def option(self, c: int, j: int) -> Recompute:
        """Recomputation that strategy ``j`` means for a layer of class ``c``."""
        is_block = isinstance(self.classes[c], Block)
        return self.candidate.recomputes[j] if is_block else NO_RECOMPUTE
