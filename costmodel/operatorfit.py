"""A profile's operators -> what a device is and how efficient: how layers that were not measured
are predicted from it.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final

from costmodel.compute import DeviceModel
from costmodel.work import AttentionCore, Gemm
from profiles.calibration import Calibration, KernelEfficiency
from profiles.training import AttentionKernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from profiles.calibration import Efficiencies
    from profiles.cluster import ClusterSpec, DeviceSpec
    from profiles.measured import DeviceFacts, OperatorTime, Profile
    from profiles.training import Precision

__all__ = ["as_found", "calibration_from"]

HALVES: Final = (0, 16, 32, 64, 128, 256, 512, 1024)  # inner sizes at half of the rate
LONG: Final = 1024  # sequences from which attention has its rate


def as_found(cluster: ClusterSpec, profile: Profile) -> ClusterSpec:
    """The cluster, its devices with what a profile measured of them."""
    facts = {own.device: own for own in profile.devices}
    groups = tuple(
        replace(group, node=replace(group.node, device=_found(group.node.device, facts)))
        for group in cluster.groups
    )
    return replace(cluster, groups=groups)


def _found(device: DeviceSpec, facts: Mapping[str, DeviceFacts]) -> DeviceSpec:
    """The device with measured rates; those that were not measured stay."""
    own = facts.get(device.name)
    if own is None:
        return device
    return replace(
        device,
        memory_bytes=own.memory_bytes,
        memory_bytes_per_s=own.memory_bytes_per_s or device.memory_bytes_per_s,
        peak_flop_per_s={**device.peak_flop_per_s, **own.flop_per_s},
        sustained=1.0 if own.flop_per_s else device.sustained,
    )


def calibration_from(
    profile: Profile, device: DeviceSpec, base: Calibration, precision: Precision
) -> Calibration:
    """``base`` with the efficiencies that the profile's operators reached on a device that it has;
    what no operator tells stays. Host time is in measured times, so none is added to them. A CPU
    has no allocator that keeps memory, and no buffers of communicators.
    """
    facts = {own.device: own for own in profile.devices}
    device, found = _found(device, facts), facts[device.name]
    own = [
        row
        for row in profile.operator_times
        if (row.device, row.precision) == (device.name, precision.value)
    ]
    changed = replace(
        base.efficiencies, context_bytes=found.context_bytes, step_s=0.0, micro_batch_s=0.0
    )
    if found.threads is not None:
        changed = replace(changed, reserve=0.0, communicator_bytes=0)
    knowledge = base.knowledge
    if own:
        changed = _fitted(own, device, changed, precision)
        knowledge = "calibrated"
    return Calibration(
        name=profile.name,
        knowledge=knowledge,
        device=device.name,
        stack="native",
        source=profile.source,
        efficiencies=changed,
    )


def _fitted(
    rows: list[OperatorTime], device: DeviceSpec, base: Efficiencies, precision: Precision
) -> Efficiencies:
    gemms = [row for row in rows if row.operator == "gemm"]
    least = min(row.forward_s for row in rows)
    changed = replace(base, stream=1.0, kernel_launch_s=least)
    if gemms:
        fits = [_gemm_fit(gemms, device, changed, precision, half) for half in HALVES]
        _, gemm, half = min(fits)
        changed = replace(changed, gemm=gemm, gemm_half_k=half)
    attention = [row for row in rows if row.operator == "attention" and row.shape[2] >= LONG]
    if attention:
        reached = _attention_fit(attention, device, changed, precision)
        fused = {kernel.value for kernel in AttentionKernel if not kernel.stores_scores}
        kernels = {
            name: reached if name in fused else own for name, own in changed.attention.items()
        }
        changed = replace(changed, attention=kernels)
    return changed


def _gemm_fit(
    rows: list[OperatorTime],
    device: DeviceSpec,
    base: Efficiencies,
    precision: Precision,
    half: int,
) -> tuple[float, float, float]:
    """(median error, ``gemm``, ``gemm_half_k``) for a given half."""
    model = DeviceModel(device, replace(base, gemm=1.0, gemm_half_k=half), precision)
    ratios = []
    for row in rows:
        m, n, k = row.shape
        ratios.append(row.forward_s / model.seconds(Gemm(m, n, k, block=False)))
    centre = median(ratios)
    return median(abs(ratio / centre - 1) for ratio in ratios), 1 / centre, half


def _attention_fit(
    rows: list[OperatorTime], device: DeviceSpec, base: Efficiencies, precision: Precision
) -> KernelEfficiency:
    """The parts of the peak that attention reaches forward and backward."""
    kernel = AttentionKernel.FLASH2
    whole = {kernel.value: KernelEfficiency(forward=1.0, backward=1.0)}
    model = DeviceModel(device, replace(base, attention=whole), precision)
    parts: dict[bool, list[float]] = {False: [], True: []}
    for row in rows:
        batch, heads, length, size = row.shape
        for backward, seconds in ((False, row.forward_s), (True, row.backward_s)):
            if seconds:
                work = AttentionCore(
                    batch=batch,
                    heads=heads,
                    query_len=length,
                    key_len=length,
                    head_dim=size,
                    value_head_dim=size,
                    visible=(length + 1) / 2,
                    kernel=kernel,
                    backward=backward,
                )
                parts[backward].append(model.seconds(work) / seconds)
    forward, backward_part = (median(parts[way]) if parts[way] else 0.5 for way in (False, True))
    return KernelEfficiency(forward=forward, backward=backward_part)
