from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.galvatron.cases import read_case, read_profile, read_result
from benchmarks.galvatron.figures import Links, figures_of
from benchmarks.galvatron.plan import recorded_cost
from benchmarks.galvatron.sharedrules import ends_pass_ms, iteration, overlapped_ms
from benchmarks.galvatron.space import even_cut, kinds_of_stages
from benchmarks.galvatron.space24 import _balanced
from benchmarks.galvatron.strategy import Strategy, parse_strategy


def recorded(peer):
    for path in sorted((peer / "inputs").glob("*.json")):
        case = read_case(path)
        figures = figures_of(case, read_profile(case, peer / "profiles"))
        yield case, figures, read_result(peer / "results" / path.name)


def test_every_recorded_sub_search_is_reproduced_in_time_and_memory(peer):
    costed = 0
    for case, figures, result in recorded(peer):
        for task in result["tasks"]:
            if task["plan"] is None:
                continue
            _, told = recorded_cost(case, figures, task)
            expected = case.global_batch / task["throughput"]
            assert told.iteration_s == pytest.approx(expected, rel=1e-8), (case.name, task)
            used = task.get("memory_used_mb") or task["mem_cost"]
            assert list(told.memory_mib) == used, (case.name, task)
            costed += 1
    assert costed > 700


def test_the_final_answers_are_reproduced(peer):
    for case, figures, result in recorded(peer):
        if result["found"]:
            _, told = recorded_cost(case, figures, result["best_task"])
            assert told.iteration_s == pytest.approx(result["iteration_time_s"], rel=1e-8)


def test_fits_are_the_peers_own(peer):
    for _, figures, result in recorded(peer):
        for layer, expected in zip(
            figures.layers, result["derived"]["forward_time_ms"], strict=True
        ):
            slope, offset = expected if isinstance(expected, list) else (expected, 0.0)
            assert layer.forward.slope == pytest.approx(slope, rel=1e-8)
            assert layer.forward.offset == pytest.approx(offset, rel=1e-8)


# --- by hand ---------------------------------------------------------------------------------


def test_what_overlaps_is_slowed_and_the_rest_runs_alone():
    assert overlapped_ms(10, 0.1, 4.0, 1.5) == pytest.approx(1 * 1.5 + 3)
    assert overlapped_ms(100, 0.1, 4.0, 1.5) == pytest.approx(4 * 1.5 + 6)
    assert overlapped_ms(0, 0.1, 4.0, 1.5) == 4.0


def test_embedding_and_head_hide_behind_their_communication():
    assert ends_pass_ms(2.0, 0.0, 0.0, 1.25, 0.5) == pytest.approx(2 + 4 + 0.5)
    assert ends_pass_ms(2.0, 10.0, 1.0, 1.25, 0.0) == pytest.approx(10 + 1 + (5 - 1) / 1.25)


def test_one_stage_takes_its_time_for_each_micro_batch_and_waits_for_the_reduction_once():
    assert iteration(np.array([3.0]), np.array([-1.0]), 4) == 12
    assert iteration(np.array([3.0]), np.array([2.0]), 4) == 14


def test_the_last_stage_sets_the_rate_and_reductions_hide_behind_later_stages():
    steady, excess = np.array([1.0, 5.0, 2.0]), np.array([0.0, 0.0, 0.0])
    assert iteration(steady, excess, 4) == 8 + 3 * 2
    assert iteration(np.array([4.0, 1.0, 1.0]), excess, 4) == 4 * 4
    assert iteration(steady, np.array([0.5, 0.0, 7.0]), 4) == 14 + 1


def test_a_short_form_is_read_as_it_is_written():
    for text in ("1-2*-4f-c", "4-1-2", "1-4*-2-c-sp", "8-1-1"):
        assert str(parse_strategy(text)) == text
    assert parse_strategy("1-2*-4f-c-sp") == Strategy(1, 1, 2, 1, 4, zero3=True, recompute=True)
    assert not parse_strategy("1-2-4", engine="v2.4.0").neighbours
    assert parse_strategy("1-8-1", engine="v2.4.0").neighbours


def test_a_group_that_was_not_measured_takes_the_slower_of_its_neighbours():
    links = Links(
        world=12,
        all_reduce={(4, True): 0.2, (8, True): 0.5, (4, False): 0.7},
        p2p={2: 1.0, 4: 0.5},
        gather={},
        all_to_all={},
        slowdown=1.1,
    )
    assert links.ms_per_mb(6, neighbours=True) == 0.5
    assert links.ms_per_mb(12, neighbours=True) == 0.5
    assert links.ms_per_mb(6, neighbours=False) == 0.7
    assert links.ms_per_mb(1, neighbours=True) == 0.0
    assert links.p2p_ms_per_mb(3) == 1.0


def test_cuts_keep_every_layer():
    assert even_cut(30, 4) == (7, 7, 7, 9)
    assert sum(_balanced([1.0] * 10, [5.0, 0.0, 0.0, 1.0])) == 10
    assert min(_balanced([1.0, 30.0, 1.0, 1.0], [0.0, 50.0, 0.0])) >= 1


def test_stages_know_their_kinds():
    class Kind:
        def __init__(self, count):
            self.count = count

    assert kinds_of_stages((Kind(3), Kind(2)), (2, 3)) == ((2, 0), (1, 2))


def test_a_fifth_is_kept_back_above_20_gib(peer):
    case = read_case(next((peer / "inputs").glob("s02*")))
    assert case.reserved_mib == int(24 * 1024 * 0.2)
    assert case.budget_mib == 24 * 1024 - case.reserved_mib
    assert math.isclose(case.budget_mib, 19661)
