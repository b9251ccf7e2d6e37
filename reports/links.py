"""Measured links for people: each operation in each kind of group as pieces of latency and rate."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from rich.text import Text

from costmodel.linkcurve import curve_of
from profiles.units import GB
from reports.tables import plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from profiles.measured import ClusterFacts, CollectiveTime, Operation, Profile

    Group = tuple[Operation, int, int]

__all__ = ["links_report"]

KIB = 1024
MICRO = 1e-6


def links_report(profile: Profile) -> list[RenderableType]:
    """A table for each measured cluster, and the slow-downs."""
    parts: list[RenderableType] = []
    for facts in profile.clusters:
        rows: dict[Group, list[CollectiveTime]] = defaultdict(list)
        for row in profile.collective_times:
            if row.cluster == facts.cluster:
                rows[row.operation, row.group, row.stride].append(row)
        parts += [*_cluster(facts, rows), *_overlaps(profile, facts)]
    return parts


def _cluster(
    facts: ClusterFacts, groups: dict[Group, list[CollectiveTime]]
) -> list[RenderableType]:
    table = plain_table(f"Links of {facts.cluster}, {facts.backend}")
    for name in ("operation", "ranks", "apart", "reach"):
        table.add_column(name)
    for name in ("from", "time there us", "beyond it GB/s", "residual %", "doubtful"):
        table.add_column(name, justify="right")
    for (operation, group, stride), rows in groups.items():
        pieces, residual = curve_of(rows).pieces()
        doubtful = sum(row.doubtful for row in rows)
        place = [operation.value, str(group), str(stride), _reach(facts, group, stride)]
        ends = [f"{100 * residual:.0f}", f"{doubtful} of {len(rows)}"]
        for number, piece in enumerate(pieces):
            first = number == 0
            table.add_row(
                *(place if first else [""] * len(place)),
                _size(piece.num_bytes),
                f"{piece.seconds / MICRO:,.0f}",
                "-" if math.isinf(piece.bytes_per_s) else f"{piece.bytes_per_s / GB:.3g}",
                *(ends if first else [""] * len(ends)),
            )
    return [table]


def _overlaps(profile: Profile, facts: ClusterFacts) -> list[RenderableType]:
    return [
        Text(
            f"beside compute, {own.operation or 'collectives'}"
            f"{f' of {own.group} ranks' if own.group else ''}: both take {own.slowdown:.2f} "
            "times as long (2: no gain)"
        )
        for own in profile.overlaps
        if own.cluster == facts.cluster
    ]


def _reach(facts: ClusterFacts, group: int, stride: int) -> str:
    if group * stride <= facts.gpus_per_node:
        return "in a node"
    return f"{-(-group * stride // facts.gpus_per_node)} nodes"


def _size(num_bytes: int) -> str:
    """In the largest unit that leaves at least one."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= KIB and len(units) > 1:
        value /= KIB
        units = units[1:]
    return f"{value:.3g} {units[0]}"
