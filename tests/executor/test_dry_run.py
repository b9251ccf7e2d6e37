"""A dry run is what ranks really do, and what the cost model says of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from cases import LLAMA, Case, own_rows, training_of
from click.testing import CliRunner
from drycases import DRY_CASES, PAGE, row
from ranks import run_ranks
from test_launch import CONFIG

from cli import main
from costmodel.layout import Recompute, RecomputeKind
from executor.dry_run import TOLERANCES, DryRun, dry_run, run_short
from executor.fakerank import fake_rank
from executor.job import Recipe
from executor.memorylog import MemoryLog
from executor.precision import Numbers
from executor.shortened import Short, short_jobs, whole
from executor.traffic import TrafficLog
from executor.trainer import Trainer
from planner import ManualLayout, layout_from_degrees, load_inputs, load_plan, plan_of, save_plan
from profiles.errors import InputError
from profiles.model import LayerRun

PIPELINE = Case(name="", tp=2, dp=2, pp=2, zero=1, sequence=True, micro_batch=1)


@pytest.mark.parametrize("case", DRY_CASES, ids=lambda case: f"{case.model}: {case.name}")
def test_the_estimate_is_what_a_rank_needs(case):
    found = dry_run(case.plan, "plan", rank=case.rank)
    assert found.passes, found.document()
    states = ("parameters", "gradients", "optimizer")
    assert case.ep > 1 or not any(found.difference(kind) for kind in states)
    assert row(case, found) in PAGE.read_text(encoding="utf-8"), "run tests/executor/drycases.py"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_fp32_on_cpus_is_within_the_tolerances_as_well(tmp_path, zero):
    (tmp_path / "model.json").write_text(json.dumps(CONFIG))
    overrides = {"global_batch": 8, "seq_len": 64, "precision": "fp32"}
    inputs = load_inputs(str(tmp_path / "model.json"), "2xcpu", overrides=overrides)
    layout = layout_from_degrees(inputs, ManualLayout(dp=2, zero=zero, micro_batch=2))
    found = dry_run(plan_of(inputs, layout), "plan", rank=0)
    assert found.passes, found.document()


def step(case, rank):
    """Collectives and peak of a second step in float32."""
    layout, training = case.layout, training_of()
    with MemoryLog() as memory:
        trainer = Trainer(
            case.spec, layout, training, Recipe(),
            device=torch.device("cpu"), num_steps=2, numbers=Numbers(),
        )  # fmt: skip
        for _ in range(2):
            memory.peak = memory.live
            with TrafficLog(trainer.mesh.axes) as log:
                trainer.totals(*own_rows(trainer, 0))
            trainer.update()
    assert rank == torch.distributed.get_rank()
    return log.traffic, memory.peak


@pytest.mark.parametrize(
    "case",
    [Case(name="", dp=2, zero=3, micro_batch=2), Case(name="", tp=2, micro_batch=4), PIPELINE],
    ids=["ZeRO-3", "tp", "pipeline"],
)
def test_a_rank_without_peers_does_what_a_real_one_does(case):
    """The same collectives; memory within 2 %, which is what kernels of CPUs allocate for a moment
    and what is in flight between real ranks.
    """
    count = case.layout.mesh.num_ranks
    real = run_ranks(count, lambda rank: step(case, rank))
    for rank in (0, count - 1):
        with fake_rank(rank, count, on_gpu=False):
            traffic, peak = step(case, rank)
        assert traffic == real[rank][0]
        assert peak == pytest.approx(real[rank][1], rel=0.02)


def test_short_jobs_say_all_of_a_long_one():
    model = replace(
        LLAMA, runs=tuple(replace(r, count=7) if r.count > 1 else r for r in LLAMA.runs)
    )
    layout = replace(Case(name="", dp=2, zero=1).layout, num_microbatches=9)
    (chunk,) = layout.chunks
    spans = (replace(chunk.spans[0], stop=9),)
    layout = replace(layout, chunks=(replace(chunk, spans=spans),))
    jobs = short_jobs(model, layout, 0)
    assert sum(job.weight for job in jobs) == 1
    assert {job.layout.num_microbatches for job in jobs} == {3, 4}
    assert {job.model.num_layers for job in jobs} == {5, 6}
    with fake_rank(0, 2, on_gpu=True):
        found = [run_short(job, training_of()) for job in jobs]
        long = run_short(Short(model, layout, 1), training_of())
    for part, expected in enumerate(long):
        assert whole([each[part] for each in found], jobs) == expected


def test_the_extrapolated_peak_is_that_of_the_whole_job():
    """Full recomputation and ZeRO-3, whose buffers of one layer are there while the next runs: two
    layers have none that runs between two like it.
    """
    model = replace(
        LLAMA, runs=tuple(replace(r, count=9) if r.count > 1 else r for r in LLAMA.runs)
    )
    layout = Case(name="", dp=2, zero=3, micro_batch=1).layout
    (chunk,) = layout.chunks
    recompute = Recompute(RecomputeKind.FULL)
    own = replace(chunk.spans[0].strategy, recompute=recompute)
    spans = (replace(chunk.spans[0], stop=11, strategy=own),)
    layout = replace(layout, chunks=(replace(chunk, spans=spans),))
    jobs = short_jobs(model, layout, 0)
    with fake_rank(0, 2, on_gpu=True):
        found = [run_short(job, training_of())[0] for job in jobs]
        long = run_short(Short(model, layout, 1), training_of())[0]
    assert whole(found, jobs) == long


def test_weights_on_the_meta_device_take_no_memory():
    with MemoryLog() as memory:
        kept = torch.empty(1000, device="meta")
        assert memory.live == 0
        assert kept.is_meta


def test_equal_layers_of_all_chunks_grow_together():
    layout = Case(name="", pp=2, chunks=2, schedule="interleaved-1f1b").layout
    model = replace(LLAMA, runs=(LLAMA.runs[0], LayerRun(LLAMA.runs[1].layer, 16), LLAMA.runs[2]))
    cuts = [0, 5, 9, 13, 18]
    chunks = tuple(
        replace(chunk, spans=(replace(chunk.spans[0], first=a, stop=b),))
        for chunk, a, b in zip(layout.chunks, cuts, cuts[1:], strict=False)
    )
    jobs = short_jobs(model, replace(layout, chunks=chunks), 0)
    assert [job.weight for job in jobs] == [0, 1]
    assert [job.model.num_layers for job in jobs] == [10, 12]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("dry") / "plan.yaml"
    case = replace(DRY_CASES[0], micro_batch=1)
    save_plan(case.plan, path)
    return path


def test_the_command_prints_a_table_and_json(plan_file):
    done = CliRunner().invoke(main, ["launch", str(plan_file), "--dry-run", "--rank", "3"])
    assert done.exit_code == 0, done.output
    assert "rank 3 of 8, stage 0" in done.output
    assert "within its tolerances" in done.output
    arguments = ["launch", str(plan_file), "--dry-run", "--format", "json"]
    answer = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert answer["passes"]
    assert {each["kind"] for each in answer["memory"]} == set(TOLERANCES)


def test_a_difference_beyond_its_tolerance_exits_with_one(plan_file, monkeypatch):
    monkeypatch.setattr(DryRun, "difference", lambda *_: 0.04)
    done = CliRunner().invoke(main, ["launch", str(plan_file), "--dry-run"])
    assert done.exit_code == 1
    assert "beyond its tolerances" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "--rank", "8"], "8 is not a rank of"),
        (["--dry-run", "--rank", "-1"], "expected 0 to 7"),
        (["--steps", "2", "--out", "x", "--rank", "1"], "--rank: without --dry-run"),
        (["--out", "x"], "--steps: is missing"),
        (["--steps", "2"], "--out: is missing"),
        (["--steps", "2", "--out", "x", "--stop-at", "3"], "--stop-at: 3 is beyond --steps"),
    ],
)
def test_wrong_questions_are_told(plan_file, arguments, message):
    done = CliRunner().invoke(main, ["launch", str(plan_file), *arguments])
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", " ")


def test_a_plan_that_the_executor_refuses_is_not_run(plan_file):
    plan = load_plan(str(plan_file))
    refused = replace(plan, layout=replace(plan.layout, num_microbatches=3))
    with pytest.raises(InputError, match="are not the global batch"):
        dry_run(refused, "plan.yaml")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["launch", "PLAN", "--dry-run"], "--dry-run"),
        (["profile", "layers", "qwen3-0.6b", "-o", "x"], "parplan profile layers"),
        (["profile", "links", "2xcpu", "-o", "x"], "parplan profile links"),
    ],
)
def test_without_torch_one_message_says_so(plan_file, monkeypatch, arguments, where):
    monkeypatch.setattr("executor.job.find_spec", lambda _: None)
    own = [str(plan_file) if each == "PLAN" else each for each in arguments]
    done = CliRunner().invoke(main, own)
    assert done.exit_code == 2
    assert f"{where}: needs PyTorch" in done.stderr
