"""Profiles of Hetu-Galvatron (JSON) -> a Profile.

The kind of a file is told by its keys, so any name will do; the name says on which model or
cluster its figures were taken. Galvatron's units: milliseconds (of one sample, in computation
files), MiB ("MB"), MB/ms of bus bandwidth, which is 1e9 bytes/s. Rows of whole runs
(``layernum...``, and those of memory by rank), from which Galvatron derives its layer rows, are
left out and counted in a note.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from profiles import jsonfile
from profiles.errors import InputError, Problem
from profiles.fileschema import problem_at
from profiles.measured import (
    ENDS,
    Bandwidth,
    CollectiveTime,
    EndsMemory,
    LayerMemory,
    LayerTime,
    Operation,
    Overlap,
    Position,
    Profile,
)
from profiles.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from profiles.yamlfile import Document, Mark, Place

__all__ = ["read_galvatron"]

GREATEST: Final = 1e12  # beyond it a number is a slip of the pen, whatever its unit
MB_PER_MS: Final = 1e9
POSITIONS: Final = {"off": Position.ONLY, "on_first": Position.FIRST, "on_last": Position.LAST}
TIME: Final = re.compile(r"layertype_(?:(\d{1,4})|other(?:_\d{1,4})?)_bsz(\d{1,6})_seq(\S{1,200})")
LAYER: Final = re.compile(r"layertype_(\d{1,4})(_sp)?")
OTHER: Final = re.compile(r"other_memory_pp_(off|on_first|on_last)(_sp)?")
ALL_REDUCE: Final = re.compile(r"allreduce_size_(\d{1,6})_consec_([01])")
P2P: Final = re.compile(r"pp_size_(\d{1,6})")
COLLECTIVE: Final = re.compile(r"(allreduce|all2all)_size_(\d{1,6})_(\d{1,6})MB_time")
DERIVED: Final = re.compile(r"layernum.*|\d+_\d+_\d+(_vtp)?(_c)?(_sp)?(_c)?")
LENGTHS: Final = re.compile(r"\d{1,9}|\[\d{1,9}(,\d{1,9})*\]|\d{1,9}(_\d{1,9})+")


def read_galvatron(paths: list[Path], name: str, source: str) -> tuple[Profile, list[str]]:
    """The files as one profile, with notes. A folder stands for its ``*.json``.

    Raises ``InputError`` with every problem of every file.
    """
    files = [file for path in paths for file in _files(path)]
    found: dict[str, list[Any]] = {}
    notes: list[str] = []
    problems: list[Problem] = []
    for path in files:
        try:
            reader = _Reader(jsonfile.read(path), path.stem)
            reader.read()
        except InputError as error:
            problems += error.problems
            continue
        notes += reader.notes()
        for kind, entries in reader.found.items():
            found.setdefault(kind, []).extend(entries)
    if problems:
        raise InputError(problems)
    return Profile(name=name, source=source, **{k: tuple(v) for k, v in found.items()}), notes


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        expected = "Galvatron's profiles: computation, memory, bandwidths, sp_time, overlap"
        message = "the folder has no *.json"
        raise InputError(Problem(where=str(path), message=message, expected=expected))
    return files


class _Reader:
    """One file: what was found, by the name of its field of Profile."""

    def __init__(self, document: Document, stem: str) -> None:
        self.document = document
        self.stem = stem
        self.found: dict[str, list[Any]] = {}
        self.unknown: list[str] = []
        self.derived = 0
        self.problems: list[tuple[Mark, Problem]] = []

    def read(self) -> None:
        """Every key by the first pattern that it follows."""
        patterns: list[tuple[re.Pattern[str], Callable[[re.Match[str], str], None]]] = [
            (TIME, self._time),
            (LAYER, self._layer),
            (OTHER, self._other),
            (ALL_REDUCE, self._all_reduce),
            (P2P, self._p2p),
            (COLLECTIVE, self._collective),
            (re.compile("overlap_coe"), self._overlap),
            (DERIVED, self._derived),
        ]
        for key in self.document.data:
            for pattern, take in patterns:
                match = pattern.fullmatch(key)
                if match is not None:
                    take(match, key)
                    break
            else:
                self.unknown.append(key)
        self.document.raise_problems(self.problems)
        if not self.found and not self.derived:
            expected = "keys of a Galvatron profile, as layertype_0_bsz1_seq2048 or overlap_coe"
            message = "no key of this file is known"
            self.document.raise_problems(
                [problem_at(self.document, (), message, expected=expected)]
            )

    def notes(self) -> list[str]:
        """What was left out."""
        notes = []
        if self.unknown:
            shown = ", ".join(self.unknown[:3]) + (", ..." if len(self.unknown) > 3 else "")  # noqa: PLR2004
            notes.append(f"{self.document.path}: unknown keys left out: {shown}")
        if self.derived:
            notes.append(
                f"{self.document.path}: {self.derived} rows of whole runs left out: "
                "the layer rows are derived from them"
            )
        return notes

    def _time(self, match: re.Match[str], key: str) -> None:
        lengths = self._lengths(match[3], (key,))
        per_sample = self._number((key,), least=0)
        batch = int(match[2])
        if batch < 1:
            self._wrong((key,), "a batch of 0 samples", "bsz1 or more", key=True)
        layer = ENDS if match[1] is None else f"block-{int(match[1])}"
        self._add(
            "layer_times",
            LayerTime(
                model=self.stem,
                layer=layer,
                batch=batch,
                seq_len=lengths,
                forward_s=per_sample * batch * 1e-3,
            ),
        )

    def _layer(self, match: re.Match[str], key: str) -> None:
        for length, place in self._by_length(key):
            values = self._mapping(place, "parameter_size and tp_activation_per_bsz_dict")
            for wanted in {"parameter_size", "tp_activation_per_bsz_dict"} - set(values):
                self._wrong(place, f"{wanted} is missing", "", key=True)
            if not {"parameter_size", "tp_activation_per_bsz_dict"} <= set(values):
                continue
            held = (*place, "tp_activation_per_bsz_dict")
            recomputed = "checkpoint" in self._mapping(held, "bytes by TP degree")
            self._add(
                "layer_memory",
                LayerMemory(
                    model=self.stem,
                    layer=f"block-{int(match[1])}",
                    seq_len=length,
                    sequence_parallel=match[2] is not None,
                    parameter_bytes=self._number((*place, "parameter_size")) * MIB,
                    activation_bytes=self._by_degree(held),
                    recomputed_bytes=(
                        self._number((*held, "checkpoint")) * MIB if recomputed else None
                    ),
                ),
            )

    def _other(self, match: re.Match[str], key: str) -> None:
        for length, place in self._by_length(key):
            self._add(
                "ends_memory",
                EndsMemory(
                    model=self.stem,
                    position=POSITIONS[match[1]],
                    seq_len=length,
                    sequence_parallel=match[2] is not None,
                    state_bytes=self._by_degree((*place, "model_states")),
                    activation_bytes=self._by_degree((*place, "activation")),
                ),
            )

    def _all_reduce(self, match: re.Match[str], key: str) -> None:
        self._bandwidth(key, Operation.ALL_REDUCE, int(match[1]), neighbours=match[2] == "1")

    def _p2p(self, match: re.Match[str], key: str) -> None:
        self._bandwidth(key, Operation.P2P, int(match[1]), neighbours=None)

    def _bandwidth(
        self, key: str, operation: Operation, group: int, *, neighbours: bool | None
    ) -> None:
        rate = self._number((key,), least=1e-9)
        self._add(
            "bandwidths",
            Bandwidth(
                cluster=self.stem,
                operation=operation,
                group=group,
                neighbours=neighbours,
                bytes_per_s=rate * MB_PER_MS,
            ),
        )

    def _collective(self, match: re.Match[str], key: str) -> None:
        operation = Operation.ALL_REDUCE if match[1] == "allreduce" else Operation.ALL_TO_ALL
        self._add(
            "collective_times",
            CollectiveTime(
                cluster=self.stem,
                operation=operation,
                group=int(match[2]),
                num_bytes=int(match[3]) * MIB,
                seconds=self._number((key,)) * 1e-3,
            ),
        )

    def _overlap(self, _match: re.Match[str], key: str) -> None:
        slowdown = self._number((key,), least=1)
        self._add("overlaps", Overlap(cluster=self.stem, slowdown=slowdown))

    def _derived(self, _match: re.Match[str], key: str) -> None:
        self.derived += len(value) if isinstance(value := self.document.data[key], dict) else 1

    def _add(self, kind: str, entry: Any) -> None:
        self.found.setdefault(kind, []).append(entry)

    def _by_length(self, key: str) -> list[tuple[tuple[int, ...], Place]]:
        places: list[Place] = [(key, each) for each in self._mapping((key,), "sequence lengths")]
        return [(self._lengths(str(place[-1]), place), place) for place in places]

    def _lengths(self, text: str, place: Place) -> tuple[int, ...]:
        if not LENGTHS.fullmatch(text):
            self._wrong(place, f"the sequence length {text!r}", "as 2048 or [512,512]", key=True)
            return (0,)
        return tuple(int(part) for part in re.split("[,_]", text.strip("[]")))

    def _by_degree(self, place: Place) -> dict[int, float]:
        found = {}
        for degree in self._mapping(place, "MiB by TP degree"):
            if degree == "checkpoint":
                continue
            if not re.fullmatch(r"[1-9]\d{0,5}", degree):
                self._wrong((*place, degree), f"the degree {degree!r}", "1, 2, 4, ...", key=True)
                continue
            found[int(degree)] = self._number((*place, degree)) * MIB
        return found

    def _mapping(self, place: Place, expected: str) -> dict[str, Any]:
        value = self._at(place)
        if not isinstance(value, dict) or not value:
            got = "missing" if value is None else "empty" if value == {} else "no object"
            self._wrong(place, f"{place[-1]} is {got}", f"an object with {expected}")
            return {}
        return value

    def _number(self, place: Place, *, least: float = 0) -> float:
        value = self._at(place)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not least <= value <= GREATEST:
            expected = f"a number from {least:g} to {GREATEST:g}"
            got = self.document.got(place, value)
            self._wrong(place, f"{place[-1]} is {got}", expected)
            return 1.0
        return float(value)

    def _at(self, place: Place) -> Any:
        value: Any = self.document.data
        for part in place:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _wrong(self, place: Place, message: str, expected: str, *, key: bool = False) -> None:
        self.problems.append(problem_at(self.document, place, message, expected=expected, key=key))
