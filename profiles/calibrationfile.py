"""The calibration YAML (``kind: calibration``) and its conversion to a Calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from profiles.calibration import Calibration, Efficiencies, KernelEfficiency, Seen
from profiles.fileschema import FileSchema, Name, Version, validate
from profiles.units import GIB, MIB

if TYPE_CHECKING:
    from profiles.yamlfile import Document

__all__ = ["CalibrationFile", "calibration_of"]

Part = Annotated[float, Field(ge=0, le=1)]  # of something that physics does not exceed
Rate = Annotated[float, Field(gt=0, le=1)]  # a part that something is divided by
Sigma = Annotated[float, Field(gt=0, le=2)]


def _ascending(ends: list[float]) -> list[float]:
    if sorted(ends) != ends:
        raise ValueError(ASCENDING)
    return ends


ASCENDING = "the lesser of both first"
Ascending = AfterValidator(_ascending)


class KernelFile(FileSchema):
    """An attention kernel's part of the sustained rate."""

    forward: Rate
    backward: Rate


class AttentionKernelsFile(FileSchema):
    """Efficiencies by attention kernel."""

    flash1: KernelFile
    flash2: KernelFile
    flash3: KernelFile
    fused: KernelFile
    unfused: KernelFile
    eager: KernelFile


class EfficienciesFile(FileSchema):
    """As in ``profiles.calibration.Efficiencies``, in human units where the key says so."""

    gemm: Rate = Field(description="Large GEMMs, part of the sustained rate.")
    gemm_half_k: float = Field(ge=0, le=100_000, description="Inner size at half of gemm.")
    misaligned: Rate = Field(0.6, description="What sizes that are no multiples of 8 keep of gemm.")
    quantised: Rate = Field(description="What fp8 and fp4 GEMMs keep of gemm.")
    attention: AttentionKernelsFile
    stream: Rate = Field(description="Part of memory bandwidth.")
    kernel_launch_us: float = Field(ge=0, le=10_000)
    micro_batch_ms: float = Field(ge=0, le=10_000, description="Host time of one pass.")
    step_ms: float = Field(ge=0, le=1_000_000, description="Host time of one step.")
    gpu_link: Rate
    nic: Rate
    tp_overlap: Part
    cp_overlap: Part
    ep_overlap: Part
    dp_overlap: Part
    p2p_overlap: Part
    hand_over_us: float = Field(ge=0, le=1_000_000, description="Cost of a hand-over itself.")
    overlap_slowdown: Part
    straggler: Part = Field(description="Growth of the step per doubling of the nodes.")
    moe_imbalance: float = Field(ge=1, le=100, description="Busiest rank against the mean.")
    context_gib: float = Field(ge=0, le=100)
    communicator_mib: float = Field(ge=0, le=100_000)
    reserve: Part = Field(description="Allocator's overhead as a part of all but states.")
    step_time_90: Annotated[list[Annotated[float, Field(gt=0.01, le=100)]], Ascending] = Field(
        min_length=2,
        max_length=2,
        description="5 % and 95 % quantiles of measured / estimated step time.",
    )
    step_time_varies: Part = Field(
        0.0, description="Part of their variance that is a run's own, not its stack's."
    )
    memory_sigma: Sigma


StackName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w ./()+-]*$", max_length=100)]


class FitFile(FileSchema):
    """What a fit says of itself. Errors are of step times, in sample."""

    prior: str = Field(description="The calibration that it stays near without evidence.")
    num_runs: int = Field(ge=1)
    median_error: float = Field(ge=0)
    p90_error: float = Field(ge=0)
    undetermined: list[str] = Field(description="What the runs do not tell: kept as in the prior.")


class SeenFile(FileSchema):
    """Least and most of what the runs span; beyond it the interval is wider."""

    params_billion: Annotated[list[Annotated[float, Field(gt=0)]], Ascending] = Field(
        min_length=2, max_length=2
    )
    seq_len: Annotated[list[Annotated[int, Field(ge=1)]], Ascending] = Field(
        min_length=2, max_length=2
    )


class CalibrationFile(FileSchema):
    """Efficiencies of a device and a software stack."""

    schema_version: Version
    kind: Literal["calibration"]
    name: Name
    knowledge: Literal["datasheet", "calibrated", "measured"]
    device: Name = Field(description="Name of the device, or any.")
    stack: StackName = Field(description="Name of the software stack with its release, or any.")
    source: str = Field(min_length=1, description="Where the numbers come from, with the date.")
    fit: FitFile | None = Field(None, description="How it was fitted, if it was.")
    seen: SeenFile | None = Field(None, description="What the runs span that it was fitted to.")
    efficiencies: EfficienciesFile


def calibration_of(document: Document) -> Calibration:
    """The calibration in a document. Raises ``InputError`` with every problem."""
    file = validate(document, CalibrationFile)
    given = file.efficiencies
    same = given.model_dump(
        exclude={
            "attention",
            "kernel_launch_us",
            "hand_over_us",
            "micro_batch_ms",
            "step_ms",
            "context_gib",
            "communicator_mib",
            "step_time_90",
        }
    )
    efficiencies = Efficiencies(
        **same,
        attention={
            kernel: KernelEfficiency(**parts)
            for kernel, parts in given.attention.model_dump().items()
        },
        kernel_launch_s=given.kernel_launch_us * 1e-6,
        hand_over_s=given.hand_over_us * 1e-6,
        micro_batch_s=given.micro_batch_ms * 1e-3,
        step_s=given.step_ms * 1e-3,
        context_bytes=round(given.context_gib * GIB),
        communicator_bytes=round(given.communicator_mib * MIB),
        step_time_90=(given.step_time_90[0], given.step_time_90[1]),
    )
    return Calibration(
        name=file.name,
        knowledge=file.knowledge,
        device=file.device,
        stack=file.stack,
        source=file.source,
        efficiencies=efficiencies,
        seen=None if file.seen is None else _seen(file.seen),
    )


def _seen(file: SeenFile) -> Seen:
    least, most = (round(billions * 1e9) for billions in file.params_billion)
    return Seen(params=(least, most), seq_len=(file.seq_len[0], file.seq_len[1]))
