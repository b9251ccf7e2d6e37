"""A run that is cut off goes on as if it had not been, under any layout."""

from __future__ import annotations

import pytest
import torch
from cases import LLAMA, SEQ, STEPS, VEE, Case, alone, batch, own_rows, training_of
from ranks import run_ranks

from executor.checkpoint import Checkpoints
from executor.checkpointfiles import Shelf
from executor.job import Recipe
from executor.precision import Numbers
from executor.trainer import Trainer
from profiles.training import Optimizer

CUT = 2  # steps before a run moves
RECIPE = Recipe(lr=0.01, warmup=2, clip=0.5, weight_decay=0.01)
RUN = {"model": "small", "optimizer": "", "global_batch": 8, "seq_len": SEQ, "seed": 0, "data": ""}


def trainer_of(case, optimizer, numbers=None):
    return Trainer(
        case.spec, case.layout, training_of(optimizer), RECIPE,
        device=torch.device("cpu"), num_steps=STEPS, numbers=numbers or Numbers(torch.float32),
    )  # fmt: skip


def part_of_run(case, folder, *, until, optimizer=Optimizer.ADAMW, every=0, keep=2, told=None):
    """On this rank: go on from the last checkpoint to step ``until``, and save there."""
    trainer = trainer_of(case, optimizer)
    tell = (told if told is not None else []).append
    checkpoints = Checkpoints(Shelf(folder), trainer, RUN, keep=keep, tell=tell)
    checkpoints.load()
    losses = []
    while trainer.done < until:
        losses.append(trainer.step(*own_rows(trainer, trainer.done)).loss)
        if trainer.done == until or (every and trainer.done % every == 0):
            checkpoints.save()
    checkpoints.wait()
    return losses


def run(case, folder, **how):
    return run_ranks(case.layout.mesh.num_ranks, lambda _: part_of_run(case, folder, **how))[0]


def test_x(tmp_path):
    one = Case(name="", micro_batch=8)
    whole = run(one, tmp_path / "a", until=STEPS)
    first = run(Case(name="", dp=2, zero=3), tmp_path / "b", until=CUT)
    rest = run(Case(name="", tp=2, sequence=True), tmp_path / "b", until=STEPS)
    assert first + rest == pytest.approx(whole, rel=1e-5)
