"""The matrix that ``nvidia-smi topo -m`` prints -> NodeWiring.

A row of names (GPU0, GPU1, NIC0 or mlx5_0, ..., CPU Affinity, ...), then a row for each of them
with a word a column: X itself, NV# that many NVLinks, PIX one PCIe switch, PXB several, PHB a
host bridge, NODE or SYS (SOC in old drivers) farther. The columns after the last device differ
between drivers and are not read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from profiles.errors import InputError, Problem
from profiles.wiring import NodeWiring

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["is_topo_matrix", "read_topo_matrix"]

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_HEAD: Final = re.compile(r"\s*GPU0(\s|$)")
_GPU: Final = re.compile(r"GPU\d+")
_LINK: Final = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
_NEAR: Final = ("PIX", "PXB")
_LINKS: Final = "X, NV#, PIX, PXB, PHB, NODE or SYS"
_MOST: Final = 1024


def is_topo_matrix(text: str) -> bool:
    """Whether some line heads such a matrix."""
    return any(_HEAD.match(_COLOUR.sub("", line)) for line in text.splitlines())


def read_topo_matrix(text: str, path: str) -> NodeWiring:
    """The node. Raises ``InputError`` with the line that is not as it should be."""
    lines = [_COLOUR.sub("", line) for line in text.splitlines()]
    head = next(number for number, line in enumerate(lines) if _HEAD.match(line))
    names = _names(lines[head])
    gpus = [name for name in names if _GPU.fullmatch(name)]
    if len(gpus) > _MOST or gpus != [f"GPU{number}" for number in range(len(gpus))]:
        raise _wrong(path, head, "the columns of GPUs", f"GPU0, GPU1, ... (at most {_MOST})")
    rows = {}
    for number, line in enumerate(lines[head + 1 :], head + 1):
        name, *words = line.split() or [""]
        if _GPU.fullmatch(name) and name not in names:
            raise _wrong(path, number, f"a row {name} without a column", "a square of GPUs")
        if name in names and name not in rows:
            rows[name] = _row(path, number, name, words, len(names))
    missing = [name for name in gpus if name not in rows]
    if missing:
        raise _wrong(path, head, f"no row {missing[0]}", "a row for every GPU of the first line")
    _check_symmetric(path, head, gpus, rows)
    nvlinks = tuple(
        tuple(int(word[2:]) if word.startswith("NV") else 0 for word in rows[gpu][: len(gpus)])
        for gpu in gpus
    )
    nics, note = _nics(names[len(gpus) :], [rows[gpu][len(gpus) :] for gpu in gpus])
    return NodeWiring(
        where=f"{path}:{head + 1}",
        nvlinks=nvlinks,
        switch_links=(0,) * len(gpus),
        num_nics=nics,
        notes=note,
    )


def _names(line: str) -> list[str]:
    """The devices of the first line: what stands before the columns of affinities."""
    return re.split(r"\s+(?:CPU|NUMA|GPU) (?:Affinity|NUMA)", line)[0].split()


def _row(path: str, number: int, name: str, words: list[str], size: int) -> list[str]:
    for place, word in enumerate(words[:size]):
        if not _LINK.fullmatch(word):
            raise _wrong(path, number, f"{word!r} in column {place + 1} of {name}", _LINKS)
    if len(words) < size:
        raise _wrong(path, number, f"{len(words)} columns in the row {name}", f"{size}")
    return words[:size]


def _check_symmetric(path: str, head: int, gpus: list[str], rows: dict[str, list[str]]) -> None:
    for one, gpu in enumerate(gpus):
        for two, other in enumerate(gpus):
            here, there = rows[gpu][two], rows[other][one]
            if here != there or (here == "X") != (one == two):
                message = f"{gpu} to {other} is {here}, {other} to {gpu} is {there}"
                raise _wrong(path, head, message, "the same both ways, X to itself alone")


def _nics(names: list[str], rows: list[list[str]]) -> tuple[int, tuple[str, ...]]:
    """NICs for GPUs: those that share a PCIe switch with one, if any do; else all."""
    columns: Iterable[tuple[str, ...]] = zip(*rows, strict=True)
    near = [
        name
        for name, column in zip(names, columns, strict=True)
        if any(word in _NEAR for word in column)
    ]
    used = near or names
    if len(used) == len(names):
        return len(names), ()
    note = f"{len(used)} of {len(names)} NICs share a PCIe switch with a GPU: only they are counted"
    return len(used), (note,)


def _wrong(path: str, number: int, message: str, expected: str) -> InputError:
    return InputError(Problem(where=f"{path}:{number + 1}", message=message, expected=expected))
