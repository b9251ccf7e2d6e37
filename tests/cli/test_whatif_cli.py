"""What-if sweeps on the command line: one table, one chart, and files that resume."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time

import pytest

from planner.resultsfile import read_outcomes
from profiles.errors import InputError
from reports import sweep_progress

SWEEP = ["--sweep", "training.micro_batch=1,2,4"]


def test_one_table_and_one_chart(parplan, small):
    result = parplan("whatif", *small, *SWEEP)
    assert result.exit_code == 0
    assert result.stdout.count("Tokens a second") == 1
    bars = [line for line in result.stdout.splitlines() if "█" in line]
    assert [line.split()[:2] for line in bars] == [["micro_batch", n] for n in "124"]


def test_the_answer_has_every_case(parplan, small):
    answer = json.loads(parplan("whatif", *small, *SWEEP, "--format", "json").stdout)
    assert [each["changes"] for each in answer] == [{"training.micro_batch": n} for n in "124"]
    assert [each["found"]["layout"]["micro_batch"] for each in answer] == [1, 2, 4]


def test_a_plan_file_says_what_is_asked_and_its_restrictions_hold(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    parplan("plan", *small, "--fix", "tp=2", "-o", path)
    answer = json.loads(
        parplan("whatif", path, "--sweep", "training.seq_len=256,512", "--format", "json").stdout
    )
    assert [each["found"]["layout"]["tp"] for each in answer] == [2, 2]
    direct = parplan("plan", *small, "--fix", "tp=2", "--seq-len", "256", "--format", "json")
    assert answer[0]["found"]["step_s"] == json.loads(direct.stdout)["step_s"]
    refused = parplan("whatif", path, "--model", "gpt2", *SWEEP)
    assert refused.exit_code == 2
    assert "--model" in refused.stderr


def test_prices_make_columns(parplan, small):
    priced = parplan("whatif", *small, "--set", "cluster.price_per_gpu_hour=2", *SWEEP)
    assert "per Mtoken" in priced.stdout
    assert "per Mtoken" not in parplan("whatif", *small, *SWEEP).stdout


def test_what_is_finished_is_taken_up(parplan, small, tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    first = parplan("whatif", *small, *SWEEP, "--results", path)
    whole = path.read_text()
    assert len(whole.splitlines()) == 3
    path.write_text(whole[: len(whole) - 100])  # killed while it wrote the last line
    planned = []
    import planner.whatif as module  # noqa: PLC0415

    original = module.plan_training
    monkeypatch.setattr(
        module, "plan_training", lambda *a, **k: (planned.append(1), original(*a, **k))[1]
    )
    again = parplan("whatif", *small, *SWEEP, "--results", path)
    assert len(planned) == 1
    assert again.stdout == first.stdout
    assert path.read_text() == whole


def test_a_sweep_that_is_killed_goes_on_in_another_process(small, tmp_path):
    """Restrictions are sets, whose order differs from process to process."""
    path = tmp_path / "results.jsonl"
    values = ",".join(str(2**n) for n in range(4, 17))
    command = [
        *(sys.executable, "-m", "cli", "whatif", *small, "--fix", "zero=0,1,2", "--results", path),
        *("--sweep", f"training.seq_len={values}", "--format", "json"),
    ]
    running = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while running.poll() is None and not (path.exists() and path.read_text().count("\n") > 1):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    before = read_outcomes(path)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    after = read_outcomes(path)
    assert len(json.loads(done.stdout)) == len(after) == 13
    assert list(after)[: len(before)] == list(before)


def test_another_question_is_planned_anew_into_the_same_file(parplan, small, tmp_path):
    path = tmp_path / "results.jsonl"
    parplan("whatif", *small, *SWEEP, "--results", path)
    parplan("whatif", *small, *SWEEP, "--max", "tp=1", "--results", path)
    assert len(read_outcomes(path)) == 6


def test_a_file_that_is_none_of_results_is_left_alone(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    parplan("plan", *small, "-o", path)
    text = path.read_text()
    result = parplan("whatif", *small, *SWEEP, "--results", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path}:1" in result.stderr
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["{}\n", "[]\n", "hello", '{"key": 1}\n'])
def test_other_lines_are_refused_with_their_place(tmp_path, text):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"results\.jsonl:1: "):
        read_outcomes(path)


def test_a_sweep_in_which_nothing_fits_answers_no(parplan, small):
    result = parplan("whatif", *small, "--sweep", "training.seq_len=100000000")
    assert result.exit_code == 1
    assert "no plan for" in result.stdout


def test_a_change_that_is_not_known_is_told(parplan, small):
    result = parplan("whatif", *small, "--set", "training.seqlen=1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "training.seq_len" in result.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_to_people_only(monkeypatch):
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with sweep_progress(2) as tell:
            tell()
        assert ("1/2" in stream.getvalue()) is shown
