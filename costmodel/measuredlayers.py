"""Measured times of layers in place of the formula's, where a profile has them.

A layer is known by its value, so that a profile of one model serves every model with equal layers.
Times are of a shard on one rank without its group: collectives stay what the formula makes of the
links. Axes are tp, sequence length and micro-batch; the reference between points is the formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from costmodel.interpolation import Basis, freed_of_noise, value_at
from costmodel.layers import rank_parameters, timed_layer
from costmodel.layout import Strategy
from costmodel.work import Group
from profiles.fingerprint import fingerprint
from profiles.topology import GroupLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.compute import DeviceModel
    from costmodel.interpolation import Place
    from costmodel.layers import TimedLayer
    from costmodel.passes import PassCost
    from profiles.layers import Layer
    from profiles.measured import LayerTime, Profile
    from profiles.training import TrainingSpec

__all__ = ["MeasuredLayers", "Wrapping", "measured_of"]

AXES = (-1, 1, 1)  # tp, sequence length, micro-batch: along which work grows
ALONE = dict.fromkeys((Group.TP, Group.CP, Group.EP, Group.EXPERT_TP), GroupLink(1, ()))


def names_of(profile: Profile, layer: Layer) -> set[tuple[str, str]]:
    """Model and name under which a profile has a layer."""
    own = fingerprint(layer)
    return {
        (facts.model, name)
        for facts in profile.models
        for name, known in facts.layers.items()
        if known and own.startswith(known)
    }


def measured_of(profile: Profile, layer: Layer, *, device: str, precision: str) -> list[LayerTime]:
    """The times of a layer on a device that a profile has."""
    names = names_of(profile, layer)
    return [
        row
        for row in profile.layer_times
        if (row.model, row.layer) in names
        and (row.device, row.precision) == (device, precision)
        and row.backward_s is not None
    ]


class Wrapping(NamedTuple):
    """Seconds that the wrapper of data parallelism adds to a layer's passes, and to each step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Rows:
    """The times of one layer by place, with or without sequence parallelism."""

    forward: dict[Place, float] = field(default_factory=dict)
    backward: dict[Place, float] = field(default_factory=dict)
    update: dict[Place, float] = field(default_factory=dict)  # of one element
    doubtful: frozenset[Place] = frozenset()


class MeasuredLayers:
    """Looks up layers of one model on one device."""

    def __init__(self, profile: Profile, device: DeviceModel, training: TrainingSpec) -> None:
        """Nothing is looked up yet."""
        self.profile, self.device, self.training = profile, device, training
        self._rows: dict[tuple[Layer, bool], _Rows] = {}
        self._bytes: dict[
            tuple[Layer, bool], dict[str, tuple[dict[Place, float], dict[Place, float]]]
        ] = {}
        self._references: dict[object, TimedLayer] = {}
        self._wrapping: dict[tuple[Layer, int, int], Wrapping] = {}

    def rows(self, layer: Layer, *, sequence_parallel: bool) -> _Rows:
        """The layer's times; tp 1 belongs to both kinds of shards."""
        key = (layer, sequence_parallel)
        if key not in self._rows:
            found = measured_of(
                self.profile,
                layer,
                device=self.device.device.name,
                precision=self.training.precision.value,
            )
            fitting = [
                row for row in found if row.tp == 1 or row.sequence_parallel == sequence_parallel
            ]
            self._rows[key] = _rows_of(fitting, self.training.optimizer.value)
        return self._rows[key]

    def corrected(
        self, timed: TimedLayer, layer: Layer, strategy: Strategy, micro_batch: int
    ) -> TimedLayer:
        """``timed`` with measured compute, if the layer was measured at all."""
        timed = self._holding(timed, layer, strategy, micro_batch)
        rows = self.rows(layer, sequence_parallel=strategy.sequence_parallel)
        if not rows.forward and strategy.tp > 1:
            rows = self.rows(layer, sequence_parallel=not strategy.sequence_parallel)
        if not rows.forward:
            return timed
        place = (strategy.tp, self.training.seq_len, micro_batch)

        def look_up(
            values: dict[Place, float], cost: Callable[[TimedLayer], float]
        ) -> tuple[float, Basis]:
            def reference(there: Place) -> float:
                return cost(self._reference(layer, strategy, there))

            value, basis = value_at(values, place, reference)
            if strategy.cp > 1:  # never measured
                basis = Basis.EXTRAPOLATED
                value *= cost(timed) / reference(place)
            return value, basis

        forward_s, basis = look_up(rows.forward, lambda own: own.forward.compute_s)
        backward_s, other = look_up(rows.backward, lambda own: own.backward.compute_s)
        basis = max(basis, other)
        if rows.doubtful and basis < Basis.DOUBTFUL and _near(place, rows):
            basis = Basis.DOUBTFUL
        update_s = None
        if rows.update:
            update_s, _ = value_at(rows.update, place, lambda _: 1.0)
        return _with(timed, forward_s, backward_s, update_s, basis)

    def wrapping(self, layer: Layer, tp: int, zero: int) -> Wrapping:
        """What the wrapper of a stage of ZeRO adds; nothing where that was not measured. Between
        shards, and beyond them, it goes with their weights.
        """
        key = (layer, tp, zero)
        if key not in self._wrapping:
            self._wrapping[key] = self._look_up_wrapping(*key)
        return self._wrapping[key]

    def _look_up_wrapping(self, layer: Layer, tp: int, zero: int) -> Wrapping:
        names = names_of(self.profile, layer)
        own = (self.device.device.name, self.training.precision.value, zero)
        rows = {
            (row.tp,): row
            for row in self.profile.layer_wrapping
            if (row.model, row.layer) in names and (row.device, row.precision, row.zero) == own
        }
        if not rows:
            return Wrapping()

        def weights(place: Place) -> float:
            return float(rank_parameters(layer, Strategy(tp=place[0]))[0])

        def seconds(name: str) -> float:
            values: dict[Place, float] = {place: getattr(row, name) for place, row in rows.items()}
            return value_at(values, (tp,), weights)[0]

        return Wrapping(*map(seconds, Wrapping._fields))

    def _holding(
        self, timed: TimedLayer, layer: Layer, strategy: Strategy, micro_batch: int
    ) -> TimedLayer:
        """``timed`` with measured bytes, for the recomputations that were measured. They grow with
        the tokens as what the formula saves does.
        """
        if strategy.cp > 1:
            return timed
        place = (strategy.tp, self.training.seq_len, micro_batch)

        def reference(there: Place) -> float:
            return float(sum(self._reference(layer, strategy, there).saved_by_module.values()))

        def at(values: dict[Place, float]) -> int:
            return round(value_at(values, place, reference)[0])

        rows = self._held(layer, sequence_parallel=strategy.sequence_parallel)
        held = {name: (at(saved), at(transient)) for name, (saved, transient) in rows.items()}
        return replace(timed, held=held)

    def _held(
        self, layer: Layer, *, sequence_parallel: bool
    ) -> dict[str, tuple[dict[Place, float], dict[Place, float]]]:
        """Saved and transient bytes by place, for each recomputation."""
        key = (layer, sequence_parallel)
        if key not in self._bytes:
            found: dict[str, tuple[dict[Place, float], dict[Place, float]]] = {}
            names = names_of(self.profile, layer)
            own = (self.device.device.name, self.training.precision.value)
            for row in self.profile.layer_held:
                fits = row.tp == 1 or row.sequence_parallel == sequence_parallel
                if fits and (row.model, row.layer) in names and (row.device, row.precision) == own:
                    saved, transient = found.setdefault(row.recompute, ({}, {}))
                    saved[row.tp, row.seq_len[0], row.batch] = row.saved_bytes
                    transient[row.tp, row.seq_len[0], row.batch] = row.transient_bytes
            self._bytes[key] = found
        return self._bytes[key]

    def _reference(self, layer: Layer, strategy: Strategy, place: Place) -> TimedLayer:
        """The formula's times at a measured place."""
        tp, seq_len, micro_batch = place
        plain = replace(
            strategy,
            tp=tp,
            cp=1,
            sequence_parallel=strategy.sequence_parallel and tp > 1,
        )
        key = (layer, plain, seq_len, micro_batch)
        if key not in self._references:
            self._references[key] = timed_layer(
                layer,
                plain,
                replace(self.training, seq_len=seq_len),
                micro_batch,
                device=self.device,
                links=ALONE,
            )
        return self._references[key]


def _rows_of(found: list[LayerTime], optimizer: str) -> _Rows:
    at: dict[Place, LayerTime] = {(row.tp, row.seq_len[0], row.batch): row for row in found}
    forward = {place: row.forward_s for place, row in at.items()}
    backward = {place: row.backward_s for place, row in at.items() if row.backward_s is not None}
    update = {
        place: row.step_s / row.parameters
        for place, row in at.items()
        if row.step_s is not None and row.parameters and row.optimizer == optimizer
    }
    return _Rows(
        freed_of_noise(forward, AXES),
        freed_of_noise(backward, AXES),
        update,
        frozenset(place for place, row in at.items() if row.doubtful),
    )


def _near(place: Place, rows: _Rows) -> bool:
    """Whether a doubtful point is among those around a place."""
    around = []
    for axis, wanted in enumerate(place):
        known = {there[axis] for there in rows.forward}
        below = max((own for own in known if own <= wanted), default=wanted)
        above = min((own for own in known if own >= wanted), default=wanted)
        around.append({below, above})
    return any(
        all(own in values for own, values in zip(there, around, strict=True))
        for there in rows.doubtful
    )


def _with(
    timed: TimedLayer,
    forward_s: float,
    backward_s: float,
    update_s: float | None,
    basis: Basis,
) -> TimedLayer:
    """The layer with other compute; what the host takes is in it."""
    again = forward_s / timed.forward.compute_s if timed.forward.compute_s else 0.0
    back = backward_s / timed.backward.compute_s if timed.backward.compute_s else 0.0
    return replace(
        timed,
        forward=_computing(timed.forward, forward_s),
        backward=_computing(timed.backward, backward_s),
        weight_s=timed.weight_s * back,
        by_module={
            name: _computing(cost, cost.compute_s * again) for name, cost in timed.by_module.items()
        },
        update_s=update_s,
        basis=basis,
    )


def _computing(cost: PassCost, compute_s: float) -> PassCost:
    return replace(cost, compute_s=compute_s, host_s=0.0)
