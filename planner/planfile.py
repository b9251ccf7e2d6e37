"""Schema of the plan file (``kind: parallel-plan``), version 1, and of every other kind of file."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from costmodel.layout import ContextComm
from profiles import schemas
from profiles.fileschema import FileSchema, Version
from profiles.training import AttentionKernel, GradDtype, Optimizer, Precision

__all__ = ["PlanFile", "json_schema", "schema_kinds"]

Count = Annotated[int, Field(ge=1, le=10**9)]
Amount = Annotated[int, Field(ge=0, le=10**18)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Part = Annotated[float, Field(ge=0, le=1)]
AnyPrecision = Annotated[Precision, Field(strict=False)]
AnyOptimizer = Annotated[Optimizer, Field(strict=False)]
AnyGradDtype = Annotated[GradDtype, Field(strict=False)]
AnyContextComm = Annotated[ContextComm, Field(strict=False)]
AnyKernel = Annotated[AttentionKernel, Field(strict=False)]
Label = Annotated[str, Field(min_length=1, max_length=1_000)]
Hash = Annotated[
    str,
    Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the input's facts."),
]


def _text(value: Any) -> Any:
    """A single number, which YAML does not read as text, as text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Ranges = Annotated[
    str,
    BeforeValidator(_text),
    Field(min_length=1, max_length=10_000),
    WithJsonSchema({"type": ["string", "integer"]}),
]


class ModelPart(FileSchema):
    """The model, by reference."""

    name: Label
    ref: Label = Field(description="Name of the catalogue, or a path from this file's folder.")
    layers: int = Field(ge=0, le=10**9, description="Layers without embedding and head.")
    sha256: Hash


class ClusterPart(FileSchema):
    """The cluster, by reference."""

    name: Label
    ref: Label = Field(description="Shorthand, or a path from this file's folder.")
    num_gpus: Count
    used_gpus: Count = Field(description="tp x cp x dp x stages.")
    sha256: Hash


class TrainingPart(FileSchema):
    """The training run, every field stated."""

    global_batch: Count = Field(description="Sequences a step.")
    seq_len: Count = Field(description="Tokens a sequence.")
    micro_batch: Count = Field(description="Sequences a pass.")
    precision: AnyPrecision
    optimizer: AnyOptimizer
    grad_dtype: AnyGradDtype
    attention: AnyKernel
    fused_kernels: bool


class CalibrationPart(FileSchema):
    """The calibration: of the cluster's device, of a software stack, or of a file."""

    name: Label
    ref: Label | None = Field(None, description="Path from this file's folder.")
    stack: Label | None = Field(None, description="Software stack that was asked for.")
    sha256: Hash


class ProfilePart(FileSchema):
    """The profile, where measured layers or links were used."""

    name: Label
    refs: list[Label] = Field(
        min_length=1, max_length=100, description="Paths from this file's folder."
    )
    sha256: Hash


class PipelinePart(FileSchema):
    """The pipeline."""

    num_stages: int = Field(ge=1, le=100_000)
    num_chunks: int = Field(ge=1, le=100_000, description="Chunks a stage.")
    schedule: Label
    num_microbatches: Count = Field(description="Of one replica in a step.")


class SpanPart(FileSchema):
    """Consecutive layers under one strategy."""

    layers: Ranges = Field(
        pattern=r"^([0-9]+(-[0-9]+)?|[A-Za-z].*)$",
        description="embedding, head, a layer's number, or first-last.",
    )
    strategy: Label = Field(description="A name of strategies.")


class ChunkPart(FileSchema):
    """The layers of one chunk of one stage."""

    stage: int = Field(ge=0, le=100_000)
    chunk: int = Field(ge=0, le=100_000)
    ranks: Ranges = Field(description="Ranks of the stage, as 0-7,32-39.")
    layers: list[SpanPart] = Field(min_length=1, max_length=100_000)


class RecomputePart(FileSchema):
    """What the backward pass computes anew."""

    kind: Literal["none", "selective", "full"]
    modules: list[Literal["core_attn", "layernorm", "mlp", "moe_act"]] = Field(
        [], max_length=4, description="For the selective kind only."
    )


class StrategyPart(FileSchema):
    """How a layer is split over the ranks of its stage."""

    tp: Count
    cp: Count
    ep: Count
    expert_tp: Count
    dp: Count
    zero: int = Field(ge=0, le=3, description="Stage of ZeRO.")
    shard_group: Count = Field(description="Ranks of dp x cp over which states are sharded.")
    sequence_parallel: bool
    recompute: RecomputePart
    cp_comm: AnyContextComm = Field(
        ContextComm.RING, description="How keys and values reach the ranks of cp."
    )


class EstimatePart(FileSchema):
    """What was estimated; a reader computes it again."""

    step_s: Seconds
    interval_s: list[Seconds] = Field(min_length=2, max_length=2)
    tokens_per_s_per_gpu: float = Field(ge=0, le=1e12)
    mfu: Part
    peak_mem_bytes: Amount
    fit_probability: Part
    knowledge: Literal["datasheet", "calibrated", "measured"]
    calibration: Label


class SpacePart(FileSchema):
    """What the search was restricted to."""

    fix: dict[str, list[Ranges]] = Field({}, description="Allowed values by choice.")
    max: dict[str, Count] = Field({}, description="Greatest value by choice.")
    exclude: dict[str, list[Ranges]] = Field({}, description="Forbidden values by choice.")
    tp_across_nodes: bool
    min_fit: float = Field(gt=0, lt=1, description="Least probability that a layout fits.")


class CertificatePart(FileSchema):
    """A second opinion on the best plan's candidate, in the closed form of its step."""

    solver: Label
    objective_s: Seconds = Field(description="The best assignment that is known.")
    bound_s: Seconds = Field(description="No assignment of the candidate is below.")
    note: str = Field("", max_length=1000, description="Where a solver failed.")


class SearchPart(FileSchema):
    """What the search found out."""

    objective: Literal["step-time", "cost", "energy", "time-to-target"]
    space: SpacePart
    candidates: Amount
    pruned: dict[str, Amount] = Field(description="Candidates by what excluded them.")
    refused: dict[str, Amount] = Field(description="What the space left out, by rule.")
    bound_s: Seconds = Field(description="No layout of the space is faster.")
    gap: Part = Field(description="(step - bound) / step.")
    proven: bool
    complete: bool = Field(description="false: the search was interrupted, or its time was up.")
    equal_degrees_s: Seconds | None = Field(
        None, description="Best step of layers with equal degrees, where a mix is faster."
    )
    certificate: CertificatePart | None = None


class PlanFile(FileSchema):
    """A plan: every choice, the inputs it was made for, and what it was estimated to cost."""

    schema_version: Version
    kind: Literal["parallel-plan"]
    model: ModelPart
    cluster: ClusterPart
    training: TrainingPart
    calibration: CalibrationPart
    profile: ProfilePart | None = None
    launcher: Label
    rank_order: list[Literal["tp", "cp", "ep", "dp", "pp"]] = Field(
        min_length=5, max_length=5, description="Axes of the mesh, fastest first."
    )
    pipeline: PipelinePart
    chunks: list[ChunkPart] = Field(
        min_length=1, max_length=100_000, description="Every (stage, chunk) in model order."
    )
    strategies: dict[Label, StrategyPart] = Field(min_length=1, max_length=10_000)
    estimate: EstimatePart | None = None
    search: SearchPart | None = None


SCHEMAS: Final[dict[str, type[FileSchema]]] = {**schemas.SCHEMAS, "plan": PlanFile}


def schema_kinds() -> tuple[str, ...]:
    """The kinds of files that have a schema."""
    return tuple(SCHEMAS)


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file, for editors."""
    return SCHEMAS[kind].model_json_schema()
