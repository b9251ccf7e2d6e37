"""A profile's figures as the cost rules use them. Units are those of the rules: ms and MiB.

Fits are least squares, as in the peer. Where a group of ranks of some size was not measured (a
world of 12 GPUs), the slower of the nearest measured sizes on both sides stands for it; the peer
ends with an error there. A TP or SP degree whose memory or collectives were not measured is not
offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from benchmarks.galvatron.sharedrules import positions
from profiles.errors import InputError, Problem
from profiles.measured import ENDS, EndsMemory, LayerMemory, LayerTime, Operation, Position, Profile
from profiles.units import MIB

if TYPE_CHECKING:
    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.strategy import Strategy

Memory = TypeVar("Memory", LayerMemory, EndsMemory)
FEWEST_BATCHES: Final = 2
MS: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """ms = slope * x + offset."""

    slope: float
    offset: float = 0.0

    def at(self, x: float) -> float:
        return self.slope * x + self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """ms by MiB of message: measured sizes as they are, others by the fitted line."""

    measured: dict[float, float]
    line: Line

    def at(self, size: float) -> float:
        found = self.measured.get(size)
        return self.line.at(size) if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """One kind of layer: ms of a forward pass by samples; MiB."""

    forward: Line
    parameter_mib: float
    activation_mib: dict[int, float]
    recomputed_mib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsFigures:
    """Embedding and head: ms by samples; MiB of states and of a sample's activations by degree,
    by position.
    """

    forward: Line
    state_mib: dict[Position, dict[int, float]]
    activation_mib: dict[Position, dict[int, float]]

    def covers(self, split: Strategy) -> bool:
        """Whether this split was measured wherever embedding and head lie."""
        return all(
            split.tp in self.state_mib[position] and split.degree in self.activation_mib[position]
            for position in positions(split.pp)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """ms for each MB by group, and of collectives by message."""

    world: int
    all_reduce: dict[tuple[int, bool], float]
    p2p: dict[int, float]
    gather: dict[int, Curve]
    all_to_all: dict[int, Curve]
    slowdown: float

    def ms_per_mb(self, group: int, *, neighbours: bool) -> float:
        """Of an all-reduce's bus traffic. The whole world always follows one another."""
        if group == 1:
            return 0.0
        alike = neighbours or group == self.world
        return _nearest(
            {n: ms for (n, near), ms in self.all_reduce.items() if near == alike}, group
        )

    def p2p_ms_per_mb(self, stages: int) -> float:
        return _nearest(self.p2p, stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that the rules take from a profile."""

    layers: tuple[LayerFigures, ...]
    ends: EndsFigures
    links: Links


def figures_of(case: Case, profile: Profile) -> Figures:
    """The figures that a case uses. Raises ``InputError`` for what was not measured."""
    return Figures(
        layers=tuple(_layer(case, profile, index) for index in range(len(case.kinds))),
        ends=_ends(case, profile),
        links=_links(case, profile),
    )


def _nearest(measured: dict[int, float], size: int) -> float:
    """The figure of a size, or the greater of those of its measured neighbours."""
    if size in measured:
        return measured[size]
    below = [n for n in measured if n < size]
    above = [n for n in measured if n > size]
    near = ([max(below)] if below else []) + ([min(above)] if above else [])
    if not near:
        raise _missing("bandwidth", f"a group of {size} ranks")
    return max(measured[n] for n in near)


def _missing(role: str, what: str) -> InputError:
    return InputError(Problem(where=f"profiles.{role}", message=f"{what} was not measured"))


# --- times -----------------------------------------------------------------------------------


def _rows(profile: Profile, name: str) -> list[LayerTime]:
    return [row for row in profile.layer_times if row.layer == name]


def _per_sample_ms(row: LayerTime) -> float:
    return row.forward_s / row.batch * MS


def _forward(case: Case, profile: Profile, name: str, index: int) -> Line:
    """The line of a kind of layer, by the case's time mode."""
    mode = case.options["time_profile_mode"]
    rows = _rows(profile, name)
    seq_len = case.kinds[index].seq_len
    if mode == "static":
        every = [row for kind in range(index + 1) for row in _rows(profile, f"block-{kind}")]
        chosen = rows[:1] if name == ENDS else every[index : index + 1]
        if not chosen:
            raise _missing("computation", name)
        return Line(slope=_per_sample_ms(chosen[0]))
    if mode == "batch":
        lengths = tuple(kind.seq_len for kind in case.kinds)
        rows = [row for row in rows if row.seq_len in ((seq_len,), lengths)]
        if len(rows) < FEWEST_BATCHES:
            raise _missing("computation", f"{name} at {seq_len} tokens and two batches")
        slope, offset = _fit([row.batch for row in rows], [row.forward_s * MS for row in rows], 1)
        return Line(slope=slope, offset=offset)
    rows = [row for row in rows if row.batch == 1]
    order = 1 if name == ENDS else 2
    if len(rows) <= order:
        raise _missing("computation", f"{name} with one sample at {order + 1} lengths")
    factors = _fit([row.seq_len[0] for row in rows], [row.forward_s * MS for row in rows], order)
    return Line(slope=float(np.polyval(factors, seq_len)))


def _fit(x: list[int], y: list[float], order: int) -> tuple[float, ...]:
    """Factors of the least squares polynomial, highest power first."""
    return tuple(float(factor) for factor in np.polyfit(x, y, order))


# --- memory ----------------------------------------------------------------------------------


def _mib(table: dict[int, float], factor: float = 1.0) -> dict[int, float]:
    return {degree: value / MIB * factor for degree, value in table.items()}


def _layer(case: Case, profile: Profile, index: int) -> LayerFigures:
    name = f"block-{index}"
    own = case.kinds[index].seq_len
    rows = _sharing(case, [row for row in profile.layer_memory if row.layer == name])
    if case.options["memory_profile_mode"] == "sequence":
        rows = sorted(rows, key=lambda row: row.seq_len)
        factor = own / rows[-1].seq_len[0] if rows else 1.0
    else:
        rows = [row for row in rows if row.seq_len == (own,)]
        factor = 1.0
    if not rows:
        raise _missing("memory", f"{name} at {own} tokens")
    longest = rows[-1]
    recomputed = longest.recomputed_bytes
    return LayerFigures(
        forward=_forward(case, profile, name, index),
        parameter_mib=rows[0].parameter_bytes / MIB,
        activation_mib=_mib(longest.activation_bytes, factor),
        recomputed_mib=None if recomputed is None else recomputed / MIB * factor,
    )


def _sharing(case: Case, rows: list[Memory]) -> list[Memory]:
    """Rows with the case's sequence parallelism; where there are none, those without or with."""
    wanted = bool(case.options["sequence_parallel"])
    return [row for row in rows if row.sequence_parallel == wanted] or rows


def _ends(case: Case, profile: Profile) -> EndsFigures:
    rows = _sharing(case, list(profile.ends_memory))
    lengths = tuple(kind.seq_len for kind in case.kinds)
    factors = dict.fromkeys(Position, 1.0)
    if case.options["memory_profile_mode"] == "sequence" and rows:
        longest = max(row.seq_len for row in rows)
        factors = _length_factors(case, lengths[0] / longest[0])
        lengths = longest
    found: dict[Position, EndsMemory] = {
        row.position: row for row in rows if row.seq_len == lengths
    }
    for position in Position:
        if position not in found:
            raise _missing("memory", f"embedding and head ({position}) at {lengths} tokens")
    return EndsFigures(
        forward=_forward(case, profile, ENDS, 0),
        state_mib={at: _mib(row.state_bytes) for at, row in found.items()},
        activation_mib={at: _mib(row.activation_bytes, factors[at]) for at, row in found.items()},
    )


def _length_factors(case: Case, ratio: float) -> dict[Position, float]:
    """How the activations of the longest measured sequence are scaled to this one."""
    if case.engine == "main":
        return dict.fromkeys(Position, ratio)
    return {Position.ONLY: 2 / 3 + ratio / 3, Position.FIRST: 1.0, Position.LAST: ratio}


# --- links -----------------------------------------------------------------------------------


def _links(case: Case, profile: Profile) -> Links:
    all_reduce, p2p = {}, {}
    for row in profile.bandwidths:
        ms_per_mb = 1e9 / row.bytes_per_s
        if row.operation is Operation.P2P:
            p2p[row.group] = ms_per_mb
        elif row.neighbours is not None:
            all_reduce[row.group, row.neighbours] = ms_per_mb
    if not profile.overlaps:
        raise _missing("overlap", "overlap_coe")
    return Links(
        world=case.world,
        all_reduce=all_reduce,
        p2p=p2p,
        gather=_curves(profile, Operation.ALL_REDUCE, 0.5),
        all_to_all=_curves(profile, Operation.ALL_TO_ALL, 1.0),
        slowdown=profile.overlaps[0].slowdown,
    )


def _curves(profile: Profile, operation: Operation, factor: float) -> dict[int, Curve]:
    """By group; an all-gather takes half of an all-reduce."""
    points: dict[int, dict[float, float]] = {}
    for row in profile.collective_times:
        if row.operation is operation:
            size = row.num_bytes / MIB
            points.setdefault(row.group, {})[size] = row.seconds * MS * factor
    curves = {}
    for group, measured in points.items():
        if len(measured) >= FEWEST_BATCHES:
            slope, offset = _fit([int(x) for x in measured], list(measured.values()), 1)
            curves[group] = Curve(measured=measured, line=Line(slope=slope, offset=offset))
    return curves
