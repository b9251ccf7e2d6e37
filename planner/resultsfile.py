"""A file of outcomes, one line of JSON each, that grows as a sweep goes on.

A sweep that is killed leaves at most its last line unfinished; the next one drops that line, takes
up the others and goes on.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from planner.whatif import Outcome
from profiles.errors import InputError, Problem
from profiles.yamlfile import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["kept", "read_outcomes"]

KEYS = {field.name for field in fields(Outcome)}


def read_outcomes(path: str | Path) -> dict[str, Outcome]:
    """The outcomes of a file by key, none if there is no file. An unfinished last line is left out.

    Raises ``InputError`` where a line is something else, so that no other file is written to.
    """
    if not Path(path).exists():
        return {}
    *lines, unfinished = read_text(path).split("\n")
    found = [_outcome(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    if not lines and unfinished and not unfinished.startswith('{"changes": '):
        raise InputError(_other(f"{path}:1"))
    return {each.key: each for each in found}


def kept(outcomes: Iterable[Outcome], path: str | Path) -> Iterator[Outcome]:
    """The outcomes as they come, each of them a line of the file before it is handed on.

    Raises ``InputError`` where the file cannot be written.
    """
    known = read_outcomes(path)
    try:
        with Path(path).open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{own.line()}\n" for own in known.values())
            file.flush()
            for outcome in outcomes:
                if outcome.key not in known:
                    file.write(f"{outcome.line()}\n")
                    file.flush()
                yield outcome
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise InputError(Problem(where=str(path), message=message)) from None


def _outcome(line: str, where: str) -> Outcome:
    try:
        data = json.loads(line)
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.keys() != KEYS:
        raise InputError(_other(where))
    return Outcome(**data)


def _other(where: str) -> Problem:
    message, hint = "this line is no outcome of parplan whatif", "--results names another file"
    return Problem(where=where, message=message, expected="a file of outcomes", hint=hint)
