"""Files that are written: whole or not at all, and never over another without leave."""

from __future__ import annotations

import os
from pathlib import Path

from profiles.errors import InputError, Problem

__all__ = ["refuse_to_overwrite", "save_text"]


def save_text(text: str, path: str | Path, *, force: bool = False) -> None:
    """Write a file. Raises ``InputError`` where it cannot be written."""
    refuse_to_overwrite(path, force=force)
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(target)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise InputError(_unwritable(target, str(error.strerror))) from None


def refuse_to_overwrite(path: str | Path, *, force: bool = False) -> None:
    """Raise ``InputError`` where a file cannot be written, before any time is spent on it."""
    target = Path(path)
    if target.is_dir():
        raise InputError(_unwritable(target, "is a folder"))
    if target.exists() and not force:
        hint = "--force overwrites it"
        raise InputError(Problem(where=str(target), message="the file exists", hint=hint))
    if not target.parent.is_dir():
        raise InputError(_unwritable(target, f"there is no folder {target.parent}"))
    if not os.access(target.parent, os.W_OK):
        raise InputError(_unwritable(target, f"the folder {target.parent} is read-only"))


def _unwritable(target: Path, reason: str) -> Problem:
    return Problem(
        where=str(target),
        message=f"cannot be written: {reason}",
        expected="a file in a folder that you may write to",
        hint="-o - prints it",
    )
