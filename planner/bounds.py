"""Lower bounds: what no layout of a candidate can beat, from compute and memory alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from costmodel.estimate import fit_limit
from costmodel.layout import NO_RECOMPUTE, Mesh, Recompute, Strategy
from costmodel.schedules import SCHEDULES
from costmodel.sharding import state_bytes
from planner.space import ORDER_BY_STAGE
from profiles.layers import Block

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.layers import LayerCost
    from planner.space import Candidate, Degrees

__all__ = ["BlockTimes", "CandidateBounds", "PipelineBound"]

NANO = 10**9
INFINITE = float("inf")
GRADIENTS_SHARDED = 2  # ZeRO stage from which every micro-batch has traffic


@dataclass(frozen=True, slots=True)
class PipelineBound:
    """Least time of the passes of a pipeline with flush, from the time of one micro-batch on its
    stages: W over all of them, T on the busiest.

    The busiest stage works m times: m T. The pipeline also fills and drains: ``fill`` * W.

    For one chunk and m > p (or m = 1): stage k waits for the stages before it once, works m
    times, and waits at least S_k - w_k F_k and S_k - w_k B_k for the stages behind it, where S_k
    is their sum and w_k = p - 1 - k. The mean of these paths over k is (m + p - 1) W / p whatever
    the division of W, so the greatest is no less. For 1F1B with 1 < m <= p only "the stages
    before it once, then m times" is certain; its least value over all divisions is
    W / (1 - (1 - 1/m)^p). With several chunks only the mean stage's work, m W / p, is certain
    for any division: a light first chunk lets the next stage start early.
    """

    schedule: str
    stages: int
    chunks: int
    microbatches: int

    @property
    def fill(self) -> float:
        """Factor of the sum of stage times."""
        p, m = self.stages, self.microbatches
        if self.chunks > 1:
            return m / p
        if self.schedule == "1f1b" and 1 < m <= p:
            return 1 / (1 - (1 - 1 / m) ** p)
        return (m + p - 1) / p

    def least(self, sums: float, greatest: float) -> float:
        """Least time of all passes."""
        return max(self.fill * sums, self.microbatches * greatest)

    def whole_blocks(self, blocks: int, share: BlockTimes) -> float:
        """Least time when ``blocks`` equal blocks stay whole, in the time unit of ``share``.

        Say the fullest stage holds K blocks, and the stages lack D = p K - blocks of being equal.
        At most D stages stand behind the last full one, so at least blocks - K - D (K - 1) blocks
        stand before it: their forwards come before its first pass, their backwards (or its own
        work once a step) after its last one. Of several chunks only the first is certain, which
        holds K / v blocks on each of the p - D - 1 other full stages. The last stage holds at
        least blocks - (p - 1) K, and the head. The bound is the least over all K.
        """
        p, m, t = self.stages, self.microbatches, share.block
        best, most = float("inf"), -(-blocks // p)
        while m * (most * t + share.fixed) < best:
            lacking = p * most - blocks
            before = max(0, blocks - most - lacking * (most - 1))
            rest = max(0, blocks - (p - 1) * most)
            before_last = blocks - rest
            if self.chunks > 1:
                full = max(0, p - lacking - 1)
                before = before_last = full * (most // self.chunks)
            waits = max(before * t, before * t * share.forward_part + most * share.once)
            full_stage = m * (most * t + share.fixed) + waits
            last_stage = m * (rest * t + share.head + share.fixed) + before_last * t
            best = min(best, max(full_stage, last_stage))
            most += 1
        return best


class BlockTimes(NamedTuple):
    """Least times of one micro-batch: a block's passes and the part of them that is forward, what
    a block adds once a step, the model's last layer, and a stage's own (host) time.
    """

    block: float
    forward_part: float
    once: float = 0.0
    head: float = 0.0
    fixed: float = 0.0


class _Option(NamedTuple):
    """One layer under one recomputation: time of both passes and of the forward, bytes held,
    bytes while it runs.
    """

    time_ns: float
    forward_ns: float
    saved_bytes: int
    transient_bytes: int

    @classmethod
    def of(cls, cost: LayerCost) -> Self:
        """The part of a layer's cost that decides."""
        seconds = cost.total_s * NANO
        return cls(seconds, cost.forward.total_s * NANO, cost.saved_bytes, cost.transient_bytes)


class CandidateBounds:
    """Bounds of candidates. Costs are remembered by shard shape, which many candidates share."""

    def __init__(self, context: CostContext, *, min_fit: float) -> None:
        """Bind what all candidates have in common."""
        self.context = context
        self.usable = fit_limit(context, min_fit)
        chain = context.chain
        self.counts = [chain.count(c) for c in range(len(context.classes))]
        blocks = [c for c, layer in enumerate(context.classes) if isinstance(layer, Block)]
        self.main = max(blocks, key=lambda c: self.counts[c], default=None)
        self._costs: dict[object, LayerCost] = {}
        self._compute: dict[object, tuple[float, float]] = {}
        self._found_options: dict[object, list[_Option]] = {}
        self._flights: dict[object, tuple[float, ...]] = {}

    def of_degrees_s(self, degrees: Degrees) -> float:
        """From compute alone: no memory limit, no hand-over, no ZeRO traffic."""
        key = self._shape(degrees)
        if key not in self._compute:
            times = [
                self._cost(degrees, c, NO_RECOMPUTE).total_s * NANO for c in range(len(self.counts))
            ]
            total = sum(t * n for t, n in zip(times, self.counts, strict=True))
            self._compute[key] = total, max(times)
        sums, greatest = self._compute[key]
        blocks = None if self.main is None else self._block_times(degrees)
        return self._step_s(degrees, sums, greatest, blocks)

    def _block_times(self, degrees: Degrees, option: _Option | None = None) -> BlockTimes:
        """Times of the most frequent block, without recomputation unless ``option`` is given."""
        assert self.main is not None
        option = option or _Option.of(self._cost(degrees, self.main, NO_RECOMPUTE))
        last = self.context.chain[-1]
        head = 0.0
        if last != self.main:
            head = self._cost(degrees, last, NO_RECOMPUTE).total_s * NANO
        host = degrees.chunks * self.context.own.micro_batch_s * NANO
        return BlockTimes(
            block=option.time_ns,
            forward_part=option.forward_ns / option.time_ns,
            head=head,
            fixed=host,
        )

    def of_memory_s(self, degrees: Degrees, candidates: list[Candidate]) -> float | None:
        """With the memory limit, for the leanest of the candidates of some degrees and without
        ZeRO's traffic: none of them is faster. None if none of them fits.
        """
        if self.main is None:
            return self.of_degrees_s(degrees)
        main = self.main
        leanest = min(candidates, key=lambda each: self._resident(each, main))
        families = dict.fromkeys(option for each in candidates for option in each.recomputes)
        lean = leanest._replace(recomputes=tuple(families))
        sums = self._relaxed_ns(lean, self._options(lean, main), INFINITE)
        return None if sums is None else self._step_s(degrees, sums, 0.0, None)

    def of_candidate_s(self, candidate: Candidate, worth_s: float) -> float | None:
        """With the memory limit, ZeRO's traffic, hand-over and host time; None if even so nothing
        fits, or nothing that is faster than ``worth_s``.
        """
        if self.main is None:
            return self.of_degrees_s(candidate.degrees)
        options, once_s = self._with_states(candidate, self._options(candidate, self.main))
        sums = self._relaxed_ns(candidate, options, worth_s)
        if sums is None:
            return None
        sums += self._between_s(candidate) * NANO
        degrees = candidate.degrees
        blocks = self._block_times(degrees, options[0])._replace(once=once_s * NANO)
        return self._step_s(degrees, sums, self._compute[self._shape(degrees)][1], blocks)

    def crowding(self, candidate: Candidate) -> float:
        """Memory of all blocks under the leanest recomputation over what all stages have for
        them; above 1 the candidate cannot fit.
        """
        if self.main is None:
            return 0.0
        options = self._options(candidate, self.main)
        rooms = self._rooms(candidate, min(option.transient_bytes for option in options))
        resident = self._resident(candidate, self.main)
        saved = min(option.saved_bytes for option in options)
        held = sum(max(room, 0.0) / (resident + saved * flight) for flight, room in rooms)
        return INFINITE if held == 0 else self.counts[self.main] / held

    def _relaxed_ns(
        self, candidate: Candidate, options: list[_Option], worth_s: float
    ) -> float | None:
        """Least sum of the stages' times for fractional layers and free cuts.

        Blocks of the most frequent class are divided over the stages at the least total time;
        every stage may hold blocks until its memory is full, and then more of them by changing
        some to a slower, smaller recomputation. First and last layer stand on their stages, all
        others count with their fastest time and no memory.
        """
        assert self.main is not None
        degrees, main = candidate.degrees, self.main
        rooms = self._rooms(candidate, min(option.transient_bytes for option in options))
        passes = self.context.passes_s(worth_s, candidate.num_ranks) * NANO
        most = passes / candidate.microbatches(self.context.training) / options[0].time_ns
        resident = self._resident(candidate, main)
        own = _least_time(self.counts[main], rooms, resident, options, most)
        if own is None:
            return None
        total, _ = self._compute[self._shape(degrees)]
        fastest = self._cost(degrees, main, NO_RECOMPUTE).total_s * NANO
        return own + total - fastest * self.counts[main]

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
        behind = max(option.time_ns - option.forward_ns for option in options) / NANO
        once = context.once_s(states, forward_s=options[0].forward_ns / NANO, backward_s=behind)
        if zero < GRADIENTS_SHARDED:
            return options, once
        forward, backward = states.forward_comm_s, states.backward_comm_s
        loaded = [
            option._replace(
                time_ns=option.time_ns
                + context.exposed(forward, option.forward_ns / NANO) * NANO
                + context.exposed(backward, (option.time_ns - option.forward_ns) / NANO) * NANO
            )
            for option in options
        ]
        return loaded, once

    def _between_s(self, candidate: Candidate) -> float:
        """Hand-over and host time of one micro-batch on all stages together."""
        degrees = candidate.degrees
        host = degrees.pp * degrees.chunks * self.context.own.micro_batch_s
        sends = self.context.handed_over_s(
            candidate.mesh, candidate.strategy(), degrees.micro_batch, degrees.chunks
        )
        return host + sum(sends)

    def _step_s(
        self, degrees: Degrees, sums: float, greatest: float, blocks: BlockTimes | None
    ) -> float:
        microbatches = self.context.training.global_batch // (degrees.dp * degrees.micro_batch)
        bound = PipelineBound(degrees.schedule, degrees.pp, degrees.chunks, microbatches)
        least = bound.least(sums, greatest)
        if blocks is not None and self.main is not None:
            least = max(least, bound.whole_blocks(self.counts[self.main], blocks))
        ranks = degrees.tp * degrees.cp * degrees.dp * degrees.pp
        return self.context.whole_step_s(least / NANO, ranks)

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

    def _options(self, candidate: Candidate, c: int) -> list[_Option]:
        """Undominated recomputations of a layer, fastest first."""
        key = (self._shape(candidate.degrees), c, candidate.recomputes)
        if key not in self._found_options:
            costs = [self._cost(candidate.degrees, c, each) for each in candidate.recomputes]
            found: list[_Option] = []
            for option in sorted(_Option.of(cost) for cost in costs):
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
        for stage, c in ((0, self.context.chain[0]), (-1, self.context.chain[-1])):
            if c != self.main:
                cost = self._cost(degrees, c, NO_RECOMPUTE)
                flight, left = rooms[stage]
                left -= cost.saved_bytes * (1 if stage and degrees.chunks > 1 else flight)
                if degrees.pp > 1 or stage == 0:  # a tied head on one stage holds nothing more
                    left -= self._resident(candidate, c)
                rooms[stage] = flight, left
        return rooms

    def _in_flight(self, candidate: Candidate) -> tuple[float, ...]:
        degrees = candidate.degrees
        microbatches = candidate.microbatches(self.context.training)
        key = (degrees.schedule, degrees.pp, degrees.chunks, microbatches)
        if key not in self._flights:
            flight = SCHEDULES[degrees.schedule].in_flight
            self._flights[key] = tuple(
                flight(degrees.pp, degrees.chunks, microbatches, s) for s in range(degrees.pp)
            )
        return self._flights[key]


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
