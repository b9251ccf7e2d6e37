"""One rank of a job: ``python -m executor.worker PLAN ...``, started by torchrun.

It reads RANK, WORLD_SIZE and LOCAL_RANK, trains, and rank 0 writes the record.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from executor.job import CHECKPOINT_EVERY, DEVICES, KEEP, RECIPE, Job, Recipe
from executor.rank import run_rank

__all__ = ["main"]


def parse(arguments: list[str]) -> Job:
    """The job of a command line, as ``Job.arguments`` writes it."""
    usual = Recipe()
    parser = argparse.ArgumentParser(prog="python -m executor.worker")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--checkpoint-every", type=int, default=CHECKPOINT_EVERY)
    parser.add_argument("--keep", type=int, default=KEEP)
    parser.add_argument("--stop-at", type=int)
    parser.add_argument("--compile", action="store_true", dest="compiles")
    for name in RECIPE:
        value = getattr(usual, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    own = vars(parser.parse_args(arguments))
    recipe = Recipe(**{name: own.pop(name) for name in RECIPE})
    return Job(recipe=recipe, **own)


def main() -> None:
    """Run this rank."""
    job = parse(sys.argv[1:])

    def work() -> None:
        from executor.train import train  # noqa: PLC0415 - its errors are this rank's too

        train(job)

    run_rank(work, job.out)


if __name__ == "__main__":
    main()
