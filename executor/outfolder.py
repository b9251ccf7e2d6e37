"""One job at a time in a folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

__all__ = ["check_free", "claim", "make"]

LOCK: Final = "lock"


def make(folder: Path) -> None:
    """Make a folder. Raises ``InputError`` where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message, expected = f"cannot be made: {error.strerror}", "a folder that you may write to"
        raise InputError(
            Problem(where=f"--out {folder}", message=message, expected=expected)
        ) from None


def claim(out: Path) -> TextIO:
    """Keep ``out`` for this process as long as the file that is returned is open; the kernel gives
    it back however the process ends. Raises ``InputError`` where another process has it.

    A file system without such locks promises nothing.
    """
    make(out)
    file = _locked(out)
    with suppress(OSError):  # a full disk: the lock holds without its words
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    return file


def check_free(out: Path) -> None:
    """Raise ``InputError`` where another process has ``out``; nothing is written."""
    if (out / LOCK).exists():
        _locked(out).close()


def _locked(out: Path) -> TextIO:
    import fcntl  # noqa: PLC0415 - not on Windows, where nothing is launched

    file = (out / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        message = f"another launch writes there: {file.read().strip() or 'of an unknown process'}"
        file.close()
        hint = "wait until it ends, or name another folder"
        raise InputError(Problem(where=f"--out {out}", message=message, hint=hint)) from None
    except OSError:  # a file system without locks
        pass
    return file
