"""Lower bounds: what no layout of a candidate can beat, from compute and memory alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from costmodel.estimate import fit_limit
from costmodel.layout import NO_RECOMPUTE
from costmodel.schedules import SCHEDULES, Shape
from costmodel.sharding import state_bytes
from costmodel.simulate import least_in_flight
from planner.leasttimes import Compute, LeastTimes
from planner.pipelinebound import PipelineBound
from planner.relaxation import least_of_stage, least_time, most_held, undominated_rooms

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.sharding import StateCost
    from planner.choices import Candidate, Degrees, Grids
    from planner.leasttimes import Option
    from planner.pipelinebound import BlockTimes

__all__ = ["CandidateBounds", "Relaxed", "num_waves"]

NANO = 10**9
INFINITE = float("inf")
GRADIENTS_SHARDED = 2  # ZeRO stage from which every micro-batch has traffic
NEVER_S = 1e6
MOST_COPIES = max(schedule.copies for schedule in SCHEDULES.values())


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


class _Held(NamedTuple):
    """Recomputations of the blocks, (micro-batches in flight, bytes for blocks) of each stage, and
    the bytes that a block always takes.
    """

    options: list[Option]
    rooms: list[tuple[float, float]]
    resident: float


class _Between(NamedTuple):
    """Nanoseconds of hand-over and host time for one micro-batch on all stages together, on the
    stage where it is least, and from one stage to the next.
    """

    sums_ns: float
    least_ns: float
    hop_ns: float


class CandidateBounds:
    """Bounds of candidates."""

    def __init__(self, context: CostContext, *, min_fit: float) -> None:
        """Bind what all candidates have in common."""
        self.context = context
        self.usable = fit_limit(context, min_fit)
        self.times = LeastTimes(context)
        self._flights: dict[object, tuple[float, ...]] = {}
        self._known_resident: dict[object, float] = {}
        self._known_states: dict[object, StateCost] = {}
        self._known_held: dict[object, _Held] = {}
        self._known_between: dict[object, _Between] = {}

    def of_grids(self, grids: Grids) -> list[Relaxed]:
        """Under any schedule, from compute alone: the work of the mean device, and where the shard
        of every layer is known the one with the longest layer or the most blocks, and the way of
        one micro-batch there and back.
        """
        first, batch = grids.alike[0], self.context.training.global_batch
        through = alone = 0.0
        if grids.with_experts:
            own = self.times.compute(first)
            sums = own.sums
            through, alone = sums * (1 - own.weight_part), own.greatest / MOST_COPIES
        else:
            sums = self.times.least_sums_ns(first)
        known: dict[tuple[int, int], Relaxed] = {}
        for grid in grids.alike:
            if (grid.pp, grid.dp) not in known:
                m = batch // (grid.dp * grid.micro_batch)
                least = max(m * sums / grid.pp, m * alone, through)
                ranks = grid.tp * grid.cp * grid.dp * grid.pp
                step = self.context.whole_step_s(least / NANO, ranks)
                known[grid.pp, grid.dp] = Relaxed(step, step)
        return [known[grid.pp, grid.dp] for grid in grids.alike]

    def of_degrees(self, degrees: Degrees) -> Relaxed:
        """From compute alone: no memory limit, no hand-over, no ZeRO traffic."""
        blocks = None if self.times.main is None else self.times.blocks(degrees)
        if blocks is not None:
            host = degrees.chunks * self.context.own.micro_batch_s * NANO
            blocks = blocks._replace(fixed=host)
        return self._step(degrees, self.times.compute(degrees), blocks)

    def of_memory(
        self, degrees: Degrees, candidates: list[Candidate], worth_s: float
    ) -> Relaxed | None:
        """With the memory limit, for the leanest of the candidates of some degrees and without
        ZeRO's traffic: none of them is faster. None as in ``of_candidate``.
        """
        if self.times.main is None:
            return self.of_degrees(degrees)
        main = self.times.main
        leanest = min(candidates, key=lambda each: self._resident(each, main))
        families = dict.fromkeys(option for each in candidates for option in each.recomputes)
        lean = leanest._replace(recomputes=tuple(families))
        held = self._held(lean)
        sums = self._relaxed_ns(lean, held, held.options, worth_s)
        if sums is None:
            return None
        found = self._step(degrees, self.times.compute(degrees)._replace(sums=sums), None)
        if found.bound_s >= worth_s or not self._holds_whole(lean, held, held.options, worth_s):
            return None
        return found

    def of_candidate(self, candidate: Candidate, worth_s: float) -> Relaxed | None:
        """With the memory limit, ZeRO's traffic, hand-over and host time; None if even so nothing
        fits, or nothing that is faster than ``worth_s``.
        """
        degrees = candidate.degrees
        if self.times.main is None:
            return self.of_degrees(degrees)
        plain, between = self.times.compute(degrees), self._between(candidate).sums_ns
        options, traffic_ns = self.times.options(degrees, candidate.recomputes), 0.0
        if candidate.zero >= GRADIENTS_SHARDED:
            fastest_ns = options[0].time_ns
            options = self._with_traffic(candidate, options)
            traffic_ns = (options[0].time_ns - fastest_ns) * self.times.num_alike
        part = min(plain.forward_part, *(each.forward_ns / each.time_ns for each in options))
        own = plain._replace(sums=plain.sums + traffic_ns + between, forward_part=part)
        if self._step(degrees, own, None).bound_s >= worth_s:
            return None
        held = self._held(candidate)
        sums = self._relaxed_ns(candidate, held, options, worth_s)
        if sums is None:
            return None
        own = own._replace(sums=sums + between)
        if self._step(degrees, own, None).bound_s >= worth_s:
            return None
        fixed_ns = self._between(candidate).least_ns
        if not self._holds_whole(candidate, held, options, worth_s, fixed_ns):
            return None
        return self._step(degrees, own, self._blocks(candidate, held, options))

    def _holds_whole(
        self,
        candidate: Candidate,
        held: _Held,
        options: list[Option],
        worth_s: float,
        fixed_ns: float = 0.0,
    ) -> bool:
        """Whether the stages can hold the blocks alike if those stay whole and no stage's passes,
        with ``fixed_ns`` beside its blocks, take longer than a step of ``worth_s``. Of unequal
        blocks in several chunks only the mean stage is certain.
        """
        degrees = candidate.degrees
        several = degrees.chunks > 1 and len(self.times.block_classes) > 1
        if worth_s == INFINITE or several or SCHEDULES[degrees.schedule].copies > 1:
            return True
        passes = self.context.passes_s(worth_s, candidate.num_ranks) * NANO
        limit = passes / candidate.microbatches(self.context.training)
        count = self.times.num_alike
        return most_held(held.rooms, held.resident, options, limit - fixed_ns, count) >= count

    def of_fuller(self, candidate: Candidate) -> float:
        """Least step in seconds where a stage holds more blocks than an even share, rounded up."""
        if self.times.main is None:
            return 0.0
        held = self._held(candidate)
        options = held.options
        if candidate.zero >= GRADIENTS_SHARDED:
            options = self._with_traffic(candidate, options)
        blocks = self._blocks(candidate, held, options)
        bound = self._pipeline(candidate.degrees, self.times.compute(candidate.degrees))
        least = bound.whole_blocks(len(self.times.block_chain), blocks, uneven=1)
        return self.context.whole_step_s(least / NANO, candidate.num_ranks)

    def recomputing_s(self, candidate: Candidate, count: int) -> list[float]:
        """Seconds for one micro-batch that ``count`` blocks on each stage take at least beyond
        their fastest, as its memory asks for; ``NEVER_S`` where so many cannot be there.
        """
        if len(self.times.alike) < len(self.times.block_classes):
            return [0.0] * candidate.degrees.pp
        held = self._held(candidate)
        fastest = count * held.options[0].time_ns
        least = {
            room: least_time(count, [room], held.resident, held.options, count)
            for room in set(held.rooms)
        }
        seconds = {
            room: NEVER_S if time is None else (time - fastest) / NANO
            for room, time in least.items()
        }
        return [seconds[room] for room in held.rooms]

    def _held(self, candidate: Candidate) -> _Held:
        """What memory depends on: everything but the rank order."""
        key = candidate._replace(rank_order="")
        if key not in self._known_held:
            options = self.times.options(candidate.degrees, candidate.recomputes)
            working = min(option.transient_bytes for option in options)
            copies = SCHEDULES[candidate.degrees.schedule].copies
            self._known_held[key] = _Held(
                options,
                self._rooms(candidate, working),
                copies * self._resident(candidate, self.times.alike[0]),
            )
        return self._known_held[key]

    def _blocks(self, candidate: Candidate, held: _Held, options: list[Option]) -> BlockTimes:
        """Least times of a candidate's blocks under ``options``."""
        degrees, between = candidate.degrees, self._between(candidate)
        blocks = self.times.blocks(degrees, options[0])
        blocks = blocks._replace(fixed=between.least_ns, hop=between.hop_ns)
        if len(self.times.alike) < len(self.times.block_classes):
            return blocks
        blocks = blocks._replace(once=self._once_s(candidate, options) * NANO)
        if len(options) == 1 or SCHEDULES[degrees.schedule].copies > 1:
            return blocks
        roomiest = undominated_rooms(held.rooms)
        return blocks._replace(
            in_memory=lambda count: least_of_stage(count, roomiest, held.resident, options)
        )

    def crowding(self, candidate: Candidate) -> float:
        """Memory of all blocks under the leanest recomputation over what all stages have for
        them; above 1 the candidate cannot fit.
        """
        if self.times.main is None:
            return 0.0
        own = self._held(candidate)
        saved = min(option.saved_bytes for option in own.options)
        held = sum(max(room, 0.0) / (own.resident + saved * flight) for flight, room in own.rooms)
        return INFINITE if held == 0 else self.times.num_alike / held

    def _relaxed_ns(
        self, candidate: Candidate, held: _Held, options: list[Option], worth_s: float
    ) -> float | None:
        """Least sum of the stages' times for fractional layers and free cuts.

        The most frequent blocks and those alike are divided over the stages at the least total
        time; every stage may hold blocks until its memory is full, and then more by changing
        some to a slower, smaller recomputation. First and last layer stand on their stages, all
        others count with their fastest time and no memory.
        """
        degrees = candidate.degrees
        passes = self.context.passes_s(worth_s, candidate.num_ranks) * NANO
        copies = SCHEDULES[degrees.schedule].copies
        most = passes / candidate.microbatches(self.context.training) / options[0].time_ns * copies
        own = least_time(self.times.num_alike, held.rooms, held.resident, options, most)
        if own is None:
            return None
        total = self.times.compute(degrees).sums
        fastest = self.times.least_option(degrees, NO_RECOMPUTE).time_ns
        return own + total - fastest * self.times.num_alike

    def _once_s(self, candidate: Candidate, options: list[Option]) -> float:
        """What one block adds once a step to the passes of a stage's blocks. Layers beside them may
        hide more of the traffic, but no more than they take themselves.
        """
        assert self.times.main is not None
        behind = max(option.longest_backward_ns for option in options) / NANO
        ahead = options[0].longest_forward_ns / NANO
        states = self._states(candidate, self.times.main)
        return self.context.once_s(states, forward_s=ahead, backward_s=behind)

    def _with_traffic(self, candidate: Candidate, options: list[Option]) -> list[Option]:
        """The options with ZeRO's traffic in every micro-batch."""
        assert self.times.main is not None
        context, degrees, loaded = self.context, candidate.degrees, []
        states = self._states(candidate, self.times.main)
        share = SCHEDULES[degrees.schedule].microbatches_per_gather(degrees.pp)
        for option in options:
            hidden = option.longest_forward_ns / NANO, option.longest_backward_ns / NANO
            traffic = context.exposed(states.forward_comm_s / share, hidden[0])
            traffic += context.exposed(states.backward_comm_s / share, hidden[1])
            loaded.append(option._replace(time_ns=option.time_ns + traffic * NANO))
        return loaded

    def _states(self, candidate: Candidate, c: int) -> StateCost:
        """States of a layer of class ``c`` and their traffic, which no schedule changes."""
        degrees, group = candidate.degrees, candidate.shard_group
        ranks = (*degrees[:4], degrees.pp, degrees.dp)
        key = (c, *ranks, candidate.rank_order, candidate.zero, group)
        if key not in self._known_states:
            cost = self.times.cost(degrees, c, NO_RECOMPUTE)
            self._known_states[key] = self.context.states(
                cost, candidate.mesh, candidate.zero, group
            )
        return self._known_states[key]

    def _between(self, candidate: Candidate) -> _Between:
        """Hand-over and host time, which no ZeRO stage changes."""
        degrees = candidate.degrees
        key = (degrees, candidate.rank_order)
        if key not in self._known_between:
            context, mesh, strategy = self.context, candidate.mesh, candidate.strategy()
            host = degrees.chunks * context.own.micro_batch_s
            folds = SCHEDULES[degrees.schedule].folds
            sends = context.hand_overs.held_up_s(
                mesh, strategy, degrees.micro_batch, degrees.chunks, folds=folds
            )
            p2p = context.hand_overs.seconds(mesh, strategy, degrees.micro_batch)
            hop = min(p2p[:-1], default=0.0) + context.own.micro_batch_s / 2
            self._known_between[key] = _Between(
                (degrees.pp * host + sum(sends)) * NANO, (host + min(sends)) * NANO, hop * NANO
            )
        return self._known_between[key]

    def _pipeline(self, degrees: Degrees, own: Compute) -> PipelineBound:
        microbatches = self.context.training.global_batch // (degrees.dp * degrees.micro_batch)
        return PipelineBound(
            degrees.schedule,
            degrees.pp,
            degrees.chunks,
            microbatches,
            own.forward_part,
            own.weight_part,
        )

    def _step(self, degrees: Degrees, own: Compute, blocks: BlockTimes | None) -> Relaxed:
        bound = self._pipeline(degrees, own)
        microbatches = bound.microbatches
        least = bound.least(own.sums, own.greatest)
        if blocks is not None:
            least = max(least, bound.whole_blocks(len(self.times.block_chain), blocks))
        filled = (microbatches + (degrees.pp - 1) / num_waves(degrees)) / degrees.pp * own.sums
        ranks = degrees.tp * degrees.cp * degrees.dp * degrees.pp
        return Relaxed(
            self.context.whole_step_s(least / NANO, ranks),
            self.context.whole_step_s(max(least, filled) / NANO, ranks),
        )

    def _resident(self, candidate: Candidate, c: int) -> float:
        """States of a layer, in the unit of the rooms."""
        degrees, zero, group = candidate.degrees, candidate.zero, candidate.shard_group
        ways = (degrees.tp, degrees.cp * degrees.dp, degrees.ep, degrees.expert_tp)
        key = (c, *ways, zero, group)
        if key not in self._known_resident:
            cost = self.times.cost(degrees, c, NO_RECOMPUTE)
            training = self.context.training
            total = state_bytes(cost.dense_params, zero, group, training).total
            if cost.expert_params:
                shards = candidate.mesh.expert_dp
                total += state_bytes(cost.expert_params, zero, shards, training).total
            self._known_resident[key] = self.context.beside_activations(total)
        return self._known_resident[key]

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
            if c not in self.times.alike:
                cost = self.times.cost(degrees, c, NO_RECOMPUTE)
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
