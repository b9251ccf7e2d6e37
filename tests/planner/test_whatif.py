"""The same question with other inputs, each planned anew."""

from __future__ import annotations

import json

import pytest

from planner import load_inputs
from planner.whatif import Outcome, cases, run_cases
from profiles.errors import InputError


@pytest.fixture(scope="module")
def base():
    return load_inputs("gpt2", "8xh100-80g", overrides={"global_batch": 64, "seq_len": 1024})


def test_sweeps_combine_and_fixed_changes_stand_in_all(base):
    wanted = cases(
        ["training.precision=fp16"], ["cluster.num_nodes=1,2", "training.seq_len=512,1024"]
    )
    assert [case.changes for case in wanted] == [
        {"training.precision": "fp16", "cluster.num_nodes": n, "training.seq_len": s}
        for n in ("1", "2")
        for s in ("512", "1024")
    ]
    found = list(run_cases(base, wanted))
    assert all(each.found for each in found)
    tokens = [each.found["tokens_per_s"] for each in found]
    assert tokens[2] > tokens[0]
    assert tokens[3] > tokens[1]


def test_a_price_changes_what_it_costs_and_not_the_plan(base):
    found = list(run_cases(base, cases([], ["cluster.price_per_gpu_hour=2,4"])))
    assert found[1].found["price_per_step"] == pytest.approx(2 * found[0].found["price_per_step"])
    assert found[1].found["layout"] == found[0].found["layout"]


def test_weak_scaling_grows_the_batch_with_the_gpus(base):
    wanted = cases([], ["cluster.num_nodes=1,2,4"])
    weak = list(run_cases(base, wanted, weak_scaling=True))
    strong = list(run_cases(base, wanted))
    assert weak[2].found["step_s"] > strong[2].found["step_s"]
    per_gpu = [each.found["tokens_per_s_per_gpu"] for each in weak]
    assert per_gpu[2] > 0.8 * per_gpu[0]


def test_another_device_is_calibrated_for_itself(base):
    found = list(run_cases(base, cases([], ["cluster.device=h100-80g,a100-80g"])))
    assert found[0].found["step_s"] < found[1].found["step_s"]


def test_what_was_finished_is_not_planned_again(base):
    wanted = cases([], ["training.seq_len=256,512,1024"])
    stopped = []
    first = list(
        run_cases(base, wanted, should_stop=lambda: len(stopped.append(1) or stopped) > 40)
    )
    known = {o.key: Outcome(**json.loads(o.line())) for o in run_cases(base, wanted)}
    again = list(run_cases(base, wanted, known=known, should_stop=lambda: True))
    assert again == list(known.values())
    assert len(first) <= 3
    other = load_inputs("gpt2", "4xh100-80g", overrides={"global_batch": 64, "seq_len": 1024})
    assert list(run_cases(other, wanted, known=known, should_stop=lambda: True)) == []


def test_a_case_in_which_nothing_fits_keeps_its_reason(base):
    wanted = cases(["training.micro_batch=64"], ["training.seq_len=1024,131072"])
    found = list(run_cases(base, wanted))
    assert found[1].found is None
    assert "GiB" in found[1].reason


@pytest.mark.parametrize(
    ("sets", "sweeps", "said"),
    [
        (["training.seqlen=1"], [], "did you mean training.seq_len"),
        (["cluster.num_nodes"], [], "NAME=VALUE"),
        ([], ["training.seq_len=,"], "has no values"),
        (["model=gpt2"], ["model=gpt2,gpt2-xl"], "model is set as well"),
        ([], [f"training.seq_len={','.join(map(str, range(1, 1200)))}"], "at most 1,000"),
    ],
)
def test_what_cannot_be_asked_is_told(sets, sweeps, said):
    with pytest.raises(InputError, match=said):
        cases(sets, sweeps)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cluster.num_nodes=0", "above 0"),
        ("cluster.num_nodes=1.5", "whole"),
        ("training.precision=fp7", "precision"),
        ("model=gpt22", "gpt2"),
    ],
)
def test_a_change_that_cannot_be_made_is_told_before_anything_is_planned(base, change, said):
    with pytest.raises(InputError, match=said):
        next(run_cases(base, cases([change], [])))
