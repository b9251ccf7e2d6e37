"""SIGTERM ends a run after a step, with a checkpoint; a folder is one run's at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from test_launch import (
    LIMIT_S,
    MANY,
    ROOT,
    left_running,
    long_job,
    parplan,
    plan_of_two,
    rank_1_of,
)

from executor.outfolder import LOCK, check_free, claim
from profiles.errors import ExitCode, InputError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small model, and a plan of it for two ranks."""
    return plan_of_two(tmp_path_factory.mktemp("stopping"), "--dp")


@pytest.fixture(scope="module")
def stopped(place):
    """A long run that gets a second launch beside it, then SIGTERM in some step."""
    job = long_job(place, "run")
    second = parplan("launch", "plan.yaml", "--steps", MANY, "--out", "run", cwd=place)
    job.send_signal(signal.SIGTERM)
    _, stderr = job.communicate(timeout=LIMIT_S)
    return job.returncode, stderr, second


def test_sigterm_ends_a_run_with_a_checkpoint_of_its_last_step(place, stopped):
    code, stderr, _ = stopped
    assert code == ExitCode.STOPPED == 128 + signal.SIGTERM
    steps = len((place / "run" / "log.jsonl").read_text().splitlines())
    assert stderr.count(f"stopped by SIGTERM after step {steps}, with a checkpoint") == 1
    (saved,) = (place / "run" / "checkpoints").glob("*/checkpoint.json")
    assert json.loads(saved.read_text())["step"] == steps
    assert len(json.loads((place / "run" / "run.json").read_text())["steps"]) == steps
    again = ["launch", "plan.yaml", "--steps", MANY, "--stop-at", steps + 1, "--out", "run"]
    done = parplan(*again, cwd=place)
    assert done.returncode == 0, done.stderr
    assert f"going on from step {steps}" in done.stderr


def test_a_second_launch_on_a_folder_in_use_is_refused(stopped):
    _, _, second = stopped
    assert second.returncode == 2
    assert second.stderr.startswith("--out run: another launch writes there: process ")
    assert len(second.stderr.strip().splitlines()) <= 2  # the message and its hint


def test_sigterm_to_one_rank_ends_all(place):
    job = long_job(place, "one", "--checkpoint-every", "0")
    os.kill(rank_1_of(job, place / "one"), signal.SIGTERM)
    _, stderr = job.communicate(timeout=LIMIT_S)
    assert job.returncode == ExitCode.STOPPED
    assert "without a checkpoint" in stderr
    assert left_running(place / "one") == []


def test_a_folder_is_free_again_when_its_holder_is_killed(tmp_path):
    check_free(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from executor.outfolder import claim\n"
        "held = claim(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=f"another launch writes there: process {holder.pid} on"):
        check_free(tmp_path)
    holder.kill()
    holder.communicate()
    with claim(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
