"""How long training goes on: epochs by global batch, and the file that says so (``kind: target``).

How many epochs a batch needs to reach a target is what the user has measured or believes; larger
batches need more of them (Pal et al., IEEE Micro 2019; Shallue et al., JMLR 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from profiles import yamlfile
from profiles.fileschema import FileSchema, Version, problem_at, validate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Target", "TargetFile", "load_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``samples`` of the data set, and the epochs that each global batch needs; between those
    given, epochs are interpolated, beyond them they are not known.
    """

    samples: int
    epochs: Mapping[int, float]

    def steps(self, global_batch: int) -> float:
        """Steps to the target. Raises ValueError beyond the table."""
        return self.epochs_at(global_batch) * self.samples / global_batch

    def epochs_at(self, global_batch: int) -> float:
        """Epochs by straight lines between the table's batches."""
        table = sorted(self.epochs.items())
        for (low, below), (high, above) in pairwise(table):
            if low <= global_batch <= high:
                return below + (above - below) * (global_batch - low) / (high - low)
        if global_batch in self.epochs:
            return self.epochs[global_batch]
        raise ValueError(f"epochs are given for batches from {table[0][0]} to {table[-1][0]}")


class BatchFile(FileSchema):
    """What one global batch needs to reach the target: epochs or steps."""

    global_batch: int = Field(ge=1, le=10**9, description="Sequences a step.")
    epochs: float | None = Field(None, gt=0, le=1e9, description="Passes over all samples.")
    steps: int | None = Field(None, ge=1, le=10**12, description="Instead of epochs.")


class TargetFile(FileSchema):
    """How long training goes on at each global batch."""

    schema_version: Version
    kind: Literal["target"]
    samples: int = Field(ge=1, le=10**15, description="Sequences of the data set.")
    batches: list[BatchFile] = Field(min_length=1, max_length=100)


def load_target(path: str | Path) -> Target:
    """The target of a file. Raises ``InputError`` with every problem of it."""
    document = yamlfile.read(path)
    file = validate(document, TargetFile)
    problems, epochs = [], dict[int, float]()
    for at, own in enumerate(file.batches):
        place = ("batches", at)
        if (own.epochs is None) == (own.steps is None):
            got = "neither epochs nor steps" if own.epochs is None else "epochs and steps"
            problems.append(problem_at(document, place, got, expected="one of the two"))
        if own.global_batch in epochs:
            message = f"the global batch {own.global_batch} stands twice"
            problems.append(problem_at(document, (*place, "global_batch"), message))
        from_steps = (own.steps or 0) * own.global_batch / file.samples
        epochs[own.global_batch] = own.epochs or from_steps
    document.raise_problems(problems)
    return Target(samples=file.samples, epochs=epochs)
