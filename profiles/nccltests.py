"""What nccl-tests prints -> measured collectives.

A file is what ``all_reduce_perf`` and its like print, one run or several: a line of settings, the
ranks with their hosts, a header of columns and a row for each size (versions from 2.0 on, with or
without columns for CPU time, iterations and time stamps). ``size`` is the whole tensor as we count
it. Of the out-of-place and the in-place time the lesser counts, and how far apart they are is the
spread; a row whose results were wrong, or whose time is no number, is left out.

Older versions do not say which operation ran. It is then taken from a command line in the file or
the file's name, else from the columns where only one operation has such.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from profiles.devicename import catalogue_device
from profiles.errors import InputError, Problem
from profiles.measured import ClusterFacts, CollectiveTime, Operation, Profile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["read_nccl_tests"]

PROGRAMS: Final = {
    "all_reduce": Operation.ALL_REDUCE,
    "all_gather": Operation.ALL_GATHER,
    "reduce_scatter": Operation.REDUCE_SCATTER,
    "alltoall": Operation.ALL_TO_ALL,
    "sendrecv": Operation.P2P,
}
OTHERS: Final = ("broadcast", "reduce", "gather", "scatter", "hypercube")
PROGRAM: Final = re.compile(rf"\b({'|'.join((*PROGRAMS, *OTHERS))})(?:_perf)?(?:_mpi)?\b")
SETTINGS: Final = re.compile(r"#?\s*nThreads?:?\s*\d+\s+nGpus:?\s*\d+")
RANK: Final = re.compile(
    r"#?\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+"
    r"\[[0-9a-fA-Fx:.]+\]\s+(.+?)\s*$"
)
HEADER: Final = re.compile(r"#?\s*size\s+count\s+type\b.*\btime\b")
ROW: Final = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s")
END: Final = re.compile(r"#?\s*(Out of bounds values|Avg bus bandwidth)")
WRONG: Final = ("#wrong", "error")
TOLERATED: Final = 1e-2  # older versions print the greatest difference, which rounding makes
GREATEST: Final = 10**15
WIDE: Final = 0.25


@dataclass(slots=True)
class _Rank:
    number: int
    group: int
    host: str
    device: str


@dataclass(slots=True)
class _Run:
    """One run in a file, as its lines come."""

    line: int
    ranks: dict[int, _Rank] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    named: str | None = None
    ended: bool = False


def read_nccl_tests(paths: list[Path], name: str, source: str) -> tuple[Profile, list[str]]:
    """The files as one profile, with notes on what was left out. Raises ``InputError`` with every
    problem of every file.
    """
    found: dict[ClusterFacts, list[CollectiveTime]] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    for path in paths:
        reader = _Reader(str(path), path.name)
        try:
            reader.read(_text(path))
        except InputError as error:
            problems += error.problems
            continue
        problems += reader.problems
        notes += reader.notes
        for facts, rows in reader.found:
            found.setdefault(facts, []).extend(rows)
    if problems:
        raise InputError(problems)
    times = tuple(dict.fromkeys(row for rows in found.values() for row in rows))
    return Profile(name=name, source=source, clusters=tuple(found), collective_times=times), notes


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise InputError(Problem(where=str(path), message=message)) from None


class _Reader:
    """One file."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self.found: list[tuple[ClusterFacts, list[CollectiveTime]]] = []
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def read(self, text: str) -> None:
        """Every run. Raises ``InputError`` where there is none."""
        runs = list(_runs(text.splitlines()))
        if not any(run.columns for run in runs):
            message = "no output of nccl-tests is in it"
            expected = "a header of columns: size count type redop root time algbw busbw"
            raise InputError(Problem(where=f"{self.path}:1:1", message=message, expected=expected))
        for run in runs:
            if run.columns:
                self._take(run)

    def _take(self, run: _Run) -> None:
        operation, why_not = self._operation(run)
        if operation is None:
            self._wrong(run.line, *why_not)
            return
        shape = self._shape(run)
        if shape is None:
            return
        facts, group, stride = shape
        if not run.ended:
            self.notes.append(f"{self.path}: ends early, {len(run.rows)} rows are read")
        rows = []
        for number, row in run.rows:
            told = self._row(run, number, row)
            if told is not None:
                size, seconds, spread = told
                rows.append(
                    CollectiveTime(
                        cluster=facts.cluster,
                        operation=operation,
                        group=group,
                        stride=stride,
                        num_bytes=size,
                        seconds=seconds,
                        spread=spread,
                        doubtful=(spread or 0.0) > WIDE,
                    )
                )
        if rows:
            self.found.append((facts, rows))
        else:
            self._wrong(run.line, "no row of this run has a time", "rows below the header")

    def _operation(self, run: _Run) -> tuple[Operation | None, tuple[str, str]]:
        """What ran, or why that is not known."""
        named = run.named or next(iter(PROGRAM.findall(self.name)), None)
        if named in PROGRAMS:
            return PROGRAMS[named], ("", "")
        if named is not None:
            return None, (f"{named} is no operation of training", ", ".join(PROGRAMS))
        if "redop" in run.columns and run.rows:
            redop = run.rows[0][1][run.columns.index("redop")]
            ratio = _ratio(run)
            ranks = max(1, len(run.ranks))
            if redop != "none" and ratio is not None and ranks > 2:  # noqa: PLR2004 - else equal
                reduces = math.isclose(ratio, 2 * (ranks - 1) / ranks, rel_tol=0.03)
                return Operation.ALL_REDUCE if reduces else Operation.REDUCE_SCATTER, ("", "")
        expected = f"its name in the file's: {', '.join(f'{own}.txt' for own in PROGRAMS)}"
        return None, ("does not say which operation ran", expected)

    def _shape(self, run: _Run) -> tuple[ClusterFacts, int, int] | None:
        """The cluster of the ranks, the size of a group, and how far its ranks are apart."""
        ranks = [run.ranks[number] for number in sorted(run.ranks)]
        if [rank.number for rank in ranks] != list(range(len(ranks))) or len(ranks) < 2:  # noqa: PLR2004
            message = f"{len(ranks)} ranks are listed above the columns"
            self._wrong(run.line, message, "a line of each rank from 0 on, at least 2")
            return None
        hosts = list(dict.fromkeys(rank.host for rank in ranks))
        sizes = {sum(rank.host == host for rank in ranks) for host in hosts}
        devices = list(dict.fromkeys(rank.device for rank in ranks))
        if len(sizes) > 1 or len(devices) > 1:
            message = f"{len(hosts)} hosts with {sorted(sizes)} ranks, {', '.join(devices)}"
            self._wrong(run.line, message, "as many ranks on each host, of one device")
            return None
        members = [rank.number for rank in ranks if rank.group == ranks[0].group]
        strides = {after - before for before, after in pairwise(members)}
        if len(members) < 2 or len(strides) > 1 or len(ranks) % len(members):  # noqa: PLR2004
            self._wrong(run.line, f"groups of ranks {members[:8]}", "equal steps between ranks")
            return None
        per_node = sizes.pop()
        device = catalogue_device(devices[0])
        if device is None:
            hint = "add it: docs/how-to/add-a-model-family-or-device.md"
            message = f"the catalogue has no device like {devices[0]!r}"
            self.problems.append(
                Problem(where=f"{self.path}:{run.line}:1", message=message, hint=hint)
            )
            return None
        facts = ClusterFacts(
            cluster=f"{len(hosts)}x{per_node}x{device}",
            device=device,
            num_nodes=len(hosts),
            gpus_per_node=per_node,
            backend="nccl",
            hardware=devices[0],
            method="nccl-tests: the lesser of the out-of-place and in-place means",
        )
        return facts, len(members), strides.pop()

    def _row(self, run: _Run, line: int, row: list[str]) -> tuple[int, float, float | None] | None:
        """Bytes, seconds and spread of a row; None where it has none."""
        times, last = [], line == run.rows[-1][0]
        if len(row) < len(run.columns):
            if last and not run.ended:
                self.notes.append(f"{self.path}:{line}: a cut row is left out")
            else:
                self._wrong(line, f"{len(row)} columns", f"{len(run.columns)}, as in the header")
            return None
        size = int(row[0])
        places = [place for place, column in enumerate(run.columns) if column == "time"]
        for place in places:
            seconds = _microseconds(row[place])
            if seconds is not None and not _is_wrong(run.columns, row, place):
                times.append(seconds * 1e-6)
        if size > GREATEST:
            self._wrong(line, f"{size} bytes", f"at most {GREATEST}")
            return None
        if not size:  # an empty message
            return None
        if not times:
            self.notes.append(f"{self.path}:{line}: no time or wrong results, left out")
            return None
        return size, min(times), float(f"{max(times) / min(times) - 1:.2g}")

    def _wrong(self, line: int, message: str, expected: str) -> None:
        self.problems.append(
            Problem(where=f"{self.path}:{line}:1", message=message, expected=expected)
        )


def _microseconds(text: str) -> float | None:
    """A time that is one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _is_wrong(columns: list[str], row: list[str], place: int) -> bool:
    """Whether the results beside a time were wrong; N/A says that nobody looked."""
    beside = columns[place + 1 : place + 4]
    at = next((i for i, column in enumerate(beside) if column in WRONG), None)
    if at is None:
        return False
    try:
        number = float(row[place + 1 + at])
    except ValueError:
        return False
    return not number <= (TOLERATED if beside[at] == "error" else 0)


def _ratio(run: _Run) -> float | None:
    """Bus over algorithm bandwidth of the largest message, which tells operations apart."""
    try:
        row = max((own for _, own in run.rows), key=lambda own: int(own[0]))
        algorithm, bus = (float(row[run.columns.index(own)]) for own in ("algbw", "busbw"))
    except (ValueError, IndexError):
        return None
    return bus / algorithm if algorithm > 0 else None


def _runs(lines: list[str]) -> Iterator[_Run]:
    """The runs of a file: each begins with its settings, or with its columns where a line of
    settings is missing. A command line before it names it.
    """
    run, named, complete = _Run(line=1), None, False
    for number, text in enumerate(lines, 1):
        program = PROGRAM.search(text) if "_perf" in text else None
        if SETTINGS.match(text) and (run.columns or run.ranks):
            yield run
            run, complete = _Run(line=number, named=named), False
        elif program is not None:
            named = program[1]
            if not run.columns:
                run.named = named
        elif rank := RANK.match(text):
            own = _Rank(int(rank[1]), int(rank[2] or 0), rank[3], rank[4])
            run.ranks[own.number] = own
        elif HEADER.match(text):
            run.columns, run.line = text.replace("#wrong", "@").strip("# ").split(), number
            run.columns = [WRONG[0] if column == "@" else column for column in run.columns]
        elif run.columns and not complete and ROW.match(text):
            run.rows.append((number, text.split()))
        elif END.match(text):
            run.ended = complete = True
    yield run
