"""ClusterSpec: devices, nodes, links. What is bought, without how it is used.

Bandwidths are bytes per second in one direction, latencies seconds, memory bytes. Ranks are
numbered node by node in the order of ``groups``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["ClusterSpec", "DeviceSpec", "FabricLevel", "Island", "NodeGroup", "NodeSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator.

    ``peak_flop_per_s`` by data type, dense. ``sustained`` is the part of the peak that the chip
    keeps up under its power limit when nothing else limits it. ``memory_bytes`` is what the
    driver offers to programs as total.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flop_per_s: dict[str, float] = field(hash=False)
    num_sms: int
    sustained: float = 1.0
    watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Neighbouring GPUs of a node with faster links among them: ``bytes_per_s`` per GPU."""

    num_gpus: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One link domain: ``num_gpus`` devices, and ``num_nics`` to the fabric.

    ``gpu_bytes_per_s``: per GPU to any other GPU of the node (NVLink, PCIe). ``islands``: smaller
    groups with faster links, from the GPUs up (pairs under a bridge). ``direct_links``: no switch,
    but an equal link to each other GPU (or island), so that a group uses only those to its own
    members. ``reduces_in_switch``: the switch adds up what it carries (NVLink SHARP).
    ``nic_bytes_per_s``: per NIC. ``num_hosts`` machines share the domain where it is a rack.
    """

    name: str
    device: DeviceSpec
    num_gpus: int
    gpu_bytes_per_s: float
    gpu_latency_s: float
    num_nics: int
    nic_bytes_per_s: float
    nic_latency_s: float
    islands: tuple[Island, ...] = ()
    direct_links: bool = False
    reduces_in_switch: bool = False
    num_hosts: int = 1
    host_memory_bytes: int | None = None
    price_per_gpu_hour: float | None = None

    @property
    def uplink_bytes_per_s(self) -> float:
        """All NICs of the node together, one direction."""
        return self.num_nics * self.nic_bytes_per_s

    @property
    def gpus_per_host(self) -> int:
        """Devices that one operating system sees."""
        return -(-self.num_gpus // self.num_hosts)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """``count`` equal nodes."""

    node: NodeSpec
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLevel:
    """Switches that each join ``nodes_per_switch`` nodes.

    ``oversubscription`` 2 means that a switch's uplink carries half of what its nodes can send.
    """

    name: str
    nodes_per_switch: int
    oversubscription: float = 1.0
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes on a fabric. ``fabric`` lists the levels of switches from the nodes up; above the
    last one all meet in one non-blocking core.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    fabric: tuple[FabricLevel, ...] = ()

    @cached_property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """Every node in rank order."""
        return tuple(group.node for group in self.groups for _ in range(group.count))

    @property
    def num_gpus(self) -> int:
        """Devices of the whole cluster."""
        return sum(group.node.num_gpus * group.count for group in self.groups)

    @property
    def num_nodes(self) -> int:
        """Link domains of the whole cluster: machines, or racks that share NVLink."""
        return sum(group.count for group in self.groups)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every node is equal."""
        return len({group.node for group in self.groups}) == 1

    @property
    def gpus_per_node(self) -> int:
        """Devices of the smallest node: what a group may use without leaving any node."""
        return min(group.node.num_gpus for group in self.groups)

    @cached_property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Distinct devices in rank order."""
        return tuple({group.node.device.name: group.node.device for group in self.groups}.values())

    @property
    def slowest_device(self) -> DeviceSpec:
        """The device that paces a group which spans them all: least sustained bf16 or fp16 rate."""
        return min(
            self.devices,
            key=lambda d: (
                max(rate for key, rate in d.peak_flop_per_s.items() if key not in ("fp8", "fp4"))
                * d.sustained
            ),
        )

    @property
    def least_memory_bytes(self) -> int:
        """Memory of the smallest device."""
        return min(device.memory_bytes for device in self.devices)
