"""The profile YAML (``kind: profile``): reading and writing a Profile, in human units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import Field

from profiles.fileschema import FileSchema, Name, Version, validate
from profiles.measured import (
    Bandwidth,
    CollectiveTime,
    EndsMemory,
    LayerMemory,
    LayerTime,
    Operation,
    Overlap,
    Position,
    Profile,
)
from profiles.units import GB, MIB

if TYPE_CHECKING:
    from profiles.yamlfile import Document

__all__ = ["ProfileFile", "profile_of", "profile_text"]

MS = 1e3
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
        pattern=r"^(block-[0-9]{1,4}|ends)$",
        description="block-0, block-1 ... by kind of layer; ends: embedding and head together.",
    ),
]
Where = Annotated[Name, Field(description="The model or cluster that it was measured on.")]


class LayerTimeFile(FileSchema):
    """One forward pass of one layer."""

    model: Where
    layer: Layer
    tp: Count = 1
    batch: Count = Field(description="Samples in the pass.")
    seq_len: Lengths
    forward_ms: Measured


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


class CollectiveTimeFile(FileSchema):
    """Time of an operation on a message."""

    cluster: Where
    operation: Literal["all-reduce", "all-to-all", "p2p"]
    group: Count
    mib: Positive
    ms: Measured


class OverlapFile(FileSchema):
    """How compute and communication slow each other down."""

    cluster: Where
    slowdown: float = Field(ge=1, le=100, description="Time while overlapping / time alone.")


class ProfileFile(FileSchema):
    """What was measured: layers, their memory, links and overlap."""

    schema_version: Version
    kind: Literal["profile"]
    name: Name
    source: str = Field(min_length=1, description="Where the figures come from.")
    layer_times: list[LayerTimeFile] = Field(default=[])
    layer_memory: list[LayerMemoryFile] = Field(default=[])
    ends_memory: list[EndsMemoryFile] = Field(default=[])
    bandwidths: list[BandwidthFile] = Field(default=[])
    collective_times: list[CollectiveTimeFile] = Field(default=[])
    overlaps: list[OverlapFile] = Field(default=[])


def profile_of(document: Document) -> Profile:
    """The profile in a document. Raises ``InputError`` with every problem."""
    file = validate(document, ProfileFile)
    return Profile(
        name=file.name,
        source=file.source,
        layer_times=tuple(
            LayerTime(
                **own.model_dump(exclude={"seq_len", "forward_ms"}),
                seq_len=tuple(own.seq_len),
                forward_s=own.forward_ms / MS,
            )
            for own in file.layer_times
        ),
        layer_memory=tuple(_layer_memory(own) for own in file.layer_memory),
        ends_memory=tuple(
            EndsMemory(
                **own.model_dump(include={"model", "sequence_parallel"}),
                position=Position(own.position),
                seq_len=tuple(own.seq_len),
                state_bytes=_bytes(own.state_mib),
                activation_bytes=_bytes(own.activation_mib),
            )
            for own in file.ends_memory
        ),
        bandwidths=tuple(
            Bandwidth(
                **own.model_dump(include={"cluster", "group", "neighbours"}),
                operation=Operation(own.operation),
                bytes_per_s=own.gb_per_s * GB,
            )
            for own in file.bandwidths
        ),
        collective_times=tuple(
            CollectiveTime(
                **own.model_dump(include={"cluster", "group"}),
                operation=Operation(own.operation),
                num_bytes=round(own.mib * MIB),
                seconds=own.ms / MS,
            )
            for own in file.collective_times
        ),
        overlaps=tuple(Overlap(**own.model_dump()) for own in file.overlaps),
    )


def _layer_memory(own: LayerMemoryFile) -> LayerMemory:
    return LayerMemory(
        **own.model_dump(include={"model", "layer", "sequence_parallel"}),
        seq_len=tuple(own.seq_len),
        parameter_bytes=own.parameter_mib * MIB,
        activation_bytes=_bytes(own.activation_mib),
        recomputed_bytes=None if own.recomputed_mib is None else own.recomputed_mib * MIB,
    )


def _bytes(by_degree: dict[str, float]) -> dict[int, float]:
    return {int(degree): mib * MIB for degree, mib in by_degree.items()}


def profile_text(profile: Profile) -> str:
    """The file's text, entries in the profile's order."""
    data = {
        "schema_version": 1,
        "kind": "profile",
        "name": profile.name,
        "source": profile.source,
        "layer_times": [
            {
                "model": own.model,
                "layer": own.layer,
                "tp": own.tp,
                "batch": own.batch,
                "seq_len": list(own.seq_len),
                "forward_ms": own.forward_s * MS,
            }
            for own in profile.layer_times
        ],
        "layer_memory": [_layer_memory_data(own) for own in profile.layer_memory],
        "ends_memory": [
            {
                "model": own.model,
                "position": own.position.value,
                "seq_len": list(own.seq_len),
                "sequence_parallel": own.sequence_parallel,
                "state_mib": _mib(own.state_bytes),
                "activation_mib": _mib(own.activation_bytes),
            }
            for own in profile.ends_memory
        ],
        "bandwidths": [
            {
                "cluster": own.cluster,
                "operation": own.operation.value,
                "group": own.group,
                **({} if own.neighbours is None else {"neighbours": own.neighbours}),
                "gb_per_s": own.bytes_per_s / GB,
            }
            for own in profile.bandwidths
        ],
        "collective_times": [
            {
                "cluster": own.cluster,
                "operation": own.operation.value,
                "group": own.group,
                "mib": own.num_bytes / MIB,
                "ms": own.seconds * MS,
            }
            for own in profile.collective_times
        ],
        "overlaps": [
            {"cluster": own.cluster, "slowdown": own.slowdown} for own in profile.overlaps
        ],
    }
    kept = {key: value for key, value in data.items() if value != []}
    return yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=200)


def _layer_memory_data(own: LayerMemory) -> dict[str, Any]:
    recomputed = own.recomputed_bytes
    return {
        "model": own.model,
        "layer": own.layer,
        "seq_len": list(own.seq_len),
        "sequence_parallel": own.sequence_parallel,
        "parameter_mib": own.parameter_bytes / MIB,
        "activation_mib": _mib(own.activation_bytes),
        **({} if recomputed is None else {"recomputed_mib": recomputed / MIB}),
    }


def _mib(by_degree: dict[int, float]) -> dict[int, float]:
    return {degree: held / MIB for degree, held in by_degree.items()}
