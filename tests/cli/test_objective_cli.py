"""plan --objective and --target."""

from __future__ import annotations

import json

import pytest
import yaml

TARGET = """schema_version: 1
kind: target
samples: 100000
batches:
  - {global_batch: 16, epochs: 2}
  - {global_batch: 32, steps: 6250}
  - {global_batch: 64, epochs: 8}
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "target.yaml"
    path.write_text(TARGET)
    return path


def test_energy_leaves_gpus_unused_and_shows_the_front(parplan, small):
    result = parplan("plan", *small, "--objective", "energy", "--format", "json")
    answer = json.loads(result.stdout)
    choices = answer["objective"]["choices"]
    assert answer["search"]["objective"] == answer["objective"]["name"] == "energy"
    assert choices[0]["value"] == min(each["value"] for each in choices)
    assert choices[0]["gpus"] == answer["layout"]["used_gpus"] == 1
    assert choices[0]["value"] == answer["spend"]["kwh_per_step"]
    fastest = min(choices, key=lambda each: each["step_s"])
    assert fastest["on_front"]
    assert "Time against energy" in parplan("plan", *small, "--objective", "energy").stdout


def test_the_plan_file_says_what_it_is_the_best_by_and_is_read_again(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    parplan("plan", *small, "--objective", "energy", "-o", path)
    assert yaml.safe_load(path.read_text())["search"]["objective"] == "energy"
    assert parplan("estimate", path).exit_code == 0


def test_cost_without_a_price_says_what_is_missing(parplan, small):
    result = parplan("plan", *small, "--objective", "cost")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "price_per_gpu_hour" in result.stderr


def test_time_to_target_chooses_the_batch(parplan, small, target):
    result = parplan(
        "plan", *small, "--objective", "time-to-target", "--target", target, "--format", "json"
    )
    answer = json.loads(result.stdout)
    own = {each["global_batch"]: each for each in answer["objective"]["choices"]}
    assert own.keys() == {16, 32, 64}
    for batch, epochs in {16: 2, 32: 2, 64: 8}.items():  # 6250 x 32 / 100000 = 2
        steps = epochs * 100_000 / batch
        assert own[batch]["value"] == pytest.approx(own[batch]["step_s"] * steps)
    assert answer["objective"]["choices"][0]["global_batch"] == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TARGET.replace("epochs: 2", "epoch: 2"), "target.yaml:5:24: unknown key batches[0].epoch"),
        (TARGET.replace("epochs: 2", "epochs: 2, steps: 3"), "one of the two"),
        (TARGET.replace("global_batch: 64", "global_batch: 16"), "stands twice"),
        (TARGET.replace("samples: 100000", "samples: 0"), "target.yaml:3:10"),
    ],
)
def test_a_wrong_target_file_is_told_with_its_place(parplan, small, target, text, said):
    target.write_text(text)
    result = parplan("plan", *small, "--objective", "time-to-target", "--target", target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_target_and_its_objective_go_together(parplan, small, target):
    assert parplan("plan", *small, "--target", target).exit_code == 2
    assert parplan("plan", *small, "--objective", "time-to-target").exit_code == 2
    both = parplan("plan", *small, "--objective", "energy", "--smallest")
    assert both.exit_code == 2


def test_nothing_fits_for_any_choice_says_why(parplan):
    result = parplan(
        "plan", "--model", "llama3-70b", "--cluster", "2xh100-80g", "--objective", "energy"
    )
    assert result.exit_code == 1
    assert "tightest constraint" in result.stderr
