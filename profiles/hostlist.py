"""Slurm's hostlists: ``n[0-7,9],login1`` -> names."""

from __future__ import annotations

import re
from itertools import product
from typing import Final

__all__ = ["HostlistError", "expanded"]

MOST: Final = 1_000_000
_NAME: Final = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_RANGE: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class HostlistError(Exception):
    """What is wrong with a hostlist."""


def expanded(text: str) -> list[str]:
    """Every name of a hostlist, in order."""
    names: list[str] = []
    end = 0
    while end < len(text):
        found = _NAME.match(text, end)
        if found is None or (found.end() < len(text) and text[found.end()] != ","):
            raise HostlistError(f"{text[end : end + 40]!r}")
        parts = [_part(part) for part in re.split(r"(\[[^\]]*\])", found[0]) if part]
        total = len(names)
        for part in parts:
            total = max(total, 1) * len(part)
        if total > MOST:
            raise HostlistError(f"more than {MOST:,} names in {found[0][:40]!r}")
        names += ["".join(each) for each in product(*parts)]
        end = found.end() + 1
    return names


def _part(part: str) -> list[str]:
    """A fixed piece, or the numbers of a bracket with their leading zeros."""
    if not part.startswith("["):
        return [part]
    numbers: list[str] = []
    for piece in part[1:-1].split(","):
        form = _RANGE.fullmatch(piece)
        if form is None:
            raise HostlistError(f"{piece!r} in {part[:40]!r}")
        first, last = int(form[1]), int(form[2] or form[1])
        if not 0 <= last - first < MOST:
            raise HostlistError(f"the range {piece!r}")
        numbers += [str(number).zfill(len(form[1])) for number in range(first, last + 1)]
    return numbers
