"""Checkpoints on disk: which of them are whole, and how one becomes so.

A checkpoint is written into ``step-N.part`` and renamed to ``step-N`` once its files, and the
manifest with their sizes and SHA-256, are on the disk. So ``step-N`` is whole whenever it exists,
unless the disk has damaged it, which the manifest shows. Read and checked without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Damaged", "FileFacts", "Manifest", "Shelf"]

FORMAT: Final = 1
KIND: Final = "parplan-checkpoint"
MANIFEST: Final = "checkpoint.json"
PART, DAMAGED = ".part", ".damaged"  # not yet whole; no longer
DIGITS: Final = 8


class Damaged(Exception):  # noqa: N818 - no error of the run, which has older checkpoints
    """A checkpoint that has lost something since it was whole; says what."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and SHA-256 (as ``sha256sum`` prints it) of a file, as it was written."""

    size: int
    sha256: str

    def verify(self, path: Path) -> None:
        """Raise ``Damaged`` where the file has become another."""
        try:
            size = path.stat().st_size
            if size != self.size:
                raise Damaged(f"{path.name} has {size:,} bytes instead of {self.size:,}")
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise Damaged(f"{path.name} is missing") from None
        except OSError as error:
            raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
        if found != self.sha256:
            raise Damaged(f"{path.name} is not what was written: its SHA-256 differs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself. ``step``: steps done. ``run``: of what run."""

    step: int
    run: dict[str, Any]
    files: dict[str, FileFacts]

    def text(self) -> str:
        """As JSON, with a digest of its own."""
        files = {
            name: {"bytes": each.size, "sha256": each.sha256}
            for name, each in sorted(self.files.items())
        }
        body = {"kind": KIND, "format": FORMAT, "step": self.step, "run": self.run, "files": files}
        return json.dumps({**body, "sha256": digest_of(body)}, indent=2) + "\n"


def digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _parsed(path: Path) -> Manifest:
    """A manifest. Raises ``Damaged``, or ``InputError`` for that of a newer parplan."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        digest = body.pop("sha256")
        if digest != digest_of(body):
            raise Damaged(f"{MANIFEST} is not what was written: its SHA-256 differs")
        if body["format"] <= FORMAT:
            files = {n: FileFacts(own["bytes"], own["sha256"]) for n, own in body["files"].items()}
            return Manifest(step=body["step"], run=body["run"], files=files)
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{MANIFEST} is no manifest of a checkpoint") from None
    message = f"was written by a newer parplan: format {body['format']}, this one reads {FORMAT}"
    hint = "update parplan, or begin anew with another --out"
    raise InputError(Problem(where=str(path), message=message, hint=hint))


class Shelf:
    """The folder of a run's checkpoints. One process changes it: rank 0."""

    def __init__(self, folder: Path) -> None:
        """It need not exist yet."""
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where the whole checkpoint of a step is."""
        return self.folder / f"step-{step:0{DIGITS}d}"

    def part(self, step: int) -> Path:
        """Where it is until it is whole."""
        return self.path(step).with_suffix(PART)

    @property
    def steps(self) -> list[int]:
        """Of the whole checkpoints, the latest first."""
        names = (path.name.partition("-")[2] for path in self.folder.glob("step-*"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint says of itself; its files are not read.

        Raises ``Damaged``, or ``InputError`` where it is of a newer version.
        """
        return _parsed(self.path(step) / MANIFEST)

    def latest(self) -> Manifest | None:
        """The latest one whose manifest can be read. Raises ``InputError`` as ``manifest``."""
        for step in self.steps:
            try:
                return self.manifest(step)
            except Damaged:
                continue  # the ranks tell it
        return None

    def complete(self, manifest: Manifest, *, keep: int) -> None:
        """Make the files of ``part`` a whole checkpoint; of the older ones ``keep - 1`` stay."""
        part = self.part(manifest.step)
        with (part / MANIFEST).open("w", encoding="utf-8", newline="\n") as file:
            file.write(manifest.text())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(part)
        part.rename(self.path(manifest.step))
        sync_folder(self.folder)
        older = [step for step in self.steps if step < manifest.step]
        for step in older[keep - 1 :]:
            self.discard(step)

    def discard(self, step: int) -> None:
        """Remove a checkpoint; it stops being whole before its files go."""
        with suppress(OSError):  # it is part already, or the disk lets nothing go
            self.path(step).rename(self.part(step))
        shutil.rmtree(self.part(step), ignore_errors=True)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that nobody takes it for a whole one."""
        aside = self.path(step).with_suffix(DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        return self.path(step).rename(aside)

    def sweep(self) -> None:
        """Remove what saves that were cut off have left."""
        for path in self.folder.glob(f"step-*{PART}"):
            shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Names too are only safe once they are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
