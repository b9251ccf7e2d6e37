"""A session that measures links: what the ranks do, and what their journal comes to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from executor.profiler.journal import NO_ROOM, Journal
from executor.profiler.linkpoints import LinkPoint
from executor.profiler.timing import WIDE, Figure, Sample, figure_of, merged, told
from profiles.measured import CollectiveTime, Operation, Overlap

__all__ = [
    "ALONE",
    "BOTH",
    "COMPUTE",
    "FEW",
    "FEWEST",
    "LONG_S",
    "METHOD",
    "MOST",
    "USED",
    "LinkSession",
    "LinkTask",
    "figures_of",
    "measured_links",
    "task_key",
    "without_room",
]

ALONE, COMPUTE, BOTH = "alone", "compute", "both"
USED = "in use"
FEWEST: Final = 5  # samples
MOST: Final = 25
LONG_S: Final = 1.0  # samples that take longer are FEW
FEW: Final = 3
METHOD: Final = (
    f"{FEWEST} to {MOST} samples ({FEW} of those above {LONG_S:g} s) in each round, the least of "
    "rounds; all groups of a kind at once; collectives between ranks at work: the median sample, "
    "each the mean of some calls; p2p: the least of half of there and back, calls in a row; "
    f"doubtful where the median is more than {WIDE:.0%} above the least"
)


@dataclass(frozen=True, slots=True)
class LinkTask:
    """A point in one of several rounds."""

    point: LinkPoint
    round: int


def task_key(task: LinkTask) -> str:
    """Its name in the journal."""
    return f"{task.round}: {task.point}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSession:
    """What the ranks are given. ``out``: for their logs and errors; ``journal_path``: rank 0's."""

    device: str
    backend: str
    points: tuple[LinkPoint, ...]
    rounds: int
    budget_s: float | None
    out: Path
    journal_path: Path
    header: dict[str, Any]

    @property
    def tasks(self) -> list[LinkTask]:
        """Every point of every round."""
        return [LinkTask(point, number) for number in range(self.rounds) for point in self.points]

    @property
    def writer(self) -> Path:
        """Where rank 0 leaves the name of its host, which writes the profile; nodes may share
        their files.
        """
        return self.out / "writer"

    def journal(self) -> Journal:
        """The journal of the session, with what is in it already."""
        return Journal(self.journal_path, self.header)

    def figure(self, task: LinkTask, samples: dict[str, list[float]] | None) -> Figure | None:
        """What samples come to; None where there was no memory for them."""
        if samples is None:
            return None
        half = 0.5 if task.point.operation is Operation.P2P else 1.0
        figures = [
            figure_of([Sample({what: half * seconds}) for seconds in own])
            for what, own in samples.items()
        ]
        least = {what: seconds for own in figures for what, seconds in own.seconds.items()}
        return Figure(
            least | {what: median(own) for what, own in samples.items() if what == USED},
            max(own.spread for own in figures),
            doubtful=any(own.doubtful for own in figures),
        )

    def write(self, path: Path) -> None:
        """For the ranks."""
        own = {**asdict(self), "out": str(self.out), "journal_path": str(self.journal_path)}
        path.write_text(json.dumps(own), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> LinkSession:
        """As a rank does it."""
        own = json.loads(path.read_text(encoding="utf-8"))
        points = tuple(
            LinkPoint(**{**point, "operation": Operation(point["operation"])})
            for point in own.pop("points")
        )
        out, journal_path = (Path(own.pop(name)) for name in ("out", "journal_path"))
        return cls(points=points, out=out, journal_path=journal_path, **own)


def figures_of(session: LinkSession, journal: Journal) -> dict[LinkPoint, Figure]:
    """What every measured point comes to: the least of its rounds."""
    found = {}
    for point in session.points:
        keys = [task_key(LinkTask(point, number)) for number in range(session.rounds)]
        own = [figure for key in keys if (figure := journal.figure(key))]
        if own:
            found[point] = merged(own)
    return found


def without_room(session: LinkSession, journal: Journal) -> list[LinkPoint]:
    """Points that the ranks had no memory for."""
    return [
        point
        for point in session.points
        if journal.found.get(task_key(LinkTask(point, 0))) == NO_ROOM
    ]


def measured_links(
    cluster: str, figures: dict[LinkPoint, Figure]
) -> tuple[tuple[CollectiveTime, ...], tuple[Overlap, ...]]:
    """The entries of a profile."""
    times, overlaps = [], []
    for point, figure in sorted(figures.items(), key=lambda own: _order(own[0])):
        place: dict[str, Any] = {
            "cluster": cluster,
            "operation": point.operation,
            "group": point.group,
            "stride": point.stride,
            "num_bytes": point.num_bytes,
        }
        if point.overlap:
            overlaps.append(Overlap(**place, slowdown=told(_slowdown(figure))))
            continue
        times.append(
            CollectiveTime(
                **place,
                seconds=told(figure.seconds.get(USED) or figure.seconds[ALONE]),
                spread=told(figure.spread, 2),
                doubtful=figure.doubtful,
            )
        )
    return tuple(times), tuple(overlaps)


def _order(point: LinkPoint) -> tuple[str, int, int, int]:
    return point.operation.value, point.group, point.stride, point.num_bytes


def _slowdown(figure: Figure) -> float:
    """How much longer both take while they overlap: of two that take c times as long beside each
    other, what is shorter ends after c times its own time and the rest is alone again, so
    both = longer + (c - 1) * shorter.
    """
    shorter, longer = sorted((figure.seconds[ALONE], figure.seconds[COMPUTE]))
    return max(1.0, 1 + (figure.seconds[BOTH] - longer) / shorter)
