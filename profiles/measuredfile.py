"""The profile YAML (``kind: profile``): reading and writing a Profile, in human units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import yaml
from pydantic import Field

from profiles.fileschema import FileSchema, Name, Version, validate
from profiles.humanunits import in_file, of_file
from profiles.measured import (
    Bandwidth,
    ClusterFacts,
    CollectiveTime,
    DeviceFacts,
    EndsMemory,
    LayerHeld,
    LayerMemory,
    LayerTime,
    LayerWrapping,
    ModelFacts,
    NoRoom,
    OperatorTime,
    Overlap,
    Profile,
)

if TYPE_CHECKING:
    from profiles.yamlfile import Document

__all__ = ["SECTIONS", "ProfileFile", "profile_of", "profile_text"]

Measured = Annotated[float, Field(ge=0, le=1e12)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Lengths = Annotated[
    list[Annotated[int, Field(ge=0, le=10**9)]],
    Field(min_length=1, description="Tokens; several where the model's kinds of layers differ."),
]
Degree = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]
ByDegree = Annotated[
    dict[Degree, Measured], Field(min_length=1, description="MiB by degree of TP or SP.")
]
Layer = Annotated[
    str,
    Field(
        pattern=r"^(block-[0-9]{1,4}|embedding|head|ends)$",
        description="block-0, block-1 ... by kind of layer; embedding; head with its loss; ends: "
        "embedding and head together.",
    ),
]
Where = Annotated[Name, Field(description="The model or cluster that it was measured on.")]


Device = Annotated[Name, Field(description="What clusters call the device.")]
Numbers = Annotated[str, Field(min_length=1, max_length=40, description="fp32, bf16 ...")]
Words = Annotated[str, Field(min_length=1, max_length=2000)]


class DeviceFactsFile(FileSchema):
    """A device, and what it was measured with."""

    device: Device
    hardware: Words = Field(description="What the device calls itself.")
    torch: Words
    method: Words = Field(description="How samples were taken and which figure counts.")
    driver: Words | None = None
    threads: Count | None = Field(None, description="Of a CPU.")
    clocks: Words | None = Field(None, description="What could be read of them.")
    date: Words | None = Field(None, description="Where the user gave one.")
    memory_mib: Positive = Field(description="Of a rank.")
    context_mib: Measured = Field(description="Taken before the first tensor.")
    memory_gb_per_s: Positive | None = Field(None, description="The best of any operator.")
    tflops: dict[str, Positive] = Field({}, description="The best of any GEMM, by precision.")
    fused_kernels: bool
    fused_norms: bool
    loss: Literal["fused", "half", "eager", "sharded", "chunked"]


class ModelFactsFile(FileSchema):
    """A model whose layers were measured."""

    model: Where
    layers: dict[Layer, str] = Field(description="Fingerprints, by which layers are known again.")


class ClusterFactsFile(FileSchema):
    """A cluster whose links were measured."""

    cluster: Where
    device: Device
    num_nodes: Count = 1
    gpus_per_node: Count = Field(description="Ranks of a node; on CPUs, processes.")
    backend: Words = Field(description="The library: nccl, gloo ...")
    hardware: Words | None = Field(None, description="What the devices call themselves.")
    torch: Words | None = None
    method: Words | None = Field(None, description="How samples were taken, which figure counts.")
    date: Words | None = Field(None, description="Where the user gave one.")


class LayerTimeFile(FileSchema):
    """One layer on one rank, without collectives."""

    model: Where
    layer: Layer
    tp: Count = 1
    batch: Count = Field(description="Samples in the pass.")
    seq_len: Lengths
    forward_ms: Measured
    backward_ms: Measured | None = None
    step_ms: Measured | None = Field(None, description="What an optimizer step adds.")
    parameters: Annotated[int, Field(ge=0, le=10**15)] | None = Field(
        None, description="Elements that the step updates."
    )
    device: Device | None = None
    precision: Numbers | None = None
    optimizer: Numbers | None = None
    sequence_parallel: bool = False
    spread: Measured | None = Field(None, description="(median - least) / least of the samples.")
    doubtful: bool = Field(False, description="The samples differ too much, or were disturbed.")


class LayerWrappingFile(FileSchema):
    """What the wrapper of data parallelism adds to one layer, without collectives."""

    device: Device
    model: Where
    layer: Layer
    tp: Count = 1
    precision: Numbers
    zero: Annotated[int, Field(ge=0, le=3, description="The stage; 0: whole replicas.")]
    forward_ms: Measured = Field(description="Each pass.")
    backward_ms: Measured = Field(description="Each pass.")
    step_ms: Measured = Field(description="Each step.")
    doubtful: bool = Field(False, description="The samples differ too much, or were disturbed.")


class LayerShardFile(FileSchema):
    """One layer's shard on one rank."""

    device: Device
    model: Where
    layer: Layer
    tp: Count = 1
    batch: Count
    seq_len: Lengths
    precision: Numbers
    sequence_parallel: bool = False


class NoRoomFile(LayerShardFile):
    """A layer that the device had no memory for."""


class OperatorTimeFile(FileSchema):
    """One operator."""

    device: Device
    precision: Numbers
    operator: Literal["gemm", "attention", "stream"]
    shape: list[Count] = Field(
        min_length=1,
        max_length=4,
        description="gemm: m, n, k; attention: batch, heads, sequence, head size; stream: elements "
        "of a sum of two tensors.",
    )
    forward_ms: Measured
    backward_ms: Measured | None = None
    spread: Measured = 0.0
    doubtful: bool = False


class LayerHeldFile(LayerShardFile):
    """What one layer holds on one rank."""

    recompute: Words = "none"
    saved_mib: Measured = Field(description="From forward to backward.")
    transient_mib: Measured = Field(description="More than that at the peak.")
    state_mib: Measured = Field(description="Parameters, gradients and optimizer.")


class LayerMemoryFile(FileSchema):
    """Memory of one layer."""

    model: Where
    layer: Layer
    seq_len: Lengths
    sequence_parallel: bool
    parameter_mib: Measured
    activation_mib: ByDegree
    recomputed_mib: Measured | None = Field(
        None, description="What a sample holds where the layer is recomputed."
    )


class EndsMemoryFile(FileSchema):
    """Memory of embedding and head."""

    model: Where
    position: Literal["only", "first", "last"] = Field(
        description="On one stage, or of the first or the last stage of several."
    )
    seq_len: Lengths
    sequence_parallel: bool
    state_mib: ByDegree
    activation_mib: ByDegree


class BandwidthFile(FileSchema):
    """Bus bandwidth of an operation."""

    cluster: Where
    operation: Literal["all-reduce", "all-to-all", "p2p"]
    group: Count = Field(description="Ranks; p2p: stages of the pipeline.")
    neighbours: bool | None = Field(None, description="Whether the ranks follow one another.")
    gb_per_s: Positive


AnyOperation = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p"]


class CollectiveTimeFile(FileSchema):
    """Time of an operation on a message, while all groups like this one do the same."""

    cluster: Where
    operation: AnyOperation
    group: Count = Field(description="Ranks of one group.")
    stride: Count = Field(1, description="From one rank of the group to the next.")
    mib: Positive = Field(
        description="The whole tensor: the result of an all-gather, the input of a reduce-scatter "
        "or all-reduce, what one rank sends in an all-to-all or to its partner."
    )
    ms: Measured
    spread: Measured | None = Field(None, description="(median - least) / least of the samples.")
    doubtful: bool = Field(False, description="The samples differ too much.")


class OverlapFile(FileSchema):
    """How compute and communication slow each other down."""

    cluster: Where
    slowdown: float = Field(ge=1, le=100, description="Time while overlapping / time alone.")
    operation: AnyOperation | None = None
    group: Count | None = None
    stride: Count = 1
    mib: Positive | None = None


class ProfileFile(FileSchema):
    """What was measured: layers, their memory, links and overlap."""

    schema_version: Version
    kind: Literal["profile"]
    name: Name
    source: str = Field(min_length=1, description="Where the figures come from.")
    devices: list[DeviceFactsFile] = Field(default=[])
    models: list[ModelFactsFile] = Field(default=[])
    clusters: list[ClusterFactsFile] = Field(default=[])
    layer_times: list[LayerTimeFile] = Field(default=[])
    layer_wrapping: list[LayerWrappingFile] = Field(default=[])
    layer_held: list[LayerHeldFile] = Field(default=[])
    no_room: list[NoRoomFile] = Field(default=[])
    operator_times: list[OperatorTimeFile] = Field(default=[])
    layer_memory: list[LayerMemoryFile] = Field(default=[])
    ends_memory: list[EndsMemoryFile] = Field(default=[])
    bandwidths: list[BandwidthFile] = Field(default=[])
    collective_times: list[CollectiveTimeFile] = Field(default=[])
    overlaps: list[OverlapFile] = Field(default=[])


WIDTH: Final = 10**9
SECTIONS: Final[dict[str, type[Any]]] = {
    "devices": DeviceFacts,
    "models": ModelFacts,
    "clusters": ClusterFacts,
    "layer_times": LayerTime,
    "layer_wrapping": LayerWrapping,
    "layer_held": LayerHeld,
    "no_room": NoRoom,
    "operator_times": OperatorTime,
    "layer_memory": LayerMemory,
    "ends_memory": EndsMemory,
    "bandwidths": Bandwidth,
    "collective_times": CollectiveTime,
    "overlaps": Overlap,
}


def profile_of(document: Document) -> Profile:
    """The profile in a document. Raises ``InputError`` with every problem."""
    file = validate(document, ProfileFile)
    entries = {
        section: tuple(of_file(kind, vars(own)) for own in getattr(file, section))
        for section, kind in SECTIONS.items()
    }
    return Profile(name=file.name, source=file.source, **entries)


def profile_text(profile: Profile) -> str:
    """The file's text, entries in the profile's order."""
    head = {"schema_version": 1, "kind": "profile", "name": profile.name, "source": profile.source}
    lines = [yaml.safe_dump(head, sort_keys=False, width=WIDTH)]
    for section in SECTIONS:
        entries = [_flow(in_file(own)) for own in getattr(profile, section)]
        lines += [f"{section}:\n"] * bool(entries)
        lines += [f"  - {entry}" for entry in entries]
    return "".join(lines)


def _flow(entry: dict[str, Any]) -> str:
    """An entry on one line."""
    return yaml.safe_dump(entry, sort_keys=False, default_flow_style=True, width=WIDTH)
