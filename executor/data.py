"""Training data: sequences by number, the same whatever the layout.

A folder holds text (``*.txt``: bytes are tokens) or tokens (``*.npy`` of one dim, ``*.bin`` of
little-endian 16-bit ones). Files are mapped into memory, never read whole.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from executor.job import SYNTHETIC
from executor.models.parameters import counted_words
from profiles.errors import InputError, Problem
from profiles.layers import Embedding

if TYPE_CHECKING:
    from torch import Tensor

    from executor.job import Job
    from planner.plan import Plan

__all__ = ["Sequences", "data_of", "open_data"]

BYTES: Final = 256  # tokens of text
STRIDES: Final = 8
KINDS: Final = (".txt", ".npy", ".bin")


class Sequences(Protocol):
    """Numbered sequences of ``seq_len + 1`` tokens, of which the last is only a target."""

    def rows(self, first: int, count: int) -> Tensor:
        """Sequences ``first`` .. ``first + count - 1``: (count, seq_len + 1), int64."""

    @property
    def identity(self) -> str:
        """Says which data it is: the same of the same sequences, wherever they lie."""


def data_of(plan: Plan, job: Job) -> Sequences:
    """The data of all steps of a job. Raises ``InputError`` as ``open_data``."""
    training, first = plan.inputs.training, plan.inputs.model.layers[0]
    assert isinstance(first, Embedding)
    return open_data(
        job.data,
        vocab=first.vocab,
        seq_len=training.seq_len,
        sequences=job.steps * training.global_batch,
        seed=job.recipe.seed,
    )


def open_data(data: str, *, vocab: int, seq_len: int, sequences: int, seed: int) -> Sequences:
    """The data of a run of so many ``sequences``. Raises ``InputError`` where a folder has not
    enough, or tokens that the model does not know.
    """
    if data == SYNTHETIC:
        return Synthetic(vocab, seq_len, seed)
    files = _files(Path(data))
    found = Folder(files, seq_len, seed)
    problems = []
    if len(found) < sequences:
        message = f"has {len(found):,} sequences of {seq_len} tokens, the run needs {sequences:,}"
        problems.append(Problem(where=data, message=message, hint="fewer --steps, or more data"))
    greatest, where = max((file.greatest, str(file.path)) for file in files)
    if greatest >= vocab:
        message = f"has token {greatest}, the model knows those below {vocab}"
        problems.append(Problem(where=where, message=message))
    if problems:
        raise InputError(problems)
    return found


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Sequences that count up, each from a start and in a stride of its own: there is something to
    learn, and no end.
    """

    vocab: int
    seq_len: int
    seed: int

    def rows(self, first: int, count: int) -> Tensor:
        """See ``Sequences``."""
        words = counted_words(torch.arange(first, first + count), self.seed)
        starts, strides = (words >> 8) & 0xFFFFFFFF, (words & 0xFF) % STRIDES + 1
        places = torch.arange(self.seq_len + 1)
        return (starts[:, None] + strides[:, None] * places) % self.vocab

    @property
    def identity(self) -> str:
        """See ``Sequences``."""
        return SYNTHETIC


@dataclass(frozen=True)
class _File:
    path: Path

    @cached_property
    def tokens(self) -> Any:
        """All tokens, mapped."""
        if self.path.suffix == ".npy":
            return np.load(self.path, mmap_mode="r")
        dtype = np.uint8 if self.path.suffix == ".txt" else np.dtype("<u2")
        return np.memmap(self.path, dtype, mode="r")

    @cached_property
    def greatest(self) -> int:
        """The greatest token; for text, of all that may stand in it."""
        return BYTES - 1 if self.path.suffix == ".txt" else int(self.tokens.max())


def _files(folder: Path) -> list[_File]:
    if not folder.is_dir():
        expected = f"{SYNTHETIC}, or a folder"
        raise InputError(Problem(where="--data", message=f"no folder {folder}", expected=expected))
    paths = sorted(path for path in folder.iterdir() if path.suffix in KINDS)
    files = [_File(path) for path in paths if path.stat().st_size]
    if not files:
        expected = f"files {', '.join('*' + kind for kind in KINDS)}"
        raise InputError(Problem(where=str(folder), message="has no data", expected=expected))
    problems = [
        Problem(where=str(file.path), message="is no list of whole numbers")
        for file in files
        if file.tokens.ndim != 1 or file.tokens.dtype.kind not in "iu"
    ]
    if problems:
        raise InputError(problems)
    return files


class Folder:
    """The sequences of some files, shuffled once. None crosses the end of its file."""

    def __init__(self, files: list[_File], seq_len: int, seed: int) -> None:
        """Sequences overlap by the token that is one's last target and the next one's first."""
        self.files, self.seq_len = files, seq_len
        counts = [max(0, (len(file.tokens) - 1) // seq_len) for file in files]
        self.stops = np.cumsum(counts)
        self.order = np.random.default_rng(seed).permutation(int(self.stops[-1]))

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, first: int, count: int) -> Tensor:
        """See ``Sequences``."""
        return torch.stack([self._row(int(each)) for each in self.order[first : first + count]])

    @property
    def identity(self) -> str:
        """See ``Sequences``. By names and lengths: reading all tokens would take long."""
        shapes = [f"{file.path.name}:{len(file.tokens)}" for file in self.files]
        digest = zlib.crc32(" ".join(shapes).encode())
        return f"of {len(self):,} sequences in {len(self.files)} files ({digest:08x})"

    def _row(self, number: int) -> Tensor:
        index = int(np.searchsorted(self.stops, number, side="right"))
        before = int(self.stops[index - 1]) if index else 0
        start = (number - before) * self.seq_len
        part = self.files[index].tokens[start : start + self.seq_len + 1]
        return torch.from_numpy(part.astype(np.int64))
