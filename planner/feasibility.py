"""When nothing fits: what is in the way, and the smallest changes that would help.

Every hint has been tried: the changed problem has a layout that fits.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from costmodel.context import CostContext
from costmodel.estimate import estimate, fit_limit
from costmodel.layout import ContextComm
from planner.bounds import CandidateBounds
from planner.build import CandidateProblem
from planner.choices import Restrictions
from planner.launchers import LAUNCHERS
from planner.layouts import build_layout
from planner.problem import Solution
from planner.rules import listed
from planner.space import SearchSpace
from profiles.cluster import NodeGroup
from profiles.errors import InfeasibleError
from profiles.training import AttentionKernel, GradDtype, Optimizer
from profiles.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from costmodel.layout import Layout
    from planner.choices import Candidate
    from profiles.training import TrainingSpec

__all__ = ["explain_infeasible", "fits_with", "tightest_constraint"]

Kept = TypeVar("Kept")
MOST_NODES_FACTOR = 64
EXAMINED = 24  # candidates looked at closely, of those that crowd their stages least


def explain_infeasible(
    context: CostContext, space: SearchSpace, *, min_fit: float
) -> InfeasibleError:
    """Why ``space`` has no layout that fits with probability ``min_fit``."""
    leanest = _leanest(context, space, min_fit)
    if leanest is None:
        return _no_legal_layout(space)
    need, candidate = leanest
    return InfeasibleError(
        f"{context.model.name} does not fit on {space.cluster.name} "
        f"({space.num_gpus} GPUs of {context.cluster.least_memory_bytes / GIB:.1f} GiB)",
        constraint=_constraint(context, space, candidate, min_fit),
        hints=tuple(_hints(context, space, min_fit, need)),
    )


def tightest_constraint(context: CostContext, space: SearchSpace, *, min_fit: float) -> str:
    """What keeps the leanest layout of ``space`` from fitting, in the user's words."""
    leanest = _leanest(context, space, min_fit)
    if leanest is None:
        return _no_legal_layout(space).constraint
    return _constraint(context, space, leanest[1], min_fit)


def _leanest(
    context: CostContext, space: SearchSpace, min_fit: float
) -> tuple[float, Candidate] | None:
    """(need / room, candidate) of the layout that comes closest to fitting when blocks are cut
    evenly and recomputed as far as memory asks; None if the space is empty.
    """
    bounds = CandidateBounds(context, min_fit=min_fit)
    closest = heapq.nsmallest(
        EXAMINED,
        (
            (bounds.crowding(candidate), position, candidate)
            for position, candidate in enumerate(_candidates(space))
        ),
    )
    needs = [(_need(context, each, min_fit), position, each) for _, position, each in closest]
    best = min(needs, default=None)
    return None if best is None else (best[0], best[2])


def _candidates(space: SearchSpace) -> Iterator[Candidate]:
    """The leanest candidates of every mesh: the space names the smallest micro-batch and the
    fewest chunks first, and more sharding never takes more memory on a rank's states.
    """
    seen = set()
    for degrees in space.degrees():
        mesh = (*degrees[:4], degrees.pp, degrees.dp)
        if mesh in seen:
            continue
        seen.add(mesh)
        found = list(space.candidates(degrees))
        most = max(((each.zero, each.shard_group) for each in found), default=None)
        yield from (each for each in found if (each.zero, each.shard_group) == most)


def _need(context: CostContext, candidate: Candidate, min_fit: float) -> float:
    """Memory of the fullest stage of an even cut under the leanest strategies, over its room."""
    array = CandidateProblem(context=context, candidate=candidate, min_fit=min_fit).problem
    worst = 0.0
    for stage, (first, stop) in enumerate(_even_cut(len(array.chain), array.num_stages)):
        counts = array.class_counts(first, stop)
        present = [c for c, n in enumerate(counts) if n]
        held = sum(
            counts[c] * array.memory[stage][c][_lean(array.memory[stage][c])] for c in present
        )
        held += max(array.working[c][_lean(array.memory[stage][c])] for c in present)
        room = array.limit[stage]
        worst = max(worst, held / room if room > 0 else float("inf"))
    return worst


def _lean(row: tuple[int, ...]) -> int:
    return min(range(len(row)), key=lambda j: row[j])


def _even_cut(layers: int, stages: int) -> list[tuple[int, int]]:
    """Equal shares, the longer ones at the end, where fewer micro-batches are in flight."""
    return list(pairwise(layers * stage // stages for stage in range(stages + 1)))


def _even_layout(
    context: CostContext, space: SearchSpace, candidate: Candidate, min_fit: float
) -> Layout:
    problem = CandidateProblem(context=context, candidate=candidate, min_fit=min_fit)
    array = problem.problem
    cut = _even_cut(len(array.chain), array.num_stages)
    strategies = [
        _lean(array.memory[stage][array.chain[i]])
        for stage, (first, stop) in enumerate(cut)
        for i in range(first, stop)
    ]
    solution = Solution(
        starts=tuple(first for first, _ in cut),
        strategies=tuple(strategies),
        stage_times_ns=(0,) * array.num_stages,
        objective_ns=0,
    )
    return build_layout(problem, solution, space.rules.mixing)


def _constraint(
    context: CostContext, space: SearchSpace, candidate: Candidate, min_fit: float
) -> str:
    """The memory of the fullest stage in the user's words."""
    own = estimate(context, _even_layout(context, space, candidate, min_fit), min_fit=min_fit)
    stage = max(own.stages, key=lambda each: each.memory.device_bytes)
    d, memory = candidate.degrees, stage.memory
    degrees = ", ".join(
        f"{name} {value}"
        for name, value in (("tp", d.tp), ("cp", d.cp), ("ep", d.ep), ("pp", d.pp), ("dp", d.dp))
        if value > 1
    )
    kinds = {
        name: getattr(memory, name)
        for name in ("parameters", "gradients", "optimizer", "activations", "working", "buffers")
    }
    largest = sorted(kinds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest if size > GIB / 20)
    room = fit_limit(context, min_fit) / GIB
    return (
        f"device memory: the leanest layout ({degrees or 'one GPU'}, ZeRO-{candidate.zero}, "
        f"micro-batch {d.micro_batch}) needs {own.peak_mem_bytes / GIB:.1f} GiB on stage "
        f"{stage.stage} ({parts} GiB); {room:.1f} GiB may be used to fit with probability "
        f"{min_fit:g}"
    )


def _hints(context: CostContext, space: SearchSpace, min_fit: float, need: float) -> Iterator[str]:
    """Changes that make it fit, from cheap to dear; each has been tried."""
    for hint, training in _leaner_training(context.training):
        if _fits_changed(context, space, min_fit, training=training):
            yield hint
    restrictions = space.restrictions
    if restrictions != Restrictions() and _fits_changed(
        context, space, min_fit, restrictions=Restrictions()
    ):
        yield "lifting the restrictions of --fix, --max and --exclude"
    nodes = _enough_nodes(context, space, min_fit, need)
    if nodes is not None:
        gpus = space.cluster.num_gpus // space.cluster.num_nodes * nodes
        yield f"{nodes} nodes ({gpus} GPUs) instead of {space.cluster.num_nodes}"


def _leaner_training(training: TrainingSpec) -> Iterator[tuple[str, TrainingSpec]]:
    if training.micro_batch is not None and training.micro_batch > 1:
        yield "--micro-batch 1", replace(training, micro_batch=1)
    if training.attention.stores_scores:
        flash = AttentionKernel.FLASH2
        yield "--attention flash2 (no stored scores)", replace(training, attention=flash)
    if (
        training.grad_dtype is GradDtype.FP32
        and training.precision.bytes < training.grad_dtype.bytes
    ):
        yield "--grad-dtype bf16", replace(training, grad_dtype=GradDtype.BF16)
    if training.optimizer in (Optimizer.ADAMW, Optimizer.ADAM):
        eight = Optimizer.ADAMW_8BIT
        yield "--optimizer adamw-8bit", replace(training, optimizer=eight)
    half = training.seq_len // 2
    if half:
        yield f"--seq-len {half}", replace(training, seq_len=half)


def fits_with(context: CostContext, space: SearchSpace, min_fit: float) -> bool:
    """Whether a layout of ``space`` is sure to fit: one with an even cut and the leanest
    recomputation does.
    """
    bounds = CandidateBounds(context, min_fit=min_fit)
    return any(
        bounds.crowding(candidate) <= 1 and _need(context, candidate, min_fit) <= 1
        for candidate in _candidates(space)
    )


def _fits_changed(
    context: CostContext,
    space: SearchSpace,
    min_fit: float,
    *,
    training: TrainingSpec | None = None,
    restrictions: Restrictions | None = None,
    num_nodes: int | None = None,
) -> bool:
    """``fits_with`` after a change of the problem."""
    cluster = context.cluster
    if num_nodes is not None:
        *kept, last = cluster.groups
        more = last.count + num_nodes - cluster.num_nodes
        cluster = replace(cluster, groups=(*kept, NodeGroup(last.node, more)))
    training = training or context.training
    changed = CostContext(
        context.model, cluster, training, context.calibration, profile=context.profile
    )
    wider = SearchSpace(
        context.model,
        cluster,
        training,
        launcher=space.rules.name,
        restrictions=restrictions or space.restrictions,
    )
    return fits_with(changed, wider, min_fit)


def _enough_nodes(
    context: CostContext, space: SearchSpace, min_fit: float, need: float
) -> int | None:
    """The least number of nodes that fits, to the next power of two times today's."""
    if need == float("inf"):
        return None
    nodes, most = space.cluster.num_nodes, space.cluster.num_nodes * MOST_NODES_FACTOR
    enough = nodes
    while enough < most:
        enough *= 2
        if _fits_changed(context, space, min_fit, num_nodes=enough):
            break
    else:
        return None
    low, high = enough // 2, enough
    while high - low > 1:
        middle = (low + high) // 2
        if _fits_changed(context, space, min_fit, num_nodes=middle):
            high = middle
        else:
            low = middle
    return high


def _no_legal_layout(space: SearchSpace) -> InfeasibleError:
    """Nothing was even considered: name the rules, and the restriction that empties the space."""
    guilty = [name for name, lifted in _each_lifted(space) if _has_candidates(lifted)]
    rules = ", ".join(f"{rule} ({count} times)" for rule, count in space.refused.most_common(3))
    broken = "; ".join(_broken_choices(space))
    return InfeasibleError(
        f"no legal layout of {space.model.name} on {space.cluster.name}",
        constraint=broken or rules or "the restrictions leave nothing",
        hints=tuple(f"lifting {name}" for name in guilty),
    )


def _broken_choices(space: SearchSpace) -> Iterator[str]:
    """What is wrong with degrees of which the user allows none that is legal."""
    free = _with(space, Restrictions(tp_across_nodes=True), space.training)
    legal: dict[str, Sequence[int]] = {"tp": free.tp_degrees(), "pp": free.pp_degrees(1)}
    legal["cp"] = free.cp_degrees()
    own = free.degree_rules
    problems = {"tp": own.tp_problem, "pp": own.pp_problem, "cp": own.cp_problem}
    for name, wanted in space.restrictions.fixed.items():
        if name in problems and not wanted & {str(degree) for degree in legal[name]}:
            degree = min(int(value) for value in wanted)
            problem = problems[name](degree) or f"{name} {degree} is more than the cluster has"
            yield f"{problem}; legal are {listed(legal[name])}"
    yield from _broken_context(space)


def _broken_context(space: SearchSpace) -> Iterator[str]:
    """What is wrong with ways around for keys and values of which none is legal."""
    wanted = space.restrictions.fixed.get("cp_comm")
    legal = [w for w in space.rules.cp_comm if space.degree_rules.cp_comm_problem(w) is None]
    if wanted is None or not space.rules.context or wanted & {*legal}:
        return
    way, name = ContextComm(min(wanted)), space.rules.name
    having = (each for each in LAUNCHERS.values() if each.context and way in each.cp_comm)
    others = [each.name for each in having if each.name != "any"]
    problem = space.degree_rules.cp_comm_problem(way)
    if problem is None:
        problem = f"{name} has no cp_comm {way}, which {listed(others)} have"
    yield f"{problem}; legal is {listed(legal)}"


def _each_lifted(space: SearchSpace) -> Iterator[tuple[str, SearchSpace]]:
    own = space.restrictions

    lifted = [
        *((f"--fix {n}", replace(own, fixed=_without(own.fixed, n))) for n in own.fixed),
        *((f"--max {n}", replace(own, at_most=_without(own.at_most, n))) for n in own.at_most),
        *(
            (f"--exclude {n}", replace(own, excluded=_without(own.excluded, n)))
            for n in own.excluded
        ),
    ]
    for flag, restrictions in lifted:
        yield flag, _with(space, restrictions, space.training)
    if space.training.micro_batch is not None:
        free = replace(space.training, micro_batch=None)
        yield "--micro-batch", _with(space, own, free)


def _without(values: Mapping[str, Kept], name: str) -> dict[str, Kept]:
    return {key: value for key, value in values.items() if key != name}


def _with(space: SearchSpace, restrictions: Restrictions, training: TrainingSpec) -> SearchSpace:
    return SearchSpace(
        space.model,
        space.cluster,
        training,
        launcher=space.rules.name,
        restrictions=restrictions,
    )


def _has_candidates(space: SearchSpace) -> bool:
    return any(True for _ in _candidates(space))
