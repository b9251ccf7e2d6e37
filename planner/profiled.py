"""Inputs with a profile: measured layers, what its operators make of the device, its kernels, and
measured links.

A profile may have layers, links or both. One of links must be of the cluster's device. One of
layers is refused where it cannot be about the question: it must have the cluster's slowest
device, the precision of the run, and either layers of the model or plain operators. A model of a
name that the profile knows, whose layers are others now, is refused as stale. The version of torch
is not checked, since planning needs none; the profile says it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from profiles.errors import InputError, Problem
from profiles.training import LossKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.inputs import Inputs
    from profiles.measured import DeviceFacts, LayerTime, OperatorTime, Profile

__all__ = ["with_profiles"]


def with_profiles(inputs: Inputs, paths: Sequence[str], *, where: str = "--profile") -> Inputs:
    """The inputs under the profiles of files. Raises ``InputError`` where they are stale, or about
    something else.
    """
    if not paths:
        return inputs
    from costmodel.measuredlinks import with_overlap  # noqa: PLC0415 - numpy
    from costmodel.operatorfit import calibration_from  # noqa: PLC0415 - numpy
    from profiles.mergedprofile import load_profiles  # noqa: PLC0415 - pydantic

    profile = load_profiles(paths)
    device = inputs.cluster.slowest_device
    facts = next((own for own in profile.devices if own.device == device.name), None)
    has_links = bool(profile.collective_times or profile.overlaps)
    has_layers = bool(profile.layer_times or profile.operator_times or not has_links)
    problem = _problem(inputs, profile, facts) if has_layers else None
    problem = problem or (_links_problem(inputs, profile) if has_links else None)
    if problem is not None:
        raise InputError(replace(problem, where=where))
    inputs = replace(
        inputs,
        calibration=with_overlap(profile, inputs.cluster, inputs.calibration),
        profile=profile,
        profile_refs=tuple(str(path) for path in paths),
    )
    if not has_layers:
        return replace(inputs, notes=(*inputs.notes, *_links_notes(profile)))
    assert facts is not None
    training = replace(
        inputs.training,
        fused_kernels=facts.fused_kernels,
        fused_norms=facts.fused_norms,
        loss=LossKernel(facts.loss),
    )
    calibration = calibration_from(profile, device, inputs.calibration, inputs.training.precision)
    return replace(
        inputs,
        training=training,
        calibration=calibration,
        notes=(*_notes(inputs, profile, facts), *_links_notes(profile)),
    )


def _links_problem(inputs: Inputs, profile: Profile) -> Problem | None:
    """Why measured links say nothing of these inputs."""
    from costmodel.measuredlinks import tells_of  # noqa: PLC0415 - numpy

    cluster = inputs.cluster
    if not cluster.is_uniform:
        message = f"has links, which are of equal nodes; {cluster.name} has several kinds"
        return Problem(where="", message=message)
    if any(tells_of(facts, cluster) for facts in profile.clusters):
        return None
    known = ", ".join(facts.device for facts in profile.clusters) or "no cluster that it names"
    message = f"has links of {known}; the devices of {cluster.name} are"
    message += f" {cluster.slowest_device.name}"
    return Problem(where="", message=message, hint="parplan profile links measures them")


def _links_notes(profile: Profile) -> tuple[str, ...]:
    return tuple(
        f"links of {own.cluster}: {own.backend}, {own.hardware or own.device}"
        f"{f', {own.date}' if own.date else ''}"
        for own in profile.clusters
    )


def _problem(inputs: Inputs, profile: Profile, facts: DeviceFacts | None) -> Problem | None:
    """Why a profile says nothing of these inputs."""
    from costmodel.measuredlayers import measured_of  # noqa: PLC0415 - numpy

    device, precision = inputs.cluster.slowest_device.name, inputs.training.precision.value
    if facts is None:
        known = ", ".join(own.device for own in profile.devices) or "no device"
        message = f"measured on {known}; the cluster's slowest device is {device}"
        return Problem(where="", message=message, expected=f"a profile of {device}")
    rows: tuple[LayerTime | OperatorTime, ...] = (*profile.layer_times, *profile.operator_times)
    precisions = dict.fromkeys(
        row.precision for row in rows if row.device == device and row.precision
    )
    if precision not in precisions:
        message = (
            f"measured in {', '.join(precisions) or 'no precision'}, the run is in {precision}"
        )
        return Problem(where="", message=message, hint="--precision, or profile again")
    layers = dict.fromkeys(run.layer for run in inputs.model.runs)
    if any(measured_of(profile, own, device=device, precision=precision) for own in layers):
        return None
    if any(own.model == inputs.model.name for own in profile.models):
        message = f"{inputs.model.name} is not what it was when it was measured: no layer is equal"
        return Problem(where="", message=message, hint="profile it again")
    if not profile.operator_times:
        known = ", ".join(own.model for own in profile.models) or "no model"
        message = f"has layers of {known} and no operators: nothing of {inputs.model.name}"
        return Problem(where="", message=message, hint="parplan profile layers measures it")
    return None


def _notes(inputs: Inputs, profile: Profile, facts: DeviceFacts) -> tuple[str, ...]:
    """What a reader should know; a note on missing calibrations says nothing any more."""
    when = f", {facts.date}" if facts.date else ""
    told = f"profile {profile.name}: {facts.hardware}, torch {facts.torch}{when}"
    known = (note for note in inputs.notes if "calibra" not in note)
    return (*known, told, *_unwrapped(inputs, profile))


def _unwrapped(inputs: Inputs, profile: Profile) -> tuple[str, ...]:
    """What of data parallelism was not measured, where there are ranks for it."""
    if inputs.cluster.num_gpus == 1 or not profile.layer_times or profile.layer_wrapping:
        return ()
    note = f"profile {profile.name} has no layer_wrapping: what the wrapper of data parallelism"
    note += " adds to layers (hooks, copies of weights and gradients) is not measured and counts as"
    note += " nothing, its traffic is from formulas;"
    note += f" parplan profile layers {inputs.model_ref} -o FILE measures it"
    return (note,)
