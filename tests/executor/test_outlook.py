"""What a session would take, foreseen without the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from profiled import LLAMA, TRAINING, point, request

from cli import main
from costmodel.layout import NO_RECOMPUTE
from executor.profiler import timing
from executor.profiler.memory import held_bytes
from executor.profiler.outlook import outlook_of
from executor.profiler.probe import pretended_group
from executor.profiler.tasks import SessionPlan
from executor.profiler.timing import sampled, sampling_s
from profiles.catalog import load_model, load_training

SEVEN = ["profile", "layers", "llama2-7b", "--tp", "1,2,4", "--micro-batch", "1,2,4,8"]
MINUTES_S = 10 * 60


def plan(**more) -> SessionPlan:
    usual = {"request": request(tp=(1, 2)), "device": "cpu", "device_name": "cpu"}
    return SessionPlan(**{**usual, **more})


@pytest.mark.parametrize("layer", ["block-0", "head", "embedding"])
@pytest.mark.parametrize("tp", [1, 2])
def test_memory_is_what_a_layer_holds(layer, tp):
    own = point(layer, tp)
    one = replace(request(), tp=(tp,), batches=(own.batch,))
    found = outlook_of(plan(request=one))
    with pretended_group(tp):
        held = held_bytes(LLAMA, TRAINING, own, NO_RECOMPUTE, torch.device("cpu"))
    need = found.needs[own]
    assert held.saved + held.state <= need * 1.02
    assert need <= (held.saved + held.state + held.transient) * 1.05


@pytest.mark.parametrize("sample_s", [1e-4, 3e-3, 0.05, 0.3, 2.0])
def test_a_sampling_takes_what_is_foreseen(sample_s, monkeypatch):
    """On a clock that only the work moves."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "process_time", lambda: now[0])

    def work(clock) -> None:
        with clock.busy("work"):
            now[0] += sample_s

    sampled(work, torch.device("cpu"))
    assert sampling_s(sample_s) == pytest.approx(now[0], rel=0.1)


def test_more_rounds_and_a_slower_device_take_longer():
    once = outlook_of(plan(device="cuda", device_name="h100-80g", rounds=1))
    twice = outlook_of(plan(device="cuda", device_name="h100-80g", rounds=2))
    assert twice.num_points == once.num_points
    assert once.num_samplings < twice.num_samplings
    assert once.seconds < twice.seconds <= 2 * once.seconds
    assert outlook_of(plan()).seconds > once.seconds


def test_a_model_of_7b_takes_less_than_ten_minutes():
    """Four micro-batches and three degrees, on 40 GB."""
    training = load_training(None, {"global_batch": 8, "seq_len": 4096})
    own = request(load_model("llama2-7b"), tp=(1, 2, 4), batches=(1, 2, 4, 8), seq_lens=(4096,))
    own = replace(own, training=training)
    found = outlook_of(plan(request=own, device="cuda", device_name="a100-40g"))
    assert found.seconds < MINUTES_S
    assert not found.too_large
    assert 10 * 2**30 < found.largest_bytes < 20 * 2**30


def test_the_command_says_time_and_memory_of_a_device_that_is_not_here():
    answer = CliRunner().invoke(main, [*SEVEN, "--as", "a100-80g", "--dry-run"])
    assert answer.exit_code == 0, answer.output
    assert "min on a100-80g" in answer.output
    assert "GiB for head, micro-batch 8 x 4096 tokens" in answer.output


def test_what_does_not_fit_is_said():
    answer = CliRunner().invoke(main, [*SEVEN, "--as", "l4", "--seq-len", "8192", "--dry-run"])
    assert "will not fit, as" in answer.output


def test_a_profile_needs_a_file():
    answer = CliRunner().invoke(main, ["profile", "layers", "llama2-7b", "--device", "cpu"])
    assert answer.exit_code == 2
    assert "--output: is missing" in answer.output
