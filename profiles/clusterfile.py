"""The cluster YAML (``kind: cluster``): nodes, their devices and the fabric -> ClusterSpec."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from pydantic import Discriminator, Field, Tag

from profiles.cluster import ClusterSpec, DeviceSpec, FabricLevel, NodeGroup, NodeSpec
from profiles.errors import InputError
from profiles.fileschema import FileSchema, Name, Version, problem_at, validate
from profiles.hardwarefile import (
    MAX_NODE_GPUS,
    GpuLinkFile,
    InlineDevice,
    InlineNode,
    NicsFile,
    device_of,
    node_of,
    resized,
)
from profiles.nearest import nearest
from profiles.units import GB, GIB

if TYPE_CHECKING:
    from profiles.errors import Problem
    from profiles.yamlfile import Document, Mark, Place

__all__ = ["MAX_GPUS", "ClusterFile", "Hardware", "cluster_of"]

MAX_GPUS: Final = 1_000_000


class Hardware(Protocol):
    """Where a cluster file finds the devices and nodes that it only names."""

    def device(self, name: str) -> DeviceSpec:
        """The device of that name or alias; ``InputError`` where there is none."""

    def node(self, name: str) -> NodeSpec:
        """The node of that name or alias; ``InputError`` where there is none."""


def _node_tag(value: Any) -> str:
    return "InlineNode" if isinstance(value, dict) else "name"


class NodeGroupFile(FileSchema):
    """Equal nodes: a node of the catalogue or of this file, and what differs from it."""

    node: Annotated[
        Annotated[Name, Tag("name")] | Annotated[InlineNode, Tag("InlineNode")],
        Discriminator(_node_tag),
    ] = Field(description="Name of a node of the catalogue, or a mapping that describes one.")
    count: int = Field(1, ge=1, le=MAX_GPUS, description="Nodes of this kind.")
    num_gpus: int | None = Field(None, ge=1, le=MAX_NODE_GPUS, description="Fewer GPUs a node.")
    gpu_link: GpuLinkFile | None = None
    nics: NicsFile | None = None
    host_memory_gib: float | None = Field(None, gt=0, le=1_000_000)
    price_per_gpu_hour: float | None = Field(None, ge=0, le=100_000)


class FabricLevelFile(FileSchema):
    """Switches of one level."""

    name: Name
    nodes_per_switch: int = Field(ge=1, le=MAX_GPUS)
    oversubscription: float = Field(1.0, ge=1, le=1_000, description="2 = half the uplinks.")
    latency_us: float = Field(0.0, ge=0, le=10_000, description="Added by this level.")


class ClusterFile(FileSchema):
    """A cluster."""

    schema_version: Version
    kind: Literal["cluster"]
    name: Name
    nodes: list[NodeGroupFile] = Field(
        min_length=1, max_length=10_000, description="Groups of equal nodes, in rank order."
    )
    devices: dict[Name, InlineDevice] = Field(
        {}, description="Devices by name, beside those of the catalogue."
    )
    fabric: list[FabricLevelFile] = Field(
        [], max_length=10, description="Levels of switches, from the nodes up."
    )


def cluster_of(document: Document, hardware: Hardware) -> ClusterSpec:
    """The cluster in a document. Raises ``InputError`` with every problem."""
    file = validate(document, ClusterFile)
    problems: list[tuple[Mark, Problem]] = []
    groups: list[NodeGroup] = []
    names: dict[str, NodeSpec] = {}
    for position, group in enumerate(file.nodes):
        place = ("nodes", position)
        try:
            node = _node(document, place, file, hardware)
        except _WrongError as error:
            problems.append(error.problem)
            continue
        if names.setdefault(node.name, node) != node:
            message = f"a second, different node {node.name!r}"
            problems.append(problem_at(document, place, message, expected="another name"))
        groups.append(NodeGroup(node, group.count))
    problems += _fabric_problems(document, file.fabric)
    cluster = ClusterSpec(
        name=file.name,
        groups=tuple(groups),
        fabric=tuple(
            FabricLevel(
                name=level.name,
                nodes_per_switch=level.nodes_per_switch,
                oversubscription=level.oversubscription,
                latency_s=level.latency_us * 1e-6,
            )
            for level in file.fabric
        ),
    )
    if cluster.num_gpus > MAX_GPUS:
        message = f"{cluster.num_gpus:,} GPUs"
        expected = f"at most {MAX_GPUS:,}"
        problems.append(problem_at(document, ("nodes",), message, expected=expected))
    document.raise_problems(problems)
    return cluster


class _WrongError(Exception):
    def __init__(self, problem: tuple[Mark, Problem]) -> None:
        self.problem = problem


def _node(
    document: Document, place: tuple[str, int], file: ClusterFile, hardware: Hardware
) -> NodeSpec:
    """The node of the group at ``place`` with its overrides."""
    group = file.nodes[place[1]]
    if isinstance(group.node, InlineNode):
        named = (*place, "node", "device")
        if group.node.device in file.devices:
            device = device_of(group.node.device, file.devices[group.node.device])
        else:
            device = _found(document, named, hardware.device, group.node.device, file.devices)
        node = node_of(group.node, device)
    else:
        node = _found(document, (*place, "node"), hardware.node, group.node, ())
    if group.num_gpus is not None:
        if group.num_gpus > node.num_gpus:
            message = f"{group.num_gpus} GPUs in a {node.name}"
            expected = f"at most its {node.num_gpus}"
            hint = "describe a larger node as a mapping"
            where = (*place, "num_gpus")
            raise _WrongError(problem_at(document, where, message, expected=expected, hint=hint))
        node = resized(node, group.num_gpus)
    return _overridden(node, group, place[1])


def _found(document: Document, place: Place, find: Any, name: str, own: Any) -> Any:
    """What ``find`` knows by ``name``, its error told at ``place``."""
    try:
        return find(name)
    except InputError as error:
        problem = error.problems[0]
        hint = nearest(name, own) or problem.hint
        raise _WrongError(
            problem_at(document, place, problem.message, expected=problem.expected, hint=hint)
        ) from None


def _overridden(node: NodeSpec, group: NodeGroupFile, position: int) -> NodeSpec:
    """The node with the links, memory and price that the group states."""
    changes: dict[str, Any] = {}
    if group.gpu_link is not None:
        changes["gpu_bytes_per_s"] = group.gpu_link.bandwidth_gb_per_s_per_gpu * GB
        changes["gpu_latency_s"] = group.gpu_link.latency_us * 1e-6
    if group.nics is not None:
        changes["num_nics"] = group.nics.count
        changes["nic_bytes_per_s"] = group.nics.bandwidth_gb_per_s * GB
        changes["nic_latency_s"] = group.nics.latency_us * 1e-6
    if group.host_memory_gib is not None:
        changes["host_memory_bytes"] = round(group.host_memory_gib * GIB)
    if group.price_per_gpu_hour is not None:
        changes["price_per_gpu_hour"] = group.price_per_gpu_hour
    changed = replace(node, **changes)
    return node if changed == node else replace(changed, name=f"{node.name}[group-{position}]")


def _fabric_problems(
    document: Document, fabric: list[FabricLevelFile]
) -> list[tuple[Mark, Problem]]:
    """Switches must form a tree: each level joins whole switches of the one below."""
    problems = []
    for position, level in enumerate(fabric):
        place = ("fabric", position)
        below = fabric[position - 1].nodes_per_switch if position else None
        if below is not None and (
            level.nodes_per_switch <= below or level.nodes_per_switch % below
        ):
            message = f"{level.nodes_per_switch} nodes a switch above {below}"
            expected = f"a larger multiple of {below}"
            where = (*place, "nodes_per_switch")
            problems.append(problem_at(document, where, message, expected=expected))
        if level.name in {"gpu", "node", "core", *(other.name for other in fabric[:position])}:
            message = f"the level name {level.name!r} is taken"
            problems.append(problem_at(document, (*place, "name"), message, expected="another"))
    return problems
