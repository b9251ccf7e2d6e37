"""The bounds of cuts against every layout of small candidates, and of every cut against those that
the solvers keep.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from oracle import every_cut_and_mix, every_layout
from test_search import context_of, space_of, tiny_model, with_nodes

from costmodel.estimate import estimate
from planner.bounds import CandidateBounds
from planner.build import CandidateProblem
from planner.cuts import Stages, best_cuts
from planner.layouts import build_layout
from planner.leastcut import INFINITE, least_cut_ns
from planner.search import SOLVERS, search
from planner.searchrun import SearchRun
from profiles.sublayers import ExpertFeedForward

MIN_FIT = 0.9
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "2bp", "interleaved-1f1b", "async-1f1b", "dualpipe")


def random_candidates(rng, schedule, *, pp="2,3,4"):
    """A context, a space of a tiny model with few micro-batches, and two candidates."""
    vocab = rng.choice([32_000, 128_256, 256_000, 512_000])
    model = tiny_model(rng.choice([4, 5, 6, 7]), vocab, tied=rng.random() < 0.3)
    cluster, memory = rng.choice([("1x4xa100-40g", (14, 20, 34, 80)), ("2x2xa100-40g", (34, 80))])
    context = context_of(
        model,
        with_nodes(cluster, memory_gib=rng.choice(memory)),
        global_batch=rng.choice([4, 8, 16]),
        seq_len=2048,
        micro_batch=1,
    )
    fixed = {"cp": 1, "tp": 1, "zero": "0,1", "schedule": schedule, "pp": pp}
    fixed["recompute"] = rng.choice(["none", "none,full"])
    space = space_of(context, **fixed)
    found = [each for d in space.degrees() for each in space.candidates(d)]
    return context, space, rng.sample(found, min(2, len(found)))


def costed_cuts(context, problem):
    """Every cut and mix that keeps the closed form of memory."""
    for cut in every_cut_and_mix(context, problem):
        costed = problem.problem.cost(cut.starts, cut.strategies)
        if costed is not None:
            yield costed


def fitting_cuts(context, space, problem):
    """(bound of the cut, simulated step) of every layout that fits."""
    for cut in costed_cuts(context, problem):
        own = estimate(context, build_layout(problem, cut, space.rules.mixing), min_fit=MIN_FIT)
        if own.fits:
            yield problem.bound_s(cut), own.step_s


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_no_layout_is_faster_than_the_bound_of_its_cut(schedule, seed):
    """Stages of their own included, whose traffic hides behind the passes of all their layers."""
    rng = random.Random(f"{schedule} {seed}")
    context, space, candidates = random_candidates(rng, schedule, pp="1,2,3,4")
    for candidate in candidates:
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        for bound_s, step_s in fitting_cuts(context, space, problem):
            assert bound_s <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_no_candidate_is_dropped_that_has_a_layout_faster_than_what_is_wanted(schedule, seed):
    rng = random.Random(f"wanted {schedule} {seed}")
    context, space, candidates = random_candidates(rng, schedule)
    bounds = CandidateBounds(context, min_fit=MIN_FIT)
    for candidate in candidates:
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        steps = [step_s for _, step_s in fitting_cuts(context, space, problem)]
        if steps:
            wanted_s = min(steps) * (1 + 1e-6)
            own = bounds.of_candidate(candidate, wanted_s)
            lean = bounds.of_memory(candidate.degrees, [candidate], wanted_s)
            assert own is not None
            assert own.bound_s <= wanted_s
            assert lean is not None
            assert lean.bound_s <= wanted_s


@pytest.mark.parametrize("vocab", [128_256, 512_000])
@pytest.mark.parametrize("batch", [4, 16])
def test_traffic_of_a_layer_without_passes_hides_behind_its_neighbours(vocab, batch):
    """A tied embedding: its gradients are large, its passes short."""
    model = tiny_model(4, vocab, tied=True)
    cluster = with_nodes("2x2xa100-40g", memory_gib=120)
    context = context_of(model, cluster, global_batch=batch, seq_len=2048, micro_batch=1)
    space = space_of(context, cp=1, tp=1, pp=1, zero="0,1,2", recompute="none")
    bounds = CandidateBounds(context, min_fit=MIN_FIT)
    candidates = [each for d in space.degrees() for each in space.candidates(d)]
    assert len(candidates) == 5
    for candidate in candidates:
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        relaxed = bounds.of_candidate(candidate, float("inf"))
        ((bound_s, step_s),) = fitting_cuts(context, space, problem)
        assert 0.9 * step_s <= max(relaxed.bound_s, bound_s) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_open_has_the_bound_of_every_cut(schedule, seed):
    """A cut that the solvers drop, whose busiest stage stands further ahead, may have a bound
    below those of all that they keep.
    """
    rng = random.Random(f"{schedule} {seed}")
    context, space, candidates = random_candidates(rng, schedule)
    for candidate in candidates:
        run = SearchRun(context, space, MIN_FIT, wanted=4, solver=SOLVERS["closed-form"])
        relaxed = run.bounds.of_candidate(candidate, float("inf"))
        if relaxed is None:
            continue
        run.solve(candidate, relaxed.bound_s)
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        cuts = list(fitting_cuts(context, space, problem))
        if cuts:
            ((open_s, _),) = run.open
            assert open_s <= max(relaxed.bound_s, min(bound for bound, _ in cuts)) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "dualpipe"])
@pytest.mark.parametrize("seed", range(8))
def test_the_least_bound_of_any_cut_is_that_of_their_enumeration(schedule, seed):
    rng = random.Random(f"{schedule} {seed}")
    context, _, candidates = random_candidates(rng, schedule)
    for candidate in candidates:
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        stages = Stages(problem.problem, SOLVERS["closed-form"](problem.problem), INFINITE)
        found = problem.step_s(least_cut_ns(problem, stages, INFINITE))
        bounds = [problem.bound_s(cut) for cut in costed_cuts(context, problem)]
        least = min(bounds, default=INFINITE)
        if candidate.degrees.chunks == 1:
            assert found == pytest.approx(least, rel=1e-9)
        else:
            assert found <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_cuts_whose_stages_all_hold_a_block_are_kept_where_others_are_better(seed):
    context, _, candidates = random_candidates(random.Random(seed), "1f1b")
    for candidate in candidates:
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        array, is_block = problem.problem, problem.is_block
        found = best_cuts(array, SOLVERS["closed-form"](array), holding=is_block)
        assert all(min(cut.stage_blocks(is_block)) > 0 for cut in found)
        objectives = [
            cut.objective_ns
            for cut in costed_cuts(context, problem)
            if min(cut.stage_blocks(is_block)) > 0
        ]
        assert [cut.objective_ns for cut in found[:1]] == sorted(objectives)[:1]


def test_two_directions_may_hold_unequal_halves_and_nothing_is_proven_from_equal_ones():
    """A device holds a stage and the opposite one, here a dense and a sparse block; twice the
    sparse one would not fit.
    """
    model = tiny_model(1, 32_000, tied=True)
    first, dense, last = model.runs
    experts = ExpertFeedForward(expert_hidden=8192, num_experts=4, top_k=1)
    sparse = replace(dense, layer=replace(dense.layer, feed_forward=experts))
    model = replace(model, runs=(first, dense, sparse, last))
    cluster = with_nodes("1x4xa100-40g", memory_gib=16)
    context = context_of(model, cluster, global_batch=16, seq_len=4096, micro_batch=1)
    fixed = {"schedule": "chimera", "cp": 1, "zero": "2,3"}
    space = space_of(context, **fixed)
    layouts = [layout for _, layout in every_layout(context, space, MIN_FIT)]
    costed = [estimate(context, layout, min_fit=MIN_FIT) for layout in layouts]
    best_s = min(own.step_s for own in costed if own.fits)
    result = search(context, space_of(context, **fixed))
    assert result.bound_s <= best_s * (1 + 1e-9)
