"""Lower bounds: what no layout of a candidate can beat, from compute and memory alone."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from costmodel.estimate import fit_limit
from costmodel.layout import NO_RECOMPUTE, Mesh, Recompute, Strategy
from costmodel.schedules import SCHEDULES, Shape
from costmodel.sharding import state_bytes
from costmodel.simulate import least_in_flight
from planner.pipelinebound import BlockTimes, PipelineBound
from planner.space import ORDER_BY_STAGE
from profiles.layers import Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.context import CostContext
    from costmodel.layers import LayerCost
    from planner.space import Candidate, Degrees

__all__ = ["CandidateBounds", "Relaxed", "num_waves"]

NANO = 10**9
INFINITE = float("inf")
GRADIENTS_SHARDED = 2  # ZeRO stage from which every micro-batch has traffic


class _Option(NamedTuple):
    """Blocks that are alike under one recomputation, as none of them can beat: time of both passes
    and of the forward, bytes held, bytes while one runs, and the longest passes, which traffic can
    hide behind.
    """

    time_ns: float
    forward_ns: float
    saved_bytes: int
    transient_bytes: int
    longest_forward_ns: float
    longest_backward_ns: float


def num_waves(degrees: Degrees) -> int:
    """Into how many parts the closed form of the step cuts a stage's time for a micro-batch: the
    pipeline fills and drains in one of them.
    """
    return degrees.chunks * SCHEDULES[degrees.schedule].fill_speed


class Relaxed(NamedTuple):
    """What no layout of a candidate can beat, and the closed form of its step for cuts as
    fortunate as can be: what it may be expected to take at least.
    """

    bound_s: float
    expected_s: float


class _Compute(NamedTuple):
    """Time of all layers and of the longest one, and the least part of a layer that is forward."""

    sums: float
    greatest: float
    forward_part: float


class CandidateBounds:
    """Bounds of candidates. Costs are remembered by shard shape, which many candidates share."""

    def __init__(self, context: CostContext, *, min_fit: float) -> None:
        """Bind what all candidates have in common."""
        self.context = context
        self.usable = fit_limit(context, min_fit)
        chain = context.chain
        self.counts = [chain.count(c) for c in range(len(context.classes))]
        blocks = {c: block for c, block in enumerate(context.classes) if isinstance(block, Block)}
        self.main = max(blocks, key=lambda c: self.counts[c], default=None)
        # Blocks that hold the same weights, as those with and without a window.
        self.alike = [
            c
            for c, block in blocks.items()
            if self.main is not None and block.parameters() == blocks[self.main].parameters()
        ]
        self.num_alike = sum(self.counts[c] for c in self.alike)
        self.block_chain = [c for c in chain if c in blocks]
        self.block_classes = list(blocks)
        self._costs: dict[object, LayerCost] = {}
        self._compute: dict[object, _Compute] = {}
        self._found_options: dict[object, list[_Option]] = {}
        self._runs: dict[object, tuple[float, Callable[[int], float]]] = {}
        self._flights: dict[object, tuple[float, ...]] = {}

    def of_degrees(self, degrees: Degrees) -> Relaxed:
        """From compute alone: no memory limit, no hand-over, no ZeRO traffic."""
        key = self._shape(degrees)
        if key not in self._compute:
            costs = [self._cost(degrees, c, NO_RECOMPUTE) for c in range(len(self.counts))]
            times = [cost.total_s * NANO for cost in costs]
            total = sum(t * n for t, n in zip(times, self.counts, strict=True))
            part = min(cost.forward.total_s / cost.total_s for cost in costs if cost.total_s)
            self._compute[key] = _Compute(total, max(times), part)
        own = self._compute[key]
        blocks = None if self.main is None else self._block_times(degrees)
        return self._step(degrees, own, blocks)

    def _block_times(self, degrees: Degrees, option: _Option | None = None) -> BlockTimes:
        """Least times of the blocks, of those alike without recomputation unless ``option`` is
        given.
        """
        plain = self._least_option(degrees, NO_RECOMPUTE)
        option = option or plain
        last = self.context.chain[-1]
        head = 0.0
        if last not in self.block_classes:
            head = self._cost(degrees, last, NO_RECOMPUTE).total_s * NANO
        host = degrees.chunks * self.context.own.micro_batch_s * NANO
        times = BlockTimes(
            block=option.time_ns,
            forward_part=option.forward_ns / option.time_ns,
            head=head,
            fixed=host,
        )
        if len(self.block_classes) == 1:
            return times
        free = degrees.chunks > 1 or SCHEDULES[degrees.schedule].copies > 1
        added = option.time_ns - plain.time_ns
        key = (self._shape(degrees), free, added)
        if key not in self._runs:
            self._runs[key] = self._unequal(degrees, added, free=free)
        part, run = self._runs[key]
        return times._replace(forward_part=part, run=run)

    def _unequal(
        self, degrees: Degrees, added_ns: float, *, free: bool
    ) -> tuple[float, Callable[[int], float]]:
        """Least forward part of any block, and the least time of so many of them, where those
        alike take ``added_ns`` more than their passes.
        """
        costs = {c: self._cost(degrees, c, NO_RECOMPUTE) for c in self.block_classes}
        own = {
            c: cost.total_s * NANO + (added_ns if c in self.alike else 0.0)
            for c, cost in costs.items()
        }
        part = min(cost.forward.total_s * NANO / own[c] for c, cost in costs.items())
        return part, _least_run([own[c] for c in self.block_chain], free=free)

    def of_memory(self, degrees: Degrees, candidates: list[Candidate]) -> Relaxed | None:
        """With the memory limit, for the leanest of the candidates of some degrees and without
        ZeRO's traffic: none of them is faster. None if none of them fits.
        """
        if self.main is None:
            return self.of_degrees(degrees)
        main = self.main
        leanest = min(candidates, key=lambda each: self._resident(each, main))
        families = dict.fromkeys(option for each in candidates for option in each.recomputes)
        lean = leanest._replace(recomputes=tuple(families))
        sums = self._relaxed_ns(lean, self._options(lean), INFINITE)
        if sums is None:
            return None
        return self._step(degrees, _Compute(sums, 0.0, 0.0), None)

    def of_candidate(self, candidate: Candidate, worth_s: float) -> Relaxed | None:
        """With the memory limit, ZeRO's traffic, hand-over and host time; None if even so nothing
        fits, or nothing that is faster than ``worth_s``.
        """
        if self.main is None:
            return self.of_degrees(candidate.degrees)
        options, once_s = self._with_states(candidate, self._options(candidate))
        sums = self._relaxed_ns(candidate, options, worth_s)
        if sums is None:
            return None
        sums += self._between_s(candidate) * NANO
        degrees = candidate.degrees
        blocks = self._block_times(degrees, options[0])
        if len(self.alike) == len(self.block_classes):
            blocks = blocks._replace(once=once_s * NANO)
        plain = self._compute[self._shape(degrees)]
        part = min(plain.forward_part, *(each.forward_ns / each.time_ns for each in options))
        return self._step(degrees, _Compute(sums, plain.greatest, part), blocks)

    def crowding(self, candidate: Candidate) -> float:
        """Memory of all blocks under the leanest recomputation over what all stages have for
        them; above 1 the candidate cannot fit.
        """
        if self.main is None:
            return 0.0
        options = self._options(candidate)
        rooms = self._rooms(candidate, min(option.transient_bytes for option in options))
        resident = self._resident(candidate, self.main)
        saved = min(option.saved_bytes for option in options)
        held = sum(max(room, 0.0) / (resident + saved * flight) for flight, room in rooms)
        return INFINITE if held == 0 else self.num_alike / held

    def _relaxed_ns(
        self, candidate: Candidate, options: list[_Option], worth_s: float
    ) -> float | None:
        """Least sum of the stages' times for fractional layers and free cuts.

        The most frequent blocks and those alike are divided over the stages at the least total
        time; every stage may hold blocks until its memory is full, and then more by changing
        some to a slower, smaller recomputation. First and last layer stand on their stages, all
        others count with their fastest time and no memory.
        """
        assert self.main is not None
        degrees, main = candidate.degrees, self.main
        rooms = self._rooms(candidate, min(option.transient_bytes for option in options))
        passes = self.context.passes_s(worth_s, candidate.num_ranks) * NANO
        most = passes / candidate.microbatches(self.context.training) / options[0].time_ns
        resident = self._resident(candidate, main) * SCHEDULES[degrees.schedule].copies
        own = _least_time(self.num_alike, rooms, resident, options, most)
        if own is None:
            return None
        total = self._compute[self._shape(degrees)].sums
        fastest = self._least_option(degrees, NO_RECOMPUTE).time_ns
        return own + total - fastest * self.num_alike

    def _with_states(
        self, candidate: Candidate, options: list[_Option]
    ) -> tuple[list[_Option], float]:
        """The options with ZeRO's traffic in every micro-batch, and what one layer adds once a
        step.
        """
        assert self.main is not None
        context, zero = self.context, candidate.zero
        cost = self._cost(candidate.degrees, self.main, NO_RECOMPUTE)
        states = context.states(cost, candidate.mesh, zero, candidate.shard_group)
        behind = max(option.longest_backward_ns for option in options) / NANO
        ahead = options[0].longest_forward_ns / NANO
        once = context.once_s(states, forward_s=ahead, backward_s=behind)
        if zero < GRADIENTS_SHARDED:
            return options, once
        degrees, loaded = candidate.degrees, []
        share = SCHEDULES[degrees.schedule].microbatches_per_gather(degrees.pp)
        for option in options:
            hidden = option.longest_forward_ns / NANO, option.longest_backward_ns / NANO
            traffic = context.exposed(states.forward_comm_s / share, hidden[0])
            traffic += context.exposed(states.backward_comm_s / share, hidden[1])
            loaded.append(option._replace(time_ns=option.time_ns + traffic * NANO))
        return loaded, once

    def _between_s(self, candidate: Candidate) -> float:
        """Hand-over and host time of one micro-batch on all stages together."""
        degrees = candidate.degrees
        host = degrees.pp * degrees.chunks * self.context.own.micro_batch_s
        sends = self.context.handed_over_s(
            candidate.mesh,
            candidate.strategy(),
            degrees.micro_batch,
            degrees.chunks,
            folds=SCHEDULES[degrees.schedule].folds,
        )
        return host + sum(sends)

    def _step(self, degrees: Degrees, own: _Compute, blocks: BlockTimes | None) -> Relaxed:
        microbatches = self.context.training.global_batch // (degrees.dp * degrees.micro_batch)
        bound = PipelineBound(
            degrees.schedule, degrees.pp, degrees.chunks, microbatches, own.forward_part
        )
        least = bound.least(own.sums, own.greatest)
        if blocks is not None:
            least = max(least, bound.whole_blocks(len(self.block_chain), blocks))
        filled = (microbatches + (degrees.pp - 1) / num_waves(degrees)) / degrees.pp * own.sums
        ranks = degrees.tp * degrees.cp * degrees.dp * degrees.pp
        return Relaxed(
            self.context.whole_step_s(least / NANO, ranks),
            self.context.whole_step_s(max(least, filled) / NANO, ranks),
        )

    def _shape(self, degrees: Degrees) -> tuple[object, ...]:
        """What decides the compute of one layer on one rank."""
        key = (*degrees[:4], degrees.micro_batch, degrees.sequence_parallel)
        if self.context.cluster.is_uniform:
            return key
        return (*key, degrees.pp, degrees.dp)

    def _cost(self, degrees: Degrees, c: int, recompute: Recompute) -> LayerCost:
        key = (self._shape(degrees), c, recompute)
        if key not in self._costs:
            shape = dict(zip(("tp", "cp", "ep", "expert_tp"), degrees[:4], strict=True))
            self._costs[key] = self.context.compute(
                self.context.classes[c],
                Strategy(
                    **shape,
                    sequence_parallel=degrees.sequence_parallel,
                    recompute=recompute,
                ),
                degrees.micro_batch,
                Mesh(**shape, dp=degrees.dp, pp=degrees.pp, order=ORDER_BY_STAGE),
            )
        return self._costs[key]

    def _least_option(self, degrees: Degrees, recompute: Recompute) -> _Option:
        """The fastest of the blocks alike, made longer by what ``recompute`` adds to the one to
        which it adds least.
        """
        plain = [self._cost(degrees, c, NO_RECOMPUTE).total_s for c in self.alike]
        own = [self._cost(degrees, c, recompute) for c in self.alike]
        added = min(each.total_s - before for each, before in zip(own, plain, strict=True))
        return _Option(
            time_ns=(min(plain) + added) * NANO,
            forward_ns=min(each.forward.total_s for each in own) * NANO,
            saved_bytes=min(each.saved_bytes for each in own),
            transient_bytes=min(each.transient_bytes for each in own),
            longest_forward_ns=max(each.forward.total_s for each in own) * NANO,
            longest_backward_ns=max(each.backward.total_s for each in own) * NANO,
        )

    def _options(self, candidate: Candidate) -> list[_Option]:
        """Undominated recomputations of the blocks alike, fastest first."""
        key = (self._shape(candidate.degrees), candidate.recomputes)
        if key not in self._found_options:
            found: list[_Option] = []
            for option in sorted(
                self._least_option(candidate.degrees, each) for each in candidate.recomputes
            ):
                if not found or option.saved_bytes < found[-1].saved_bytes:
                    found.append(option)
            self._found_options[key] = found
        return self._found_options[key]

    def _resident(self, candidate: Candidate, c: int) -> float:
        """States of a layer, in the unit of the rooms."""
        cost = self._cost(candidate.degrees, c, NO_RECOMPUTE)
        training, zero = self.context.training, candidate.zero
        total = state_bytes(cost.dense_params, zero, candidate.shard_group, training).total
        if cost.expert_params:
            shards = candidate.mesh.expert_dp
            total += state_bytes(cost.expert_params, zero, shards, training).total
        return self.context.beside_activations(total)

    def _rooms(self, candidate: Candidate, working: int) -> list[tuple[float, float]]:
        """(micro-batches in flight, bytes for blocks) of each stage."""
        degrees, own = candidate.degrees, self.context.own
        outside = own.context_bytes + self.context.communicator_bytes(candidate.mesh)
        room = (self.usable - outside) / (1 + own.reserve) - working
        room -= self.context.gathered_bytes(candidate.strategy(), degrees.micro_batch)
        flights = self._in_flight(candidate)
        rooms = [(flight, room) for flight in flights]
        kind = SCHEDULES[degrees.schedule]
        if kind.copies > 1:  # what the two directions hold of each end is left to the exact account
            return [(flight / kind.copies, room) for flight in flights]
        last = 0 if kind.folds else -1
        chain = self.context.chain
        for stage, c, ends in ((0, chain[0], False), (last, chain[-1], True)):
            if c not in self.alike:
                cost = self._cost(degrees, c, NO_RECOMPUTE)
                flight, left = rooms[stage]
                left -= cost.saved_bytes * (1 if ends and degrees.chunks > 1 else flight)
                # a tied head beside the embedding holds nothing more
                if not ends or (degrees.pp > 1 and not kind.folds):
                    left -= self._resident(candidate, c)
                rooms[stage] = flight, left
        return rooms

    def _in_flight(self, candidate: Candidate) -> tuple[float, ...]:
        degrees = candidate.degrees
        microbatches = candidate.microbatches(self.context.training)
        key = (degrees.schedule, degrees.pp, degrees.chunks, microbatches)
        if key not in self._flights:
            shape = Shape(degrees.pp, degrees.chunks, microbatches)
            self._flights[key] = least_in_flight(SCHEDULES[degrees.schedule], shape)
        return self._flights[key]


def _least_run(times: list[float], *, free: bool) -> Callable[[int], float]:
    """Least time of so many of the blocks: neighbours, or any of them where they are dealt out
    ``free``ly.
    """
    sums = [0.0, *accumulate(sorted(times) if free else times)]

    @cache
    def least(count: int) -> float:
        if count > len(times):
            return INFINITE
        if free:
            return sums[count]
        return min(sums[i + count] - sums[i] for i in range(len(times) - count + 1))

    return least


def _least_time(
    count: int,
    rooms: list[tuple[float, float]],
    resident: float,
    options: list[_Option],
    most: float,
) -> float | None:
    """Least total time of ``count`` fractional layers over stages of these rooms, at most
    ``most`` on each; None if they do not fit.
    """
    fastest = options[0]
    fast_room = 0.0
    for flight, room in rooms:
        if room < 0:
            return None
        fast_room += min(most, room / (resident + fastest.saved_bytes * flight))
    if fast_room >= count:
        return count * fastest.time_ns
    segments: list[tuple[float, float]] = []
    for flight, room in rooms:
        segments += _segments(room, flight, resident, options, most)
    left, total = float(count), 0.0
    for marginal, width in sorted(segments):
        taken = min(left, width)
        total += taken * marginal
        left -= taken
        if left <= 0:
            return total
    return None


def _segments(
    room: float, flight: float, resident: float, options: list[_Option], most: float
) -> list[tuple[float, float]]:
    """(time of one more layer, how many more) of one stage: the convex cost of its layers."""
    sizes = [resident + option.saved_bytes * flight for option in options]
    now, held = 0, min(most, room / sizes[0])
    found = [(options[0].time_ns, held)]
    while now < len(options) - 1 and held < most:
        slope, chosen = min(
            (
                (options[k].time_ns * sizes[now] - options[now].time_ns * sizes[k])
                / (sizes[now] - sizes[k]),
                k,
            )
            for k in range(now + 1, len(options))
        )
        reach = min(most, room / sizes[chosen])
        found.append((slope, reach - held))
        now, held = chosen, reach
    return found
