"""Ratios that the sweeps of Hagemann et al. 2023 (layouts of Llama 13B to 65B on A100) show, in our
estimates: pairs of their runs that differ in one field, and in dp to make up for it.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from published import RUNS

from costmodel.context import Memo
from costmodel.replay import replay
from profiles.calibrations import nearest_calibration
from profiles.runs import read_runs

FIELDS = ("model", "seq_len", "n_gpus", "micro_batch", "tp", "pp", "recompute", "attn_kernel",
          "sequence_parallel")  # fmt: skip


@pytest.fixture(scope="module")
def steps():
    """Estimated step by the fields that tell runs apart."""
    path = RUNS / "measured_runs.csv"
    if not path.is_file():
        pytest.skip("measured_runs.csv is not beside this project")
    runs = [run for run in read_runs(path).runs if run.file == "aleph_alpha" and run.step_time_s]
    memo, found = Memo(), {}
    for run in runs:
        each = replay(replace(run, notes=""))
        calibration, _ = nearest_calibration(each.device, run.release)
        found[tuple(getattr(run, name) for name in FIELDS)] = each.step_s(calibration, memo)
    return found


def ratio(steps, field, before, after, **others):
    """Median of estimate(after) / estimate(before) over matched pairs."""
    at = FIELDS.index(field)
    ratios = []
    for key, slow in steps.items():
        if key[at] != after or any(key[FIELDS.index(n)] != v for n, v in others.items()):
            continue
        partner = (*key[:at], before, *key[at + 1 :])
        if partner in steps:
            ratios.append(slow / steps[partner])
    return ratios


def test_full_recomputation_costs_a_third(steps):
    ratios = ratio(steps, "recompute", "none", "full")
    assert statistics.median(ratios) == pytest.approx(1.34, abs=0.05)


def test_twice_the_tensor_parallelism_costs_a_sixth(steps):
    ratios = [r for tp in (1, 2, 4) for r in ratio(steps, "tp", tp, 2 * tp)]
    assert statistics.median(ratios) == pytest.approx(1.18, abs=0.06)


def test_twice_the_stages_cost_a_little(steps):
    ratios = [r for pp in (1, 2, 4, 8) for r in ratio(steps, "pp", pp, 2 * pp)]
    assert statistics.median(ratios) == pytest.approx(1.04, abs=0.04)


def test_sequence_parallelism_saves_a_twelfth_at_tp_4(steps):
    ratios = ratio(steps, "sequence_parallel", False, True, tp=4)
    assert statistics.median(ratios) == pytest.approx(0.92, abs=0.05)
