"""parplan schedule, and parplan export --to trace."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from costmodel.schedules import SCHEDULES

KEYS = {"span", "makespan", "bubble", "peak_in_flight", "events", "idle", "gradient_equivalent"}


def answer_of(parplan, *arguments):
    result = parplan("schedule", *arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "span"),
    [
        ("gpipe --stages 4 --micro-batches 8", 33),
        ("zb-h1 --stages 8 --micro-batches 16 --times 1,1,1", 55),
        ("zb-h2 --stages 4 --micro-batches 8", 24),
        ("bitpipe --stages 4 --micro-batches 8 --chunks 4 --times 2,2,2", 54),
        ("bitpipe --stages 8 --micro-batches 32 --times 2,2,2", 222),
        ("zeropp --stages 8 --micro-batches 32 --chunks 2 --unit 8 --times 2,2,2", 199),
        ("chimera --stages 4 --micro-batches 4 --chunks 2", 16),
        ("async-1f1b --stages 4 --micro-batches 8", 24),
    ],
)
def test_a_schedule_answers_with_its_figures(parplan, arguments, span):
    answer = answer_of(parplan, *arguments.split())
    assert answer.keys() >= KEYS
    assert answer["span"] == span
    assert answer["bubble"] == pytest.approx(1 - answer["micro_batches"] * 3 / span * (
        answer["times"]["F"]))  # fmt: skip
    assert len(answer["peak_in_flight"]) == answer["stages"]


def test_the_asynchronous_schedule_says_that_it_is_not_equivalent(parplan):
    answer = answer_of(parplan, "async-1f1b", "--stages", "4", "--micro-batches", "8")
    assert answer["gradient_equivalent"] is False
    assert answer["staleness"] == [3, 2, 1, 0]
    assert answer["weight_versions"] == [4, 3, 2, 1]
    text = parplan("schedule", "async-1f1b", "--stages", "4", "--micro-batches", "8").stdout
    assert "NOT equivalent" in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_pass_by_pass(parplan, name):
    text = parplan("schedule", name, "--stages", "4", "--micro-batches", "8").stdout
    rows = text.splitlines()[2:6]
    assert [row[:3] for row in rows] == [" 0 ", " 1 ", " 2 ", " 3 "]
    drawn = sum(row.lower().count("f") for row in rows)
    # every micro-batch crosses each stage once for each of its chunks
    assert drawn == 4 * 8 * SCHEDULES[name].usual_chunks


def test_a_picture_shows_when_each_pass_runs(parplan):
    text = parplan("schedule", "1f1b", "--stages", "2", "--micro-batches", "3").stdout
    assert text.splitlines()[2:4] == [
        " 0 F0F1. . B0- F2B1- . B2-",
        " 1 . F0B0- F1B1- F2B2- . .",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("1f2b --stages 4 --micro-batches 8", "there is no schedule '1f2b'"),
        ("zeropp --stages 4 --micro-batches 8 --unit 9", "4 to 7 micro-batches, not 9; nearest: 7"),
        ("interleaved-1f1b --stages 4 --micro-batches 6 --chunks 2", "nearest: 8"),
        ("zbv --stages 4 --micro-batches 8 --chunks 3", "2 chunks a stage, not 3; nearest: 2"),
        ("bitpipe --stages 4 --micro-batches 8 --chunks 3", "4 chunks a device, not 3"),
        ("1f1b --stages 4 --micro-batches 8 --unit 4", "--unit: 1f1b has no units"),
        ("1f1b --stages 4 --micro-batches 8 --times 1,2", "--times: times are '1,2'"),
        ("1f1b --stages 4 --micro-batches 8 --times 0,0,0", "--times: times are '0,0,0'"),
        ("1f1b --stages 4 --micro-batches 8 --times 1,nan,1", "--times: times are '1,nan,1'"),
    ],
)
def test_a_wrong_question_is_refused_with_its_rule(parplan, arguments, told):
    result = parplan("schedule", *arguments.split())
    assert result.exit_code == 2
    assert told in result.stderr
    assert not result.stdout


def test_a_long_run_has_figures_but_no_events(parplan):
    shape = ("--stages", "16", "--micro-batches", "4096")
    answer = answer_of(parplan, "1f1b", *shape)
    assert answer["events"] is None
    assert answer["makespan"] == 3 * (4096 + 15)


# --- trace -----------------------------------------------------------------------------------


JOB = ("--model", "llama3-8b", "--cluster", "8xh100", "--global-batch", "16", "--seq-len", "4096")


@pytest.fixture(params=["1f1b", "interleaved-1f1b", "zbv", "chimera"])
def plan_path(request, parplan, tmp_path):
    chunks = str(SCHEDULES[request.param].usual_chunks)
    layout = ("--pp", "4", "--tp", "2", "--schedule", request.param, "--chunks", chunks)
    made = parplan("estimate", *JOB, *layout, "--format", "yaml")
    path = tmp_path / "plan.yaml"
    path.write_text(made.stdout)
    return path


def test_a_trace_has_a_process_a_stage_and_slices_that_nest(parplan, plan_path):
    result = parplan("export", plan_path, "--to", "trace")
    assert result.exit_code == 0, result.stderr
    trace = json.loads(result.stdout)
    records = trace["traceEvents"]
    names = [r["args"]["name"] for r in records if r["name"] == "process_name"]
    assert names == [f"stage {stage}" for stage in range(4)]
    threads = defaultdict(list)
    for r in records:
        if r["ph"] == "X":
            assert isinstance(r["ts"], int)
            assert r["dur"] > 0
            threads[r["pid"], r["tid"]].append((r["ts"], r["ts"] + r["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(slices))
    end = max(stop for slices in threads.values() for _, stop in slices)
    assert end <= trace["otherData"]["step_s"] * 1e6
    assert end >= 0.9 * trace["otherData"]["step_s"] * 1e6


def test_arrows_of_a_trace_start_and_end_inside_passes_of_different_stages(parplan, plan_path):
    records = json.loads(parplan("export", plan_path, "--to", "trace").stdout)["traceEvents"]
    slices = [r for r in records if r["ph"] == "X"]
    flows = defaultdict(dict)
    for r in records:
        if r["ph"] in "sf":
            flows[r["id"]][r["ph"]] = r
    assert flows
    for pair in flows.values():
        assert pair["s"]["pid"] != pair["f"]["pid"]
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for r in pair.values():
            assert any(
                (s["pid"], s["tid"]) == (r["pid"], r["tid"])
                and s["ts"] <= r["ts"] < s["ts"] + s["dur"]
                for s in slices
            )


def test_the_memory_counter_of_a_trace_returns_to_the_states(parplan, plan_path):
    records = json.loads(parplan("export", plan_path, "--to", "trace").stdout)["traceEvents"]
    for stage in range(4):
        own = [r for r in records if r["ph"] == "C" and r["pid"] == stage]
        assert max(r["args"]["activations"] for r in own) > 0
        assert own[-1]["args"]["activations"] == 0
        assert own[-1]["args"]["for weight gradients"] == 0
        assert len({r["args"]["states"] for r in own}) == 1


def test_a_trace_is_not_written_over_a_file(parplan, plan_path, tmp_path):
    target = tmp_path / "trace.json"
    assert parplan("export", plan_path, "--to", "trace", "-o", target).exit_code == 0
    assert json.loads(target.read_text())["traceEvents"]
    refused = parplan("export", plan_path, "--to", "trace", "-o", target)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
