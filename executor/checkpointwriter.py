"""Writes a checkpoint by ``torch.distributed.checkpoint``: every rank its file, rank 0 the rest."""

from __future__ import annotations

import hashlib
import io
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from executor.checkpointfiles import FileFacts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.futures import Future

    from executor.checkpointfiles import Manifest, Shelf

__all__ = ["CheckpointWriter"]


class DigestedFile(io.BufferedWriter):
    """A file that knows the SHA-256 of what was written to it, and what went wrong first."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append. An error goes through torch's C++, which would tell another."""
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise


class _DigestedFiles(FileSystem):
    """The file system, where facts of all files that are written are kept."""

    def __init__(self) -> None:
        self.facts: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file. Raises the ``OSError`` that was first."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = DigestedFile(path)
        try:
            yield file
            file.close()
        except (OSError, RuntimeError):  # torch's C++ makes the one the other
            if file.error is not None:
                raise file.error from None
            raise
        finally:
            file.raw.close()
        self.facts[path.name.removesuffix(".tmp")] = FileFacts(file.size, file.digest.hexdigest())


@dataclass(frozen=True)
class _Written(WriteResult):
    """What a rank tells of an item; with the first, the facts of its files."""

    facts: dict[str, FileFacts]


class CheckpointWriter(FileSystemWriter):
    """Into the part folder of a step; whole when all ranks have written."""

    def __init__(self, shelf: Shelf, manifest: Manifest, *, keep: int) -> None:
        """``manifest``: without files. Of all checkpoints, ``keep`` stay."""
        super().__init__(shelf.part(manifest.step))
        self.fs = self.files = _DigestedFiles()
        self.shelf, self.manifest, self.keep = shelf, manifest, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is this rank's."""

        def with_facts(done: Future[list[WriteResult]]) -> list[WriteResult]:
            facts, written = dict(self.files.facts), done.value()
            return [
                _Written(each.index, each.size_in_bytes, each.storage_data, {} if number else facts)
                for number, each in enumerate(written)
            ]

        return super().write_data(plan, planner).then(with_facts)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all have written: metadata, manifest, the folder's name."""
        super().finish(metadata, results)
        facts = dict(self.files.facts)
        for each in (result for of_rank in results for result in of_rank):
            assert isinstance(each, _Written)
            facts |= each.facts
        self.shelf.complete(replace(self.manifest, files=facts), keep=self.keep)
