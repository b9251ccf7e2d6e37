"""What surrounds the passes: optimizer, learning rate, data, precision, records."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cases import BATCH, QWEN, SEQ, Case, alone, outcome, split, training_of
from ranks import run_ranks

from executor.data import open_data
from executor.job import Recipe
from executor.optimizer import learning_rate, make_optimizer
from executor.precision import Numbers
from profiles.errors import InputError
from profiles.runs import read_runs
from profiles.training import Optimizer

MIXED = Numbers(torch.float32, torch.bfloat16, torch.float32)


def test_the_rate_rises_then_falls_along_a_cosine():
    recipe = Recipe(lr=1.0, warmup=4, least=0.1)
    rates = [learning_rate(recipe, step, 24) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[14] == pytest.approx(0.55)
    assert rates[24] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_matrices_decay_and_vectors_do_not():
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    made = make_optimizer(Optimizer.ADAMW, parameters, Recipe(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in parameters] == [0.3, 0.0]


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, Optimizer.ADAM])
def test_adam_over_shards_is_adam_over_the_whole(optimizer):
    training = training_of(optimizer)

    def run(layout):
        return run_ranks(
            layout.mesh.num_ranks,
            lambda _: outcome(QWEN, layout, Numbers(torch.float64), training).losses,
        )

    (one,) = run(Case(name="", model="qwen", micro_batch=BATCH).layout)
    two, one_each = split(2, 2, 3), split(1, 4, 1)
    layers = (two, two, one_each, split(1, 4), two, two)
    several = Case(name="", model="qwen", tp=2, dp=2, micro_batch=2, layers=layers)
    for other in run(several.layout):
        assert other == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize(
    "case",
    [
        Case(name="one", micro_batch=2),
        Case(name="shards", dp=2, zero=3, micro_batch=2),
        Case(name="split", tp=2, sequence=True, micro_batch=2),
        Case(name="stages", pp=2, dp=2, zero=1, micro_batch=2),
        Case(name="experts", dp=2, ep=2, zero=3, micro_batch=2, model="mixtral"),
        Case(name="sequences", cp=2, zero=2, micro_batch=2),
        Case(
            name="layers", tp=2, micro_batch=4,
            layers=(*[split(2, 1)] * 2, *[split(1, 2, 3)] * 2, split(2, 1), split(1, 2)),
        ),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_bf16_stays_near_fp32(case):
    """bf16 has 8 bits: losses of 4.25 within 0.02, norms of gradients within 3 %."""
    layout = case.layout
    found = run_ranks(
        layout.mesh.num_ranks, lambda _: outcome(case.spec, layout, MIXED, training_of())
    )
    reference = alone(case.model)[torch.float32]
    for each in found:
        assert each.losses == pytest.approx(reference.losses, abs=0.02)
        assert each.norms == pytest.approx(reference.norms, rel=0.03)


def test_synthetic_sequences_do_not_depend_on_who_asks():
    data = open_data("synthetic", vocab=50, seq_len=SEQ, sequences=10**9, seed=3)
    whole = data.rows(0, 8)
    assert whole.shape == (8, SEQ + 1)
    assert torch.equal(torch.cat((data.rows(0, 3), data.rows(3, 5))), whole)
    steps = (whole[:, 1:] - whole[:, :-1]) % 50
    assert (steps == steps[:, :1]).all()
    assert len({int(step) for step in steps[:, 0]}) > 2


def test_a_folder_gives_each_sequence_once(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    np.save(tmp_path / "b.npy", np.arange(100, 180, dtype=np.uint32))
    data = open_data(str(tmp_path), vocab=256, seq_len=9, sequences=19, seed=0)
    rows = torch.cat([data.rows(first, 1) for first in range(19)])
    assert sorted(rows[:, 0].tolist()) == [*range(0, 99, 9), *range(100, 171, 9)]
    assert (rows[:, 1:] == rows[:, :-1] + 1).all()


def test_data_that_does_not_do_is_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    with pytest.raises(InputError, match=r"has 11 sequences of 9 tokens, the run needs 12"):
        open_data(str(tmp_path), vocab=256, seq_len=9, sequences=12, seed=0)
    with pytest.raises(InputError, match="has token 255, the model knows those below 70"):
        open_data(str(tmp_path), vocab=70, seq_len=9, sequences=1, seed=0)
    with pytest.raises(InputError, match="no folder"):
        open_data(str(tmp_path / "none"), vocab=256, seq_len=9, sequences=1, seed=0)
    np.save(tmp_path / "b.npy", np.zeros((2, 2)))
    with pytest.raises(InputError, match="no list of whole numbers"):
        open_data(str(tmp_path), vocab=256, seq_len=9, sequences=1, seed=0)


def test_what_is_no_record_of_a_run_is_told(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("[]")
    with pytest.raises(InputError, match="is no record of a run"):
        read_runs(path)
    path.write_text(json.dumps({"row": {"id": "x"}}))
    with pytest.raises(InputError, match="has no gpu"):
        read_runs(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="has no run"):
        read_runs(tmp_path)
