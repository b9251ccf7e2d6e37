from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.galvatron.cases import read_case, read_profile, read_result
from benchmarks.galvatron.figures import figures_of
from benchmarks.galvatron.plan import cost, plan_of
from benchmarks.galvatron.relaxation import floor
from benchmarks.galvatron.sharedrules import iteration
from benchmarks.galvatron.solve import solve
from benchmarks.galvatron.space import Family
from benchmarks.galvatron.spaces import families
from benchmarks.galvatron.strategy import Strategy, Vocab

PLAIN = Strategy(1, 1, 1, 1, 1, zero3=False)
KINDS = 6  # of problems: what their number leaves when divided by this


def made_up(number: int) -> tuple[Family, float]:
    """A small problem: stages, kinds, strategies and splits as chance has it, with reductions
    from negligible to much longer than the layers; some without any memory, some with ties.
    """
    chance = random.Random(number)
    generator = np.random.default_rng(number)
    stages, kinds = chance.choice([1, 1, 2, 2, 3, 4]), chance.choice([1, 1, 2])
    strategies, vocabs = chance.choice([2, 3, 4]), chance.choice([1, 2])
    counts = [[chance.choice([0, 1, 2, 3]) for _ in range(kinds)] for _ in range(stages)]
    for own in counts:
        own[0] = own[0] or 1
    steady = generator.uniform(1, 10, (kinds, strategies))
    sync = generator.uniform(0, 5, (kinds, strategies)) * chance.choice([0.1, 1, 5, 30])
    if number % KINDS == 0:
        steady, sync = np.round(steady), np.round(sync)
    memory = generator.integers(0, 30, (stages, kinds, strategies))
    if number % KINDS == 1:
        memory = np.zeros_like(memory)
    family = Family(
        pp=stages,
        chunks=chance.choice([1, 2, 3, 4, 8]),
        ulysses_only=False,
        least=1,
        most=1,
        cut=tuple(sum(own) for own in counts),
        counts=tuple(tuple(own) for own in counts),
        strategies=tuple(PLAIN._replace(dp=number) for number in range(1, strategies + 1)),
        vocabs=tuple(Vocab(PLAIN._replace(dp=n), ulysses=False) for n in range(1, vocabs + 1)),
        steady_ms=steady,
        sync_ms=sync,
        layer_mib=memory,
        ends_ms=generator.uniform(0, 10, (vocabs, stages)),
        fixed_mib=generator.integers(0, 20, (vocabs, stages)),
    )
    most = max(family.cut)
    return family, chance.choice([most * 30 * chance.random() + 10, most * 12 + 10, 1000])


def by_brute_force(family: Family, budget: float) -> float:
    """The least time of every way to fill every stage."""
    best = np.inf
    for ends, fixed in zip(family.ends_ms, family.fixed_mib, strict=True):
        stages = []
        for stage, counts in enumerate(family.counts):
            ways = itertools.product(
                *(
                    itertools.combinations_with_replacement(range(len(family.strategies)), count)
                    for count in counts
                )
            )
            found = set()
            for way in ways:
                own = [(kind, each) for kind, taken in enumerate(way) for each in taken]
                if sum(family.layer_mib[stage][at] for at in own) + fixed[stage] <= budget:
                    times = sum(family.steady_ms[at] for at in own) + ends[stage]
                    after = sum(family.sync_ms[at] for at in own) - ends[stage]
                    found.add((times, after))
            stages.append(np.array(sorted(found)).reshape(-1, 2))
        rows = np.indices([len(own) for own in stages]).reshape(len(stages), -1)
        if rows.size:
            steady = np.stack([own[at, 0] for own, at in zip(stages, rows, strict=True)], axis=1)
            excess = np.stack([own[at, 1] for own, at in zip(stages, rows, strict=True)], axis=1)
            best = min(best, float(iteration(steady, excess, family.chunks).min()))
    return best


@pytest.mark.parametrize("part", range(4))
def test_the_answer_is_that_of_brute_force(part):
    for number in range(part * 75, part * 75 + 75):
        family, budget = made_up(number)
        expected = by_brute_force(family, budget)
        answer = solve([family], budget)
        if answer.chosen is None:
            assert expected == np.inf, number
            assert answer.short_mib > 0
        else:
            assert answer.chosen.iteration_ms == pytest.approx(expected, rel=1e-9), number
            assert answer.proven, number


def test_the_counts_are_those_of_the_answer_and_fit():
    for number in range(80):
        family, budget = made_up(number)
        chosen = solve([family], budget).chosen
        if chosen is None:
            continue
        ends = family.ends_ms[chosen.vocab]
        steady = np.einsum("skj,kj->s", chosen.counts, family.steady_ms) + ends
        excess = np.einsum("skj,kj->s", chosen.counts, family.sync_ms) - ends
        assert iteration(steady, excess, family.chunks) == pytest.approx(chosen.iteration_ms)
        held = np.einsum("skj,skj->s", chosen.counts, family.layer_mib)
        assert (held + family.fixed_mib[chosen.vocab] <= budget).all()
        assert chosen.counts.sum(2).tolist() == [list(own) for own in family.counts]
        assert len(chosen.strategies()) == sum(family.cut)


def test_more_memory_is_never_slower():
    for number in range(60):
        family, _ = made_up(number)
        times = []
        for budget in range(0, 200, 20):
            chosen = solve([family], float(budget)).chosen
            times.append(np.inf if chosen is None else chosen.iteration_ms)
        assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(times)), number


def test_the_floor_is_never_above_the_objective():
    generator = np.random.default_rng(7)
    for stages, chunks in itertools.product(range(1, 6), (1, 2, 3, 8)):
        steady = generator.uniform(0, 10, (200, stages))
        excess = generator.uniform(-10, 40, (200, stages))
        gap = iteration(steady, excess, chunks) - floor(steady, excess, chunks)
        assert gap.min() > -1e-9
        assert stages > 2 or chunks < stages or gap.max() < 1e-9


# --- the recorded cases ----------------------------------------------------------------------


def answer_to(peer, case):
    figures = figures_of(case, read_profile(case, peer / "profiles"))
    return solve(families(case, figures), case.budget_mib)


def test_no_case_is_slower_than_the_peers_and_several_are_faster(peer):
    faster = 0
    for path in sorted((peer / "inputs").glob("*.json")):
        case, result = read_case(path), read_result(peer / "results" / path.name)
        answer = answer_to(peer, case)
        assert answer.proven, case.name
        if result["found"]:
            ours, theirs = answer.chosen.iteration_ms / 1e3, result["iteration_time_s"]
            assert ours <= theirs * (1 + 1e-8), case.name
            faster += ours < theirs * (1 - 1e-5)
        elif answer.chosen is None:
            assert answer.short_mib > 0
    assert faster >= 5


def test_sub_searches_without_a_plan_have_none_for_us_either(peer):
    checked = 0
    for path in sorted((peer / "inputs").glob("s*.json")):
        case, result = read_case(path), read_result(peer / "results" / path.name)
        figures = figures_of(case, read_profile(case, peer / "profiles"))
        ours = {
            (own.chunks, own.pp, own.ulysses_only, own.most): own for own in families(case, figures)
        }
        for task in result["tasks"]:
            alone = task["mode"] == "sp_only"
            own = ours.get((task["chunks"], task["pp"], alone, task["max_tp"]))
            if task["plan"] is None and task["mode"] != "tp_only" and own is not None:
                assert solve([own], case.budget_mib).chosen is None, (case.name, task)
                checked += 1
    assert checked > 50


@pytest.mark.parametrize("name", ["s02", "p08"])
def test_real_families_of_three_layers_are_solved_as_by_brute_force(peer, name):
    case = read_case(next((peer / "inputs").glob(f"{name}*")))
    short = replace(case, kinds=(replace(case.kinds[0], count=3),), memory_gib=5)
    figures = figures_of(short, read_profile(short, peer / "profiles"))
    checked = 0
    for family in families(short, figures):
        for budget in (2_500.0, 3_500.0, 5_000.0):
            expected = by_brute_force(family, budget)
            chosen = solve([family], budget).chosen
            found = np.inf if chosen is None else chosen.iteration_ms
            assert found == pytest.approx(expected, rel=1e-9)
            checked += np.isfinite(found)
    assert checked > 5


@pytest.mark.parametrize(
    ("name", "world", "batch", "options"),
    [
        ("s02", 12, 24, {}),
        ("s02", 12, 15, {}),
        ("s02", 8, 15, {}),
        ("s02", 6, 12, {"disable_cp": 0}),
        ("s02", 8, 16, {"sequence_parallel": False}),
        ("s02", 8, 16, {"default_dp_type": "ddp", "mixed_precision": "fp32"}),
        ("p08", 12, 48, {}),
        ("p08", 8, 16, {"sp_space": "sp"}),
        ("p08", 8, 16, {"disable_tp_consec": 0, "pipeline_type": "gpipe"}),
        ("p01", 12, 48, {}),
        ("p03", 12, 48, {}),
    ],
)
def test_what_the_peer_does_not_solve_is_solved_and_proven(peer, name, world, batch, options):
    case = read_case(next((peer / "inputs").glob(f"{name}*")))
    options = {**case.options, "settle_chunk": -1, **options}
    asked = replace(case, world=world, global_batch=batch, options=options, memory_gib=40)
    figures = figures_of(asked, read_profile(asked, peer / "profiles"))
    answer = solve(families(asked, figures), asked.budget_mib)
    assert answer.proven
    for each in answer.chosen.strategies():
        assert each.pp * each.tp * each.sp * each.cp * each.dp == world
    told = cost(asked, figures, plan_of(answer.chosen))
    assert told.iteration_s == pytest.approx(answer.chosen.iteration_ms / 1e3, rel=1e-9)
    assert max(told.memory_mib) <= asked.budget_mib + asked.reserved_mib


def test_depth_does_not_change_the_number_of_splits_that_are_solved(peer):
    case = read_case(next((peer / "inputs").glob("s02*")))
    solved = []
    for layers in (32, 64, 128):
        deep = replace(case, kinds=(replace(case.kinds[0], count=layers),), memory_gib=80)
        solved.append(answer_to(peer, deep).num_solved)
    assert max(solved) <= 12
