"""``parplan launch``: a run end to end, and everything that can go wrong, told once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from costmodel.layout import (
    NO_RECOMPUTE,
    Chunk,
    LayerSpan,
    Layout,
    Mesh,
    Recompute,
    RecomputeKind,
    Strategy,
)
from executor.failures import cause, forget, leave_note
from planner import load_inputs, plan_of, plan_text

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
LIMIT_S = 150
MANY = 100_000  # steps


def parplan(*arguments, cwd, **how):
    return subprocess.run(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, **how,
    )  # fmt: skip


def plan_of_two(place, degree):
    """The folder, with a small model and a plan of it in which a degree is 2."""
    (place / "model.json").write_text(json.dumps(CONFIG))
    done = parplan(
        "estimate", "--model", "model.json", "--cluster", "2xcpu", "--global-batch", 4,
        "--seq-len", 32, "--precision", "fp32", degree, 2, "--format", "yaml", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (place / "plan.yaml").write_text(done.stdout)
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model, and a plan of it for two ranks with two stages."""
    return plan_of_two(tmp_path_factory.mktemp("launch"), "--pp")


def left_running(marker):
    """Processes whose command line has ``marker``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(marker).encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def run(folder):
    done = parplan("launch", "plan.yaml", "--steps", 4, "--out", "run", "--lr", 1e-3, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "run" / "run.json").read_text())


def test_compare_holds_the_run_against_its_plan(run, folder):
    told = parplan("compare", "plan.yaml", "run", cwd=folder)
    assert told.returncode == 0, told.stderr
    assert " the interval" in told.stdout
    done = parplan("compare", "plan.yaml", "run/run.json", "--format", "json", cwd=folder)
    (own,) = json.loads(done.stdout)["runs"]
    measured = run[1]["measured"]["step_s"]
    assert own["same_plan"]
    assert own["slower"] == pytest.approx(measured / run[1]["estimate"]["step_s"] - 1)
    limit = f"{100 * (own['slower'] + 0.5):.0f}%" if own["slower"] > -0.5 else "0%"
    passing = parplan("compare", "plan.yaml", "run", "--fail-above", limit, cwd=folder)
    assert passing.returncode == 0, passing.stderr
    alone = parplan("compare", "run", cwd=folder)
    assert alone.returncode == 2
    assert "a plan and its run.json" in alone.stderr


def test_a_run_is_told_beside_its_estimate(run):
    done, record = run
    assert "Measured beside the estimate" in done.stdout
    assert "step 4/4" in done.stderr
    assert record["measured"]["step_s"] > 0
    assert record["estimate"]["step_s"] > 0
    assert [stage["stage"] for stage in record["stages"]] == [0, 1]
    assert len(record["steps"]) == 4
    assert record["steps"][-1]["loss"] < record["steps"][0]["loss"]
    for rank in record["ranks"]:
        assert rank["ran"] == rank["planned"]
        assert rank["device_bytes"] > 0
    assert {rank["stage"] for rank in record["ranks"]} == {0, 1}


def test_experts_and_split_sequences_are_planned_and_run(folder):
    config = CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (folder / "sparse.json").write_text(json.dumps(config))
    planned = parplan(
        "plan", "--model", "sparse.json", "--cluster", "2xcpu", "--global-batch", 4,
        "--seq-len", 32, "--precision", "fp32", "--launcher", "native", "--fix", "cp=2",
        "--fix", "ep=2", "-o", "sparse.yaml", cwd=folder,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    done = parplan("launch", "sparse.yaml", "--steps", 2, "--out", "sparse", cwd=folder)
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "sparse" / "run.json").read_text())
    assert record["row"]["num_experts"] == 4
    assert record["row"]["cp"] == record["row"]["ep"] == 2
    for rank in record["ranks"]:
        kinds, planned_kinds = (
            [(each["kind"], each["axis"], each["count"]) for each in rank[name]]
            for name in ("ran", "planned")
        )
        assert kinds == planned_kinds
        assert {("send", "cp"), ("all-to-all", "ep")} <= {each[:2] for each in kinds}


@pytest.mark.usefixtures("run")
def test_each_step_has_a_line_in_the_log(folder):
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0].keys() >= {"loss", "tokens_per_s", "mfu", "memory_bytes", "grad_norm", "lr"}


@pytest.mark.usefixtures("run")
def test_validate_reads_a_run(folder):
    done = parplan("validate", "--runs", "run/run.json", "--format", "json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert '"parplan"' in done.stdout


@pytest.mark.usefixtures("run")
def test_calibrate_reads_a_folder_of_runs(folder):
    for number in range(3):
        record = json.loads((folder / "run" / "run.json").read_text())
        record["row"]["id"] += f"-{number}"
        place = folder / "several" / str(number)
        place.mkdir(parents=True)
        (place / "run.json").write_text(json.dumps(record))
    done = parplan("calibrate", "--runs", "several", "-o", "mine.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((folder / "mine.yaml").read_text())["kind"] == "calibration"


def test_print_gives_the_line_of_each_node(folder):
    done = parplan(
        "launch", "plan.yaml", "--steps", 4, "--out", "x", "--nnodes", 2, "--print",
        "--rdzv-endpoint", "one:29500", "--rdzv-id", "mine", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0
    assert "export OMP_NUM_THREADS=1" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "torchrun --nnodes 2 --nproc-per-node 1 --shutdown-timeout 600 --rdzv-backend c10d "
        "--rdzv-endpoint one:29500 --rdzv-id mine -m executor.worker plan.yaml --steps 4 "
        "--data synthetic --out x"
    )
    assert not (folder / "x").exists()


def test_slurm_gives_a_script_that_bash_reads(folder):
    done = parplan("launch", "plan.yaml", "--steps", 4, "--out", "x", "--slurm", cwd=folder)
    assert "#SBATCH --nodes=1" in done.stdout
    assert "srun torchrun" in done.stdout
    checked = subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False)  # noqa: S607
    assert checked.returncode == 0


def test_a_plan_that_cannot_run_is_refused_before_anything_starts(folder):
    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    plan["pipeline"]["schedule"] = "zb-h1"
    (folder / "other.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    done = parplan("launch", "other.yaml", "--steps", 1, "--out", "x", cwd=folder)
    assert done.returncode == 2
    assert "schedule zb-h1; expected one of gpipe, 1f1b" in done.stderr
    assert not (folder / "x").exists()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A plan for two ranks whose layers differ; embedding and head take different sequences."""
    place = tmp_path_factory.mktemp("mixed")
    (place / "model.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    sizes = {"global_batch": 4, "seq_len": 32, "precision": "fp32"}
    inputs = load_inputs(str(place / "model.json"), "2xcpu", overrides=sizes)
    split, gathered = (
        Strategy(tp=2, shard_group=1, sequence_parallel=True),
        Strategy(dp=2, zero=3, shard_group=2, recompute=Recompute(RecomputeKind.FULL)),
    )
    own = {0: split, 5: replace(gathered, recompute=NO_RECOMPUTE)}
    spans = [LayerSpan(at, at + 1, own.get(at, (split, gathered)[at % 2])) for at in range(6)]
    layout = Layout(
        mesh=Mesh(tp=2),
        schedule="1f1b",
        num_chunks=1,
        micro_batch=2,
        num_microbatches=2,
        chunks=(Chunk(0, 0, tuple(spans)),),
    )
    (place / "plan.yaml").write_text(plan_text(plan_of(inputs, layout), folder=place))
    return place


def test_a_plan_of_different_layers_is_launched(mixed):
    done = parplan("launch", "plan.yaml", "--steps", 3, "--out", "run", "--lr", 1e-3, cwd=mixed)
    assert done.returncode == 0, done.stderr
    record = json.loads((mixed / "run" / "run.json").read_text())
    assert record["steps"][-1]["loss"] < record["steps"][0]["loss"]
    for rank in record["ranks"]:
        assert rank["ran"] == rank["planned"]
        assert {row["kind"] for row in rank["ran"]} > {"all-to-all", "reduce-scatter"}


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        ("dp: 2", "dp: 4", "tp 1 x dp 4 of a strategy are not the mesh's 2 x 1 ranks"),
        ("micro_batch: 2", "micro_batch: 1", "1 sequences of a micro-batch do not divide by dp 2"),
    ],
)
def test_a_mix_that_cannot_be_is_refused_before_anything_starts(mixed, wrong, right, words):
    text = (mixed / "plan.yaml").read_text()
    assert wrong in text
    (mixed / "bad.yaml").write_text(text.replace(wrong, right))
    done = parplan("launch", "bad.yaml", "--steps", 1, "--out", "bad", cwd=mixed)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert not (mixed / "bad").exists()


def test_a_plan_of_another_model_is_refused(folder):
    (folder / "else").mkdir(exist_ok=True)
    (folder / "else" / "model.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 5}))
    (folder / "else" / "plan.yaml").write_text((folder / "plan.yaml").read_text())
    done = parplan("launch", "plan.yaml", "--steps", 1, "--out", "x", cwd=folder / "else")
    assert done.returncode == 2
    assert "is not what this plan was made for" in done.stderr


def test_too_little_data_is_told_before_anything_starts(folder):
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("to be or not to be " * 20)
    done = parplan("launch", "plan.yaml", "--steps", 9, "--data", "texts", "--out", "x", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("texts: has 11 sequences")


def test_a_wrong_number_of_ranks_is_told_by_one(folder):
    """As somebody who types torchrun by hand does it."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
         "-m", "executor.worker", "plan.yaml", "--steps", "1", "--data", "synthetic",
         "--out", "wrong"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode != 0
    note = json.loads((folder / "wrong" / "errors" / "rank-0.json").read_text())
    assert "is for 2 ranks, torchrun started 1" in note["message"]
    assert done.stderr.count("is for 2 ranks") == 1


def test_a_port_in_use_is_told(folder):
    import socket  # noqa: PLC0415

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = parplan(
            "launch", "plan.yaml", "--steps", 1, "--out", "port",
            "--rdzv-endpoint", f"127.0.0.1:{port}", cwd=folder,
        )  # fmt: skip
    assert done.returncode == 2
    assert "ranks cannot meet" in done.stderr


def test_nodes_without_a_place_to_meet_are_told(folder):
    done = parplan("launch", "plan.yaml", "--steps", 1, "--out", "apart", "--nnodes", 2, cwd=folder)
    assert done.returncode == 2
    assert "--rdzv-endpoint: is missing for 2 nodes; expected HOST:PORT" in done.stderr
    assert not (folder / "apart").exists()


@pytest.mark.parametrize("place", ["taken", "taken/within"])
def test_an_output_folder_that_cannot_be_made_is_told(folder, place):
    (folder / "taken").write_text("a file")
    done = parplan("launch", "plan.yaml", "--steps", 1, "--out", place, cwd=folder)
    assert done.returncode == 2
    assert f"--out {place}/logs: cannot be made" in done.stderr


def long_job(folder, out, *more, stderr=subprocess.PIPE):
    """A job that has done its first steps of very many."""
    place = folder / out
    arguments = ["launch", "plan.yaml", "--steps", str(MANY), "--out", str(place), *more]
    job = subprocess.Popen(
        [sys.executable, "-m", "cli", *arguments],
        cwd=folder, stderr=stderr, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    log, until = place / "log.jsonl", time.monotonic() + LIMIT_S
    while not (log.exists() and log.stat().st_size) and time.monotonic() < until:
        time.sleep(0.2)
    return job


def rank_1_of(job, out):
    """The process of that rank."""
    return next(
        pid
        for pid in left_running(out)
        if pid != job.pid and b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    )


def test_a_rank_that_dies_ends_the_job_with_its_name(folder):
    job = long_job(folder, "dies")
    os.kill(rank_1_of(job, folder / "dies"), signal.SIGKILL)
    killed_s = time.monotonic()
    _, stderr = job.communicate(timeout=LIMIT_S)
    assert time.monotonic() - killed_s < 30
    assert job.returncode == 1
    assert "rank 1: killed by SIGKILL" in stderr
    assert left_running(folder / "dies") == []


def test_no_rank_outlives_a_launcher_that_is_killed(folder):
    job = long_job(folder, "orphans", stderr=subprocess.DEVNULL)
    job.kill()
    job.wait()
    until = time.monotonic() + 10
    while left_running(folder / "orphans") and time.monotonic() < until:
        time.sleep(0.1)
    assert left_running(folder / "orphans") == []


def test_the_cause_is_the_first_error_that_is_not_about_a_peer(tmp_path):
    leave_note(tmp_path, 2, RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1"))
    time.sleep(0.01)
    leave_note(tmp_path, 1, ValueError("no such expert"))
    time.sleep(0.01)
    leave_note(tmp_path, 0, ValueError("later"))
    found = cause(tmp_path)
    assert (found.rank, found.message, found.exit_code) == (1, "ValueError: no such expert", 1)
    assert "Traceback" not in found.message
    forget(tmp_path)
    assert cause(tmp_path) is None


def test_printing_a_launch_needs_no_torch(folder):
    code = (
        "import sys; from click.testing import CliRunner; from cli import main;"
        "done = CliRunner().invoke(main, ['launch', 'plan.yaml', '--steps', '1', '--out', 'x',"
        " '--print']);"
        "assert done.exit_code == 0, done.output; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
