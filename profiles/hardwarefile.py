"""The files of one device and of one node (``kind: device``, ``kind: node``), and their values.

Bandwidths are in GB/s and one direction, as the keys say; the bounds catch Gb/s given for GB/s.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from profiles.cluster import DeviceSpec, Island, NodeSpec
from profiles.fileschema import FileSchema, Name, Sources, Version
from profiles.units import GB, GIB, TERA

__all__ = [
    "MAX_NODE_GPUS",
    "DeviceFile",
    "GpuLinkFile",
    "InlineDevice",
    "InlineNode",
    "IslandFile",
    "NicsFile",
    "NodeFile",
    "NvlinkFile",
    "device_of",
    "node_of",
    "resized",
]

Tflops = Annotated[float | None, Field(None, gt=0, le=100_000)]
Micros = Annotated[float, Field(ge=0, le=10_000)]
MAX_NODE_GPUS: Final = 1_024


class PeakTflopsFile(FileSchema):
    """Dense peak rates by data type; one that the device lacks is left out."""

    bf16: Tflops = None
    fp16: Tflops = None
    fp32: Tflops = None
    fp8: Tflops = None
    fp4: Tflops = None

    @model_validator(mode="after")
    def _has_a_common_rate(self) -> Self:
        if self.bf16 is None and self.fp16 is None and self.fp32 is None:
            raise ValueError("a 16-bit or 32-bit rate")
        return self


class InlineDevice(FileSchema):
    """An accelerator, without its name."""

    memory_gib: float = Field(
        ge=0.1, le=10_000, description="Total that the driver offers to programs, in GiB."
    )
    memory_bandwidth_gb_per_s: float = Field(
        ge=0.1,
        le=100_000,
        description="Bandwidth of the memory in GB/s.",
        json_schema_extra={"hint": "GB/s: 3.35 TB/s is 3350"},
    )
    peak_tflops: PeakTflopsFile = Field(description="Dense peak rates by data type in TFLOP/s.")
    num_sms: int = Field(ge=1, le=100_000, description="Multiprocessors (cores of a CPU).")
    sustained: float = Field(1.0, gt=0, le=1, description="Part of the peak kept up under power.")
    watts: float | None = Field(None, gt=0, le=100_000, description="Power limit.")


class NvlinkFile(FileSchema):
    """NVLink ports of a device, through switches or bridges."""

    links: int = Field(ge=1, le=100, description="Ports of the device.")
    gb_per_s_per_link: float = Field(ge=1, le=200, description="One direction.")


class DeviceFile(InlineDevice):
    """A device of the catalogue. Links serve to read topologies that only count them."""

    schema_version: Version
    kind: Literal["device"]
    name: Name
    aliases: list[Name] = Field([], description="Other names of this entry.")
    default_node: Name = Field(description="Node that a shorthand like 8xh100 stands for.")
    pcie_gb_per_s: float | None = Field(
        None, ge=1, le=500, description="Link to the host, one direction."
    )
    nvlink: NvlinkFile | None = None
    pci_ids: list[Annotated[str, Field(pattern=r"^0x[0-9a-f]{4}$")]] = Field(
        [], description="Numbers by which the PCI bus knows the device."
    )
    sources: Sources


class GpuLinkFile(FileSchema):
    """Link of each GPU to any other GPU of the node."""

    bandwidth_gb_per_s_per_gpu: float = Field(
        ge=0.01,
        le=1_800,
        description="GB/s of one GPU in one direction.",
        json_schema_extra={"hint": "one direction in GB/s per GPU: NVLink 4 is 450"},
    )
    latency_us: Micros


class IslandFile(GpuLinkFile):
    """Neighbouring GPUs of a node with faster links among them: pairs under an NVLink bridge."""

    num_gpus: int = Field(ge=2, le=MAX_NODE_GPUS, description="GPUs of one island.")


class NicsFile(FileSchema):
    """Network cards of a node."""

    count: int = Field(ge=1, le=1_024, description="Cards of the node.")
    bandwidth_gb_per_s: float = Field(
        ge=0.001,
        le=110,
        description="GB/s of one card in one direction.",
        json_schema_extra={"hint": "Gb/s given for GB/s? 400 Gb/s is 50 GB/s, one direction"},
    )
    latency_us: Micros


class InlineNode(FileSchema):
    """A machine, or machines that share one NVLink domain."""

    name: Name
    device: Name
    num_gpus: int = Field(ge=1, le=MAX_NODE_GPUS, description="Devices of the node.")
    num_hosts: int = Field(
        1, ge=1, le=MAX_NODE_GPUS, description="Machines of the domain: 18 in an NVL72 rack."
    )
    gpu_link: GpuLinkFile
    islands: list[IslandFile] = Field(
        [],
        max_length=5,
        description="Smaller groups of GPUs with faster links, the smallest first.",
    )
    direct_links: bool = Field(
        False,
        description="A link from each GPU (or island) to each other one instead of a switch: n "
        "GPUs of N use (n-1)/(N-1) of gpu_link.",
    )
    reduces_in_switch: bool = Field(
        False, description="The switch of the GPUs adds up what it carries: NVLink SHARP."
    )
    nics: NicsFile
    host_memory_gib: float | None = Field(
        None, gt=0, le=1_000_000, description="Memory of all hosts of the node."
    )
    price_per_gpu_hour: float | None = Field(None, ge=0, le=100_000)

    @model_validator(mode="after")
    def _nests(self) -> Self:
        """Islands form a tree, and hosts are equal."""
        sizes = [island.num_gpus for island in self.islands] + [self.num_gpus]
        for small, large in pairwise(sizes):
            if small >= large or large % small:
                raise ValueError(f"islands of {small} GPUs to be whole parts of {large}")
        if self.num_gpus % self.num_hosts:
            raise ValueError(f"{self.num_hosts} hosts to share {self.num_gpus} GPUs equally")
        return self


class NodeFile(InlineNode):
    """A node of the catalogue."""

    schema_version: Version
    kind: Literal["node"]
    aliases: list[Name] = Field([], description="Other names of this entry.")
    sources: Sources


def device_of(name: str, file: InlineDevice) -> DeviceSpec:
    """The device in units of bytes, seconds and FLOP."""
    peaks = file.peak_tflops.model_dump(exclude_none=True)
    return DeviceSpec(
        name=name,
        memory_bytes=round(file.memory_gib * GIB),
        memory_bytes_per_s=file.memory_bandwidth_gb_per_s * GB,
        peak_flop_per_s={dtype: rate * TERA for dtype, rate in peaks.items()},
        num_sms=file.num_sms,
        sustained=file.sustained,
        watts=file.watts,
    )


def node_of(file: InlineNode, device: DeviceSpec) -> NodeSpec:
    """The node in units of bytes and seconds."""
    memory = file.host_memory_gib
    return NodeSpec(
        name=file.name,
        device=device,
        num_gpus=file.num_gpus,
        gpu_bytes_per_s=file.gpu_link.bandwidth_gb_per_s_per_gpu * GB,
        gpu_latency_s=file.gpu_link.latency_us * 1e-6,
        islands=tuple(
            Island(
                num_gpus=island.num_gpus,
                bytes_per_s=island.bandwidth_gb_per_s_per_gpu * GB,
                latency_s=island.latency_us * 1e-6,
            )
            for island in file.islands
        ),
        direct_links=file.direct_links,
        reduces_in_switch=file.reduces_in_switch,
        num_hosts=file.num_hosts,
        num_nics=file.nics.count,
        nic_bytes_per_s=file.nics.bandwidth_gb_per_s * GB,
        nic_latency_s=file.nics.latency_us * 1e-6,
        host_memory_bytes=None if memory is None else round(memory * GIB),
        price_per_gpu_hour=file.price_per_gpu_hour,
    )


def resized(node: NodeSpec, num_gpus: int) -> NodeSpec:
    """The node with only its first ``num_gpus`` GPUs: links to them as they are, and its share
    of the NICs (at least one) and of host memory.
    """
    if num_gpus == node.num_gpus:
        return node
    within = next((island for island in node.islands if island.num_gpus >= num_gpus), None)
    rate = within.bytes_per_s if within else node.gpu_bytes_per_s
    if node.direct_links and within is None and num_gpus > 1:
        unit = node.islands[-1].num_gpus if node.islands else 1
        rate *= (num_gpus / unit - 1) / (node.num_gpus / unit - 1)
    memory = node.host_memory_bytes
    return replace(
        node,
        name=f"{node.name}[{num_gpus}]",
        num_gpus=num_gpus,
        gpu_bytes_per_s=rate,
        gpu_latency_s=within.latency_s if within else node.gpu_latency_s,
        islands=tuple(island for island in node.islands if island.num_gpus < num_gpus),
        direct_links=node.direct_links and within is None,
        num_hosts=-(-num_gpus // node.gpus_per_host),
        num_nics=max(1, node.num_nics * num_gpus // node.num_gpus),
        host_memory_bytes=None if memory is None else memory * num_gpus // node.num_gpus,
    )
