"""The shelf of the catalogue: one file an entry, found by its name or by an alias.

A name is the file's name. Aliases stand in the entries on one line, ``aliases: [a, b]``, and are
found by a scan of the text, so that looking up one entry parses no other.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final, Literal

from profiles.errors import InputError, Problem
from profiles.nearest import nearest

__all__ = ["DATA", "Shelf", "find", "names", "names_and_aliases", "nodes_of"]

Shelf = Literal["models", "devices", "nodes", "calibrations"]

DATA: Final = Path(__file__).parent / "data"
_ALIASES: Final = re.compile(r"^aliases: \[(.*)\]$", re.MULTILINE)
_DEVICE: Final = re.compile(r"^device: (\S+)$", re.MULTILINE)


def find(shelf: Shelf, name: str, *, where: str) -> Path:
    """The file of an entry. Raises ``InputError`` with the nearest names."""
    wanted = name.lower()
    if wanted in names(shelf):
        return DATA / shelf / f"{wanted}.yaml"
    target = names_and_aliases(shelf).get(wanted)
    if target is None:
        known = ", ".join(names(shelf))
        raise InputError(
            Problem(
                where=where,
                message=f"there is no {shelf.removesuffix('s')} {name!r}",
                expected=f"one of {known}",
                hint=nearest(name, names_and_aliases(shelf)),
            )
        )
    return DATA / shelf / f"{target}.yaml"


@cache
def names(shelf: Shelf) -> tuple[str, ...]:
    """The names on a shelf, in natural order (2 before 10)."""
    found = (file.stem for file in (DATA / shelf).glob("*.yaml"))
    return tuple(sorted(found, key=_natural))


@cache
def names_and_aliases(shelf: Shelf) -> dict[str, str]:
    """The entry's name by its name and by each of its aliases."""
    known = {name: name for name in names(shelf)}
    for name in names(shelf):
        text = (DATA / shelf / f"{name}.yaml").read_text(encoding="utf-8")
        if line := _ALIASES.search(text):
            known |= {alias.strip(): name for alias in line[1].split(",") if alias.strip()}
    return known


@cache
def nodes_of(device: str) -> tuple[str, ...]:
    """The nodes of a device, in natural order."""
    texts = {name: (DATA / "nodes" / f"{name}.yaml").read_text("utf-8") for name in names("nodes")}
    found = {name: _DEVICE.search(text) for name, text in texts.items()}
    return tuple(name for name, line in found.items() if line and line[1] == device)


def _natural(name: str) -> list[tuple[float, str]]:
    parts = re.findall(r"\d+(?:\.\d+)?|[^\d]+", name)
    return [(float(part), "") if part[0].isdigit() else (-1.0, part) for part in parts]
