"""The fit finds the efficiencies that made the runs, keeps the prior where nothing speaks, and
is not led astray by odd runs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel.fitting import fit, middle
from costmodel.localmodel import log_measured
from costmodel.memoryfit import Evidence, fit_memory
from costmodel.parameters import PARAMETERS, usual
from costmodel.replay import replay
from profiles.calibrations import datasheet
from profiles.runs import MeasuredRun

BASE = MeasuredRun(
    where="runs.csv:2",
    id="",
    stack="Megatron-LM",
    gpu="A100",
    gpu_mem_gb=80,
    gpus_per_node=8,
    n_gpus=16,
    layers=24,
    hidden=4096,
    ffn_hidden=16384,
    gated_mlp=False,
    heads=32,
    vocab=51200,
    seq_len=2048,
    global_batch=128,
    micro_batch=2,
    tp=1,
    pp=1,
    precision="bf16",
    attn_kernel="TE/flash",
    outcome="ok",
    step_time_s=1.0,
)
SHAPES = [
    {"hidden": hidden, "ffn_hidden": 4 * hidden, "tp": tp, "pp": pp, "seq_len": seq}
    for hidden in (2048, 4096, 8192)
    for tp, pp in ((1, 1), (2, 1), (8, 1), (2, 4), (4, 2))
    for seq in (2048, 8192)
]


def made_by(calibration, noise=(0.0,)):
    """Runs whose steps a calibration says, times a pattern of noise."""
    replays = [replay(replace(BASE, id=str(i), **shape)) for i, shape in enumerate(SHAPES)]
    return [
        replace(
            each,
            run=replace(
                each.run, step_time_s=each.step_s(calibration) * (1 + noise[i % len(noise)])
            ),
        )
        for i, each in enumerate(replays)
    ]


def other(**values):
    own = datasheet()
    return replace(own, efficiencies=replace(own.efficiencies, **values))


@pytest.fixture(scope="module")
def truth():
    return other(gemm=0.75, stream=0.5, gpu_link=0.45)


def test_the_efficiencies_that_made_the_runs_are_found(truth):
    found = fit(made_by(truth), datasheet())
    assert max(abs(residual) for residual in found.residuals) < 0.02
    for name in ("gemm", "gpu_link"):
        expected = getattr(truth.efficiencies, name)
        assert getattr(found.calibration.efficiencies, name) == pytest.approx(expected, rel=0.06)


def test_a_tenth_of_runs_that_take_twice_as_long_do_not_steer(truth):
    noise = (1.0, *[0.0] * 9)
    found = fit(made_by(truth, noise), datasheet())
    clean = [abs(r) for i, r in enumerate(found.residuals) if i % 10]
    assert sorted(clean)[len(clean) // 2] < 0.02


def test_three_runs_are_enough_and_stay_near_the_prior():
    runs = made_by(other(gemm=0.7))[:3]
    found = fit(runs, datasheet())
    assert max(abs(residual) for residual in found.residuals) < 0.05
    assert "straggler" in found.undetermined


def test_what_the_runs_do_not_exercise_is_not_fitted_at_all(truth):
    names = {parameter.name for parameter in fit(made_by(truth)[:2], datasheet()).model.parameters}
    assert "moe_imbalance" not in names
    assert "quantised" not in names
    assert "attention.fused" in names
    assert "attention.flash2" not in names


def test_the_usual_prior_is_the_datasheets_but_for_the_host():
    found, given = usual(datasheet()).efficiencies, datasheet().efficiencies
    assert found.kernel_launch_s > given.kernel_launch_s
    assert replace(found, kernel_launch_s=given.kernel_launch_s) == given


def test_no_efficiency_beats_the_datasheet():
    found = fit(made_by(other(gemm=1.0, stream=1.0), noise=(-0.4,)), datasheet())
    for parameter in PARAMETERS:
        value = parameter.value(found.calibration.efficiencies)
        assert value <= max(parameter.high, parameter.value(datasheet().efficiencies)) + 1e-9


def test_the_middle_of_groups_hardly_depends_on_how_many_runs_each_has():
    fast, slow = made_by(other(gemm=0.95)), made_by(other(gemm=0.7))
    found = []
    for runs in ([*fast, *slow[::5]], [*fast[::5], *slow]):
        own = fit(runs, datasheet())
        groups = ["fast" if run in fast else "slow" for run in runs]
        model, centre = own.model, np.zeros(len(own.model.parameters))
        middle_of = middle(model, log_measured(runs), groups, centre, 10.0)
        found.append((own.calibration.efficiencies.gemm, middle_of.efficiencies.gemm))
    (pooled, between), (other_pooled, other_between) = found
    assert pooled - other_pooled > 0.2
    assert between == pytest.approx(other_between, abs=0.1)
    assert other_between > 0.75
    assert between < 0.92


def evidence(allocated_gb, *, worked):
    return Evidence(allocated_gb * 1e9, allocated_gb * 1e9, 2e9, 80e9, worked, None, 1.0, 1.0)


def test_labels_of_out_of_memory_find_the_reserve():
    """Runs fail from 62 GB allocated on: 80 = 62 x (1 + reserve) + 2."""
    labels = [evidence(size, worked=size < 62) for size in range(40, 90)]
    reserve, sigma = fit_memory(labels)
    assert reserve == pytest.approx(0.25, abs=0.04)
    assert sigma <= 0.06


def test_labels_that_overlap_widen_the_spread():
    labels = [evidence(size, worked=(size * 7919) % 29 > size - 55) for size in range(40, 90)]
    assert (
        fit_memory(labels)[1] > fit_memory([evidence(s, worked=s < 70) for s in range(40, 90)])[1]
    )
