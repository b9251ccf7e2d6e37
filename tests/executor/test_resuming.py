"""``parplan launch`` on an ``--out`` that has checkpoints: it goes on, or says why not."""

from __future__ import annotations

import json
import shutil

import pytest
from test_launch import CONFIG, parplan

from executor.resuming import changes

ASKED = (
    "--model", "model.json", "--global-batch", 4, "--seq-len", 32, "--precision", "fp32",
    "--format", "yaml",
)  # fmt: skip
STEPS = ("--steps", 6, "--lr", 1e-3, "--checkpoint-every", 2)


def write_plan(folder, name, *flags):
    done = parplan("estimate", *ASKED, *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / name).write_text(done.stdout)


def logged(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of four of six steps under one plan, and another plan of the model."""
    place = tmp_path_factory.mktemp("resume")
    (place / "model.json").write_text(json.dumps(CONFIG))
    (place / "texts").mkdir()
    (place / "texts" / "a.txt").write_text("to be or not to be, that is the question: " * 40)
    write_plan(place, "stages.yaml", "--cluster", "2xcpu", "--pp", 2)
    write_plan(place, "one.yaml", "--cluster", "1xcpu")
    data = ("--data", "texts")
    for plan, out, more in (("one.yaml", "peace", ()), ("stages.yaml", "run", ("--stop-at", 4))):
        done = parplan("launch", plan, *STEPS, *data, *more, "--out", out, cwd=place)
        assert done.returncode == 0, done.stderr
    return place


def test_a_run_goes_on_under_another_plan_and_number_of_ranks(folder, tmp_path):
    out = shutil.copytree(folder / "run", tmp_path / "run")
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 9.0, "plan": "killed"}\n{"step": 5, "lo')
    done = parplan("launch", "one.yaml", *STEPS, "--data", "texts", "--out", out, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "going on from step 4\n" in done.stderr
    lines, peace = logged(out), logged(folder / "peace")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["plan"] for line in lines] == ["stages.yaml"] * 4 + ["one.yaml"] * 2
    for name in ("loss", "lr"):
        expected = [line[name] for line in peace]
        assert [line[name] for line in lines] == pytest.approx(expected, rel=1e-5)
    record = json.loads((out / "run.json").read_text())
    assert record["first_step"] == 4
    assert [step["loss"] for step in record["steps"]] == [line["loss"] for line in lines]
    assert record["measured"]["first_loss"] == lines[4]["loss"]
    assert len(record["ranks"]) == 1
    assert record["ranks"][0]["ran"] == record["ranks"][0]["planned"]
    assert "steps 5 to 6 on 1 rank," in done.stdout
    assert "Loss of the run" in done.stdout
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]


def test_another_recipe_is_told():
    was = {"seed": 0, "steps": 6, "lr": 0.001, "clip": 1.0}
    assert changes(was, was) == ""
    assert changes(was, was | {"steps": 5, "lr": 0.0003}) == "steps 6 -> 5, lr 0.001 -> 0.0003"


REFUSALS = {
    "is done": (
        ("stages.yaml", "--steps", 6, "--stop-at", 4),
        "has a checkpoint of step 4, all of",
    ),
    "seed": (("stages.yaml", *STEPS, "--seed", 3), "with seed 0, not 3 (--seed as it was, or"),
    "data": (("stages.yaml", *STEPS), "not synthetic (--data as it was, or another --out"),
    "model": (("else.yaml", *STEPS), "a checkpoint with model model ("),
    "batch": (("batch.yaml", *STEPS), "with global batch 4, not 8 (a plan with that batch, or"),
    "data ends": (
        ("stages.yaml", "--steps", 60),
        "the run needs 240 (fewer --steps, or more data)",
    ),
    "ranks": (
        ("many.yaml", *STEPS),
        "dp 8 with a global batch of 4: some replicas have nothing to do; expected dp at",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_go_on_is_told_and_nothing_overwritten(case, folder):
    (folder / "else.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 5}))
    if case == "model":
        write_plan(folder, "else.yaml", "--model", "else.json", "--cluster", "1xcpu")
    if case == "batch":
        write_plan(folder, "batch.yaml", "--global-batch", 8, "--cluster", "1xcpu")
    if case == "ranks":  # of four sequences
        write_plan(folder, "many.yaml", "--global-batch", 8, "--cluster", "8xcpu", "--dp", 8)
        plan = (folder / "many.yaml").read_text()
        (folder / "many.yaml").write_text(plan.replace("global_batch: 8", "global_batch: 4"))
    (plan, *flags), words = REFUSALS[case]
    if case != "data":
        flags += ["--data", "texts"]
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    done = parplan("launch", plan, *flags, "--out", "run", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    after = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    assert after == before


def test_compiled_blocks_are_refused_where_backward_passes_are_split(folder):
    write_plan(
        folder, "v.yaml", "--cluster", "2xcpu", "--pp", 2, "--schedule", "zbv", "--chunks", 2,
    )  # fmt: skip
    done = parplan("launch", "v.yaml", "--steps", 1, "--compile", "--out", "x", cwd=folder)
    assert done.returncode == 2
    assert "--compile with zbv, which runs a backward pass in two parts" in done.stderr
