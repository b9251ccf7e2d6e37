"""Inputs: the four values of every plan, with the references under which they were found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from profiles import yamlfile
from profiles.catalog import load_calibration, load_cluster, load_model, load_training
from profiles.errors import InputError, Problem
from profiles.shorthand import as_many_as_needed
from profiles.training import DEFAULT_GLOBAL_BATCH, DEFAULT_SEQ_LEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from costmodel.context import CostContext
    from profiles.calibration import Calibration
    from profiles.cluster import ClusterSpec
    from profiles.measured import Profile
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["Inputs", "checked_inputs", "load_inputs"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Model, cluster, training run and calibration.

    A reference is a catalogue name, a shorthand or a path from here (empty: the value's name).
    ``calibration_ref`` is the path of a file of the user's, ``stack`` what was asked for by name.
    ``profile``: what was measured, of the files ``profile_refs`` (see ``planner.profiled``).
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    calibration: Calibration
    model_ref: str = ""
    cluster_ref: str = ""
    calibration_ref: str | None = None
    stack: str | None = None
    profile: Profile | None = None
    profile_refs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def context(self) -> CostContext:
        """What estimates are asked of; it remembers costs."""
        from costmodel.context import CostContext  # noqa: PLC0415 - imports numpy, slowly

        return CostContext(
            self.model, self.cluster, self.training, self.calibration, profile=self.profile
        )

    def with_training(self, **changes: Any) -> Inputs:
        """The same inputs with another training run."""
        return replace(self, training=replace(self.training, **changes))


def load_inputs(
    model: str | ModelSpec,
    cluster: str,
    *,
    model_ref: str | None = None,
    training: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    stack: str | None = None,
    calibration: str | Path | None = None,
    open_ended: bool = False,
) -> Inputs:
    """The inputs that references name. Raises ``InputError`` with the problems of all of them.

    ``training`` is a file, ``overrides`` win over it; without a file, sizes have defaults. A model
    that was read already may be given itself, with ``model_ref`` for the plan file.
    ``open_ended``: a cluster that is only a device or a node stands for as many as are needed.
    """
    if open_ended:
        cluster = as_many_as_needed(cluster)
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    if training is None:
        sizes = {"global_batch": DEFAULT_GLOBAL_BATCH, "seq_len": DEFAULT_SEQ_LEN}
        given = sizes | given
    problems: list[Problem] = []

    def attempt(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except InputError as error:
            problems.extend(error.problems)
            return None

    read_model = attempt(
        lambda: load_model(model, where="--model") if isinstance(model, str) else model
    )
    read_cluster = attempt(lambda: load_cluster(cluster, where="--cluster"))
    run = attempt(lambda: load_training(training, given))
    found = None
    if read_cluster is not None:
        found = attempt(lambda: load_calibration(stack, read_cluster, calibration))
    if problems or found is None:
        raise InputError(problems)
    inputs = Inputs(
        model=read_model,
        cluster=read_cluster,
        training=run,
        calibration=found[0],
        model_ref=model if isinstance(model, str) else model_ref or model.name,
        cluster_ref=cluster,
        calibration_ref=None if calibration is None else str(calibration),
        stack=stack,
        notes=() if found[1] is None else (found[1],),
    )
    return checked_inputs(
        inputs,
        precision_at=_place(training, given, "precision"),
        seq_len_at=_place(training, given, "seq_len"),
    )


def _place(training: str | Path | None, given: Mapping[str, Any], key: str) -> str:
    """Where a value of the training run stands: a flag, or a line of the file."""
    if training is None or key in given:
        return "--" + key.replace("_", "-")
    return yamlfile.read(training).where((key,))


def checked_inputs(
    inputs: Inputs, *, precision_at: str = "--precision", seq_len_at: str = "--seq-len"
) -> Inputs:
    """The inputs with notes on how they fit together. Raises ``InputError`` where they do not.

    The keywords are the places that messages name.
    """
    precision, limit = inputs.training.precision, inputs.model.max_seq_len
    for device in inputs.cluster.devices:
        rates = device.peak_flop_per_s
        if precision.gemm not in rates or precision.other not in rates:
            known = ", ".join(rate for rate in rates if rate not in ("fp8", "fp4"))
            message = f"{device.name} has no rate for {precision}"
            raise InputError(Problem(where=precision_at, message=message, expected=known))
    if limit is not None and inputs.training.seq_len > limit:
        note = (
            f"{seq_len_at} {inputs.training.seq_len} is longer than the {limit} tokens that "
            f"{inputs.model.name} was made for"
        )
        return replace(inputs, notes=(*inputs.notes, note))
    return inputs
