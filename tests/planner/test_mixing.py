"""Layers of one model under different tp, dp, ZeRO and recomputation."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from costmodel.estimate import estimate
from planner import load_inputs, load_plan, nested, plan_of, plan_text
from planner.build import CandidateProblem
from planner.choices import Restrictions
from planner.mixing import MixedProblem, best_mix
from planner.native import layout_problems
from planner.search import search
from planner.space import SearchSpace

GIB = 2**30


def inputs(model="gpt2-xl", cluster="8xa10g", batch=64, seq_len=1024):
    return load_inputs(model, cluster, overrides={"global_batch": batch, "seq_len": seq_len})


def space_of(own, launcher="any", **fixed):
    restrictions = Restrictions(fixed={k: frozenset({str(v)}) for k, v in fixed.items()})
    return SearchSpace(
        own.model, own.cluster, own.training, launcher=launcher, restrictions=restrictions
    )


@pytest.fixture(scope="module")
def searched():
    own = inputs()
    space = space_of(own, pp=1)
    found = search(own.context, space)
    return own, space, found.finalists, best_mix(own.context, space, found.finalists, min_fit=0.9)


def test_a_mix_of_zero_stages_beats_equal_ones_where_memory_is_short(searched):
    own, _, finalists, mixed = searched
    assert mixed.estimate.step_s < 0.985 * finalists[0].estimate.step_s
    assert len({s.zero for s in mixed.layout.strategies}) > 1
    assert mixed.estimate.fits
    assert estimate(own.context, mixed.layout) == mixed.estimate


def test_a_slow_machine_gives_the_same_mix(searched, monkeypatch):
    own, space, finalists, mixed = searched
    moments = count(step=1000)
    monkeypatch.setattr(nested.time, "process_time", lambda: float(next(moments)))
    assert best_mix(own.context, space, finalists, min_fit=0.9) == mixed


def test_a_mixed_plan_is_read_back_from_its_file(searched, tmp_path):
    own, _, _, mixed = searched
    plan = plan_of(own, mixed.layout)
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(plan))
    assert load_plan(path).layout == mixed.layout


def test_a_launcher_that_gives_all_layers_the_same_degrees_gets_no_mix(searched):
    own, _, finalists, _ = searched
    assert best_mix(own.context, space_of(own, "megatron"), finalists, min_fit=0.9) is None


def test_a_mix_for_native_is_native(searched):
    """A tied model's embedding and head lie alike, and it costs next to nothing."""
    own, _, finalists, mixed = searched
    native = best_mix(own.context, space_of(own, "native", pp=1), finalists, min_fit=0.9)
    assert layout_problems(own.model, own.training, native.layout) == []
    first, last = native.layout.ends
    assert first == last
    assert len({s.zero for s in native.layout.strategies}) > 1
    assert mixed.estimate.step_s <= native.estimate.step_s < 1.001 * mixed.estimate.step_s


@pytest.mark.parametrize("launcher", ["any", "native"])
def test_layers_of_different_tp_pay_for_their_resharding_in_the_estimate(launcher):
    own = inputs("llama2-7b", "8xa100-40g", 64, 4096)
    space = space_of(own, launcher, pp=1, cp=1)
    finalists = search(own.context, space).finalists
    mixed = best_mix(own.context, space, finalists[1:], min_fit=0.9)
    assert len({s.tp for s in mixed.layout.strategies}) > 1
    assert mixed.estimate.split.tp_s > 0.0
    assert mixed.estimate.step_s < finalists[1].estimate.step_s
    assert layout_problems(own.model, own.training, mixed.layout) == []


def persist_or_gather(own, micro_batch, spare=0):
    """The problem of a ZeRO-3 job whose layers may keep their weights (stage 2), and its answer."""
    space = space_of(own, pp=1, tp=1, cp=1, zero=3, micro_batch=micro_batch)
    degrees = next(iter(space.degrees()))
    candidate = next(c for c in space.candidates(degrees) if c.zero == 3)
    candidate = candidate._replace(recomputes=candidate.recomputes[:1])
    base = CandidateProblem(
        context=own.context, candidate=candidate, min_fit=0.9, spare_bytes=spare
    )
    gather = candidate.strategy(candidate.recomputes[0])
    problem = MixedProblem(base, (gather, replace(gather, zero=2))).problem
    return problem, nested.solve(problem).solution


def kept_bytes(problem, solution):
    own, held = problem.memory[0], problem.chain
    return sum(own[c][1] - own[c][0] for c, j in zip(held, solution.strategies, strict=True) if j)


def test_more_memory_never_keeps_fewer_weights():
    """DeepCompile's rule for what is gathered once and kept."""
    own = inputs("llama2-7b", "8xa100-40g", 32, 2048)
    kept = [kept_bytes(*persist_or_gather(own, 1, spare)) for spare in range(0, 6 * GIB, GIB)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0
    assert len(set(kept)) > 3


def test_weights_are_kept_in_the_order_of_a_fractional_knapsack():
    """Those that save the most time for each byte first, but for what no longer fits whole."""
    own = inputs("llama2-7b", "8xa100-40g", 32, 2048)
    problem, solution = persist_or_gather(own, 1, 2 * GIB)
    times, bytes_of = problem.time_ns, problem.memory[0]
    more = {c: bytes_of[c][1] - bytes_of[c][0] for c in set(problem.chain)}
    worth = {c: (times[c][0] - times[c][1]) / size for c, size in more.items() if size > 0}
    chosen = list(zip(problem.chain, solution.strategies, strict=True))
    kept = [worth[c] for c, j in chosen if j and c in worth]
    left = [worth[c] for c, j in chosen if not j and c in worth]
    free = problem.limit[0] - sum(bytes_of[c][j] for c, j in chosen)
    assert kept
    assert left
    assert min(kept) >= max(left) or free < max(more.values())


def test_keeping_weights_gains_more_the_more_micro_batches_share_them():
    gains = []
    for batch in (8, 32, 128):  # 1, 4 and 16 micro-batches
        own = inputs("llama2-7b", "8xa100-40g", batch, 2048)
        problem, solution = persist_or_gather(own, 1)
        everything_gathered = problem.cost((0,), (0,) * len(problem.chain))
        gains.append(1 - solution.objective_ns / everything_gathered.objective_ns)
    assert 0.0 <= gains[0] < gains[1] < gains[2]
