"""Inputs under a profile: when it is refused, what it changes, how a plan file keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_measured_layers import FACTS, LAYERS, profile, row, whole

from planner import load_inputs, load_plan, plan_training, save_plan, with_profiles
from profiles.errors import InputError
from profiles.fingerprint import fingerprint
from profiles.measured import ModelFacts, OperatorTime
from profiles.measuredfile import profile_text

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def inputs(cluster: str = "2xcpu", precision: str = "fp32"):
    sizes = {"global_batch": 4, "seq_len": 256, "precision": precision}
    return load_inputs("config.json", cluster, overrides=sizes)


def written(own, name: str = "p.yaml") -> str:
    Path(name).write_text(profile_text(own), encoding="utf-8")
    return name


def refusal(own, *, cluster: str = "2xcpu", precision: str = "fp32") -> str:
    with pytest.raises(InputError) as caught:
        with_profiles(inputs(cluster, precision), [written(own)])
    return str(caught.value)


def test_the_layers_of_the_test_are_those_of_its_config():
    assert dict.fromkeys(run.layer for run in inputs().model.runs).keys() == {*LAYERS.values()}


def test_a_profile_brings_kernels_and_a_calibration():
    found = with_profiles(inputs("1xcpu"), [written(whole())])
    assert found.training.fused_kernels is FACTS.fused_kernels
    assert found.training.loss_kernel.value == FACTS.loss
    assert found.calibration.efficiencies.context_bytes == FACTS.context_bytes
    assert found.notes == ("profile p: a processor, torch 2.13.0",)


def test_no_profile_changes_nothing():
    own = inputs()
    assert with_profiles(own, []) is own


def test_another_device_is_refused():
    told = refusal(whole(), cluster="8xh100")
    assert told.startswith("--profile: measured on cpu; the cluster's slowest device is h100-80g")


def test_another_precision_is_refused():
    assert "measured in fp32, the run is in bf16" in refusal(whole(), precision="bf16")


def test_a_model_that_has_changed_is_refused_as_stale():
    model = inputs().model
    stale = ModelFacts(model=model.name, layers=dict.fromkeys(LAYERS, "f" * 16))
    told = refusal(replace(profile(row()), models=(stale,)))
    assert "is not what it was when it was measured" in told


def test_another_model_without_operators_is_refused():
    other = ModelFacts(model="other", layers=dict.fromkeys(LAYERS, "f" * 16))
    told = refusal(replace(profile(row()), models=(other,)))
    assert "has layers of other and no operators" in told


def test_operators_alone_make_a_calibration():
    operator = OperatorTime(
        device="cpu", precision="fp32", operator="gemm", shape=(1024, 1024, 1024), forward_s=0.02
    )
    found = with_profiles(inputs(), [written(replace(profile(), operator_times=(operator,)))])
    assert found.calibration.knowledge == "calibrated"


def test_a_plan_file_keeps_its_profiles(here):
    found = with_profiles(inputs(), [written(whole())])
    planned = plan_training(found, launcher="native")
    save_plan(planned.plan, "plan.yaml")
    again = load_plan("plan.yaml")
    assert again.remarks == ()
    assert again.estimate == planned.plan.estimate
    assert again.estimate.knowledge == "measured"
    assert f"sha256: {fingerprint(found.profile)}" in (here / "plan.yaml").read_text()


def test_a_profile_that_has_changed_is_remarked():
    planned = plan_training(with_profiles(inputs(), [written(whole())]), launcher="native")
    save_plan(planned.plan, "plan.yaml")
    written(whole(forward_s=0.02))
    remarks = load_plan("plan.yaml").remarks
    assert remarks[0] == "the profile p has changed since this plan was made"
    assert remarks[1].startswith("step_s is")


def test_a_profile_that_is_gone_is_told_at_its_line(here):
    planned = plan_training(with_profiles(inputs(), [written(whole())]), launcher="native")
    save_plan(planned.plan, "plan.yaml")
    (here / "p.yaml").unlink()
    with pytest.raises(InputError, match=r"p\.yaml"):
        load_plan("plan.yaml")


def test_a_profile_without_wrappers_says_what_is_not_measured_and_how_to_measure_it():
    (told,) = [note for note in noted("2xcpu") if "layer_wrapping" in note]
    assert "is not measured" in told
    assert told.endswith("parplan profile layers config.json -o FILE measures it")


def test_of_one_rank_there_is_nothing_to_wrap():
    assert not [note for note in noted("1xcpu") if "layer_wrapping" in note]


def noted(cluster: str) -> tuple[str, ...]:
    return with_profiles(inputs(cluster), [written(whole())]).notes
