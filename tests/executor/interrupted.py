"""Runs that are cut off and go on: for the tests, and ``python tests/executor/interrupted.py``,
which kills one so many times and says what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from cases import SEQ, Case, own_rows, training_of
from ranks import kill_ranks, run_ranks, start_ranks

from executor.checkpoint import Checkpoints
from executor.checkpointfiles import Shelf
from executor.job import Recipe
from executor.precision import Numbers
from executor.trainer import Trainer
from profiles.training import Optimizer

RECIPE = Recipe(lr=0.01, warmup=2, clip=0.5, weight_decay=0.01)
RUN = {"model": "small", "optimizer": "", "global_batch": 8, "seq_len": SEQ, "seed": 0, "data": ""}
KILLED = Case(name="killed", dp=2, zero=3, micro_batch=4)
FOREVER = 100_000
LIMIT_S = 60


def opened(case, folder, *, optimizer=Optimizer.ADAMW, keep=2, told=None, run=None, steps=5):
    """A trainer on this rank, and the checkpoints in ``folder``."""
    trainer = Trainer(
        case.spec, case.layout, training_of(optimizer), RECIPE,
        device=torch.device("cpu"), num_steps=steps, numbers=Numbers(torch.float32),
    )  # fmt: skip
    tell = (told if told is not None else []).append
    return trainer, Checkpoints(Shelf(folder), trainer, run or RUN, keep=keep, tell=tell)


def session(case, folder, *, until, every=0, before=lambda _: None, **how):
    """On this rank: go on to step ``until``, save every so many steps and there. The losses, and
    what was told. ``before``: called with the checkpoints before each step.
    """
    told: list[str] = []
    trainer, checkpoints = opened(case, folder, told=told, **how)
    checkpoints.load()
    losses = []
    while trainer.done < until:
        before(checkpoints)
        losses.append(trainer.step(*own_rows(trainer, trainer.done)).loss)
        if trainer.done == until or (every and trainer.done % every == 0):
            checkpoints.save()
    checkpoints.wait()
    return losses, told


def losses_of(case, folder, **how):
    """The losses of a session on all its ranks."""
    return run_ranks(case.layout.mesh.num_ranks, lambda _: session(case, folder, **how)[0])[0]


@dataclass
class Kills:
    """What a run went through. ``torn``: kills that left a checkpoint half written; ``losses``: of
    every step, as often as it was done; ``repeated``: most steps done again after one kill.
    """

    kills: int = 0
    torn: int = 0
    repeated: int = 0
    taken_up: list[int] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)


def killed(folder: Path, *, kills: int, seed: int) -> Kills:
    """Train, saving after every step, and kill ranks at random moments: all or one, in the middle
    of a start, a step or a save. Each start must take up the last whole checkpoint.
    """
    found, chance, log, shelf = Kills(), random.Random(seed), folder / "log", Shelf(folder)
    log.touch()
    for _ in range(kills):
        before = shelf.steps[:1]
        expected = max(before, default=0)
        seen = log.stat().st_size
        children = start_ranks(2, lambda rank: _train_forever(rank, folder, log))
        steps = 2 if chance.random() < 0.8 else 0  # none: it may be while it starts
        saved = bool(steps) and chance.random() < 0.5  # else it may be before the first is whole
        until = time.monotonic() + LIMIT_S
        while log.read_bytes()[seen:].count(b"\n") < steps or (saved and shelf.steps[:1] == before):
            assert time.monotonic() < until, "no step was done, or none saved"
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.6))
        victims = list(children.values())
        if chance.random() < 0.5:
            os.kill(victims[chance.randrange(2)], signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.1))  # the other one goes on for a moment
        kill_ranks(children)
        found.kills += 1
        found.torn += any(folder.glob("step-*.part"))
        _check_whole(shelf)
        _read(log, seen, expected, shelf, found)
    return found


def _train_forever(rank: int, folder: Path, log: Path) -> None:
    trainer, checkpoints = opened(KILLED, folder, steps=FOREVER)
    checkpoints.load()
    with log.open("a") as lines:

        def tell(*what: object) -> None:
            if rank == 0:
                lines.write(json.dumps(what) + "\n")
                lines.flush()

        tell("from", trainer.done)
        while True:
            result = trainer.step(*own_rows(trainer, trainer.done))
            tell(trainer.done - 1, result.loss)
            checkpoints.save()


def _check_whole(shelf: Shelf) -> None:
    """Every checkpoint that seems whole is."""
    for step in shelf.steps:
        for name, facts in shelf.manifest(step).files.items():
            facts.verify(shelf.path(step) / name)


def _read(log: Path, seen: int, expected: int, shelf: Shelf, found: Kills) -> None:
    """Lines of the last start."""
    steps = []
    for line in log.read_bytes()[seen:].decode().splitlines():
        step, value = json.loads(line)
        if step == "from":
            assert value == expected, f"went on from {value}, not {expected}"
            found.taken_up.append(value)
        else:
            steps.append(step)
            found.losses.append((step, value))
    done = max(steps, default=-1) + 1
    if done:
        found.repeated = max(found.repeated, done - max(shelf.steps, default=0))


def uninterrupted(folder: Path, until: int) -> list[float]:
    """Losses of the same run, in peace."""

    def rank(_: int) -> list[float]:
        trainer, _checkpoints = opened(KILLED, folder, steps=FOREVER)
        return [trainer.step(*own_rows(trainer, step)).loss for step in range(until)]

    return run_ranks(2, rank)[0]


def main() -> None:
    """Kill, then compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = killed(Path(place), kills=own.kills, seed=own.seed)
        last = max(step for step, _ in found.losses)
        reference = uninterrupted(Path(place) / "none", last + 1)
        off = max(abs(loss / reference[step] - 1) for step, loss in found.losses)
    sys.stdout.write(
        f"{found.kills} kills, {found.torn} of them in the middle of a save; {last + 1} steps, at "
        f"most {found.repeated} done again after a kill; every start took up the last whole "
        f"checkpoint; losses within {off:.1e} of a run in peace\n"
    )


if __name__ == "__main__":
    main()
