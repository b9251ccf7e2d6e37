"""Bounds from the longest paths of schedules against every layout of small candidates."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from oracle import every_cut_and_mix, fastest_of_all
from test_search import context_of, space_of, tiny_model, with_nodes

from costmodel.estimate import estimate
from costmodel.schedules import SCHEDULES
from planner.bounds import CandidateBounds
from planner.build import CandidateProblem
from planner.layouts import build_layout
from planner.leastwork import least_work
from planner.pathbound import PathBounds
from planner.search import search
from profiles.layers import Block

MIN_FIT = 0.9
DRAINING = [name for name, schedule in SCHEDULES.items() if schedule.drains]


def with_wide_blocks(model, counts):
    """The model with wide blocks among its others: ``counts`` of plain and wide ones in turn."""
    run = model.runs[1]
    assert isinstance(run.layer, Block)
    wide = replace(run.layer, feed_forward=replace(run.layer.feed_forward, ffn_hidden=28_672))
    kinds = [replace(run, count=n, layer=(run.layer, wide)[i % 2]) for i, n in enumerate(counts)]
    return replace(model, runs=(model.runs[0], *kinds, model.runs[2]))


def random_candidates(schedule, rng, *, unequal=0.3):
    """Some candidates of a tiny model with few micro-batches, ``unequal``: the part of the models
    that have a second kind of block.
    """
    blocks = rng.choice([4, 5, 6])
    model = tiny_model(blocks, rng.choice([32_000, 256_000]), tied=rng.random() < 0.3)
    if rng.random() < unequal:
        places = sorted(rng.sample(range(1, blocks), rng.randint(1, 3)))
        counts = [b - a for a, b in pairwise([0, *places, blocks])]
        model = with_wide_blocks(model, counts)
    cluster = with_nodes("1x4xa100-40g", memory_gib=rng.choice([14, 20, 34, 80]))
    context = context_of(
        model, cluster, global_batch=rng.choice([4, 8, 16]), seq_len=2048, micro_batch=1
    )
    fixed = {"cp": 1, "tp": 1, "zero": "0,1", "schedule": schedule, "pp": "2,3,4"}
    fixed["recompute"] = rng.choice(["none", "none,full"])
    space = space_of(context, **fixed)
    found = [each for d in space.degrees() for each in space.candidates(d)]
    return context, space, rng.sample(found, min(2, len(found)))


def fitting_steps(context, space, problem):
    """Seconds of a step of every layout of a candidate that fits."""
    for cut in every_cut_and_mix(context, problem):
        own = estimate(context, build_layout(problem, cut, space.rules.mixing), min_fit=MIN_FIT)
        if own.fits:
            yield own.step_s


@pytest.mark.parametrize("schedule", DRAINING)
@pytest.mark.parametrize("seed", range(4))
def test_no_layout_of_a_candidate_is_faster_than_the_bound_of_its_paths(schedule, seed):
    rng = random.Random(f"{schedule} {seed}")
    context, space, candidates = random_candidates(schedule, rng)
    bounds, paths = CandidateBounds(context, min_fit=MIN_FIT), PathBounds()
    for candidate in candidates:
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        steps = list(fitting_steps(context, space, problem))
        if steps:
            fastest_s = min(steps) * (1 + 1e-9)
            assert paths.of(problem, bounds, float("inf")) <= fastest_s
            assert PathBounds().of(problem, bounds, fastest_s) <= fastest_s
            relaxed = bounds.of_candidate(candidate, float("inf"))
            assert relaxed is not None
            assert relaxed.bound_s <= fastest_s


SEVERAL_CHUNKS = [name for name in DRAINING if SCHEDULES[name].chunks != (1,)]


@pytest.mark.parametrize("schedule", SEVERAL_CHUNKS)
@pytest.mark.parametrize("seed", range(8))
def test_no_layout_of_unequal_blocks_in_several_chunks_is_faster_than_their_work(schedule, seed):
    rng = random.Random(f"unequal {schedule} {seed}")
    context, space, candidates = random_candidates(schedule, rng, unequal=1)
    for candidate in candidates:
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        assert problem.moves_blocks
        steps = list(fitting_steps(context, space, problem))
        if steps:
            wanted_s = min(steps) * (1 + 1e-9)
            sums, greatest = least_work(problem, wanted_s, [])
            alone_ns = problem.microbatches / problem.schedule.copies * greatest
            assert problem.step_s(max(problem.least_ns(sums, 0.0), alone_ns)) <= wanted_s


def test_the_bound_of_an_even_pipeline_is_its_step():
    model = tiny_model(8, 1024, tied=False)  # two blocks on each of four stages
    cluster = with_nodes("1x4xa100-40g", memory_gib=80)
    context = context_of(model, cluster, global_batch=16, seq_len=2048, micro_batch=1)
    for schedule in ("1f1b", "interleaved-1f1b", "zb-h1", "v-half"):
        space = space_of(context, cp=1, tp=1, pp=4, zero=0, schedule=schedule, recompute="none")
        candidate = next(each for d in space.degrees() for each in space.candidates(d))
        problem = CandidateProblem(context=context, candidate=candidate, min_fit=MIN_FIT)
        bounds = CandidateBounds(context, min_fit=MIN_FIT)
        least_s = PathBounds().of(problem, bounds, float("inf"))
        steps = [
            estimate(context, build_layout(problem, cut, space.rules.mixing)).step_s
            for cut in every_cut_and_mix(context, problem)
        ]
        assert least_s == pytest.approx(min(steps), rel=0.02)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zb", "v-min"])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 2, 1), (1, 3)])
def test_where_blocks_move_and_layouts_are_few_the_plan_is_the_best_of_all(schedule, counts):
    model = with_wide_blocks(tiny_model(sum(counts), 32_000, tied=True), counts)
    cluster = with_nodes("1x2xa100-40g", memory_gib=80)
    context = context_of(model, cluster, global_batch=4, seq_len=2048, micro_batch=1)
    space = space_of(context, cp=1, tp=1, pp=2, schedule=schedule, recompute="none")
    fastest, count = fastest_of_all(context, space, MIN_FIT)
    result = search(context, space)
    assert count > 1
    assert result.best.estimate.step_s == pytest.approx(fastest, rel=1e-12)
    assert result.bound_s <= fastest * (1 + 1e-9)
    assert result.proven
