"""One node as a topology file tells it, and what the catalogue adds -> a node of a cluster file.

Such files count links but do not say how fast they are. The rules, each told in a note:

- the device is that of ``--device``, else the one whose PCI number stands in the file;
- NVLinks are counted by the file and timed by the device's entry (``nvlink``);
- what has no NVLink goes over PCIe, at the file's link rate or else the device's
  (``pcie_gb_per_s``);
- NICs are counted and timed by the file, else by ``--nics`` and ``--nic-gb-per-s``, else as in the
  device's default node, which also gives the latencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from profiles import shelf, yamlfile
from profiles.errors import InputError, Problem
from profiles.fileschema import validate
from profiles.hardwarefile import DeviceFile, NodeFile

if TYPE_CHECKING:
    from profiles.hardwarefile import NvlinkFile

__all__ = ["NodeWiring", "Reading", "Told", "default_node", "described_node", "device_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the user says beside the file."""

    device: str | None = None
    num_nodes: int | None = None
    num_nics: int | None = None
    nic_gb_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reader made of a file: parts of a cluster file, and what the user should know."""

    nodes: list[dict[str, Any]]
    fabric: list[dict[str, Any]]
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWiring:
    """The links of one node. ``nvlinks[i][j]`` are those between two GPUs, ``switch_links[i]``
    those of a GPU to NVSwitches. ``pcie_gb_per_s`` and ``nic_gb_per_s`` are None where the file
    does not tell.
    """

    where: str
    nvlinks: tuple[tuple[int, ...], ...]
    switch_links: tuple[int, ...]
    num_hosts: int = 1
    pci_id: str | None = None
    pcie_gb_per_s: float | None = None
    num_nics: int = 0
    nic_gb_per_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        """Devices of the node."""
        return len(self.nvlinks)


def device_file(name: str) -> DeviceFile:
    """The catalogue's entry of the device that ``--device`` names."""
    return validate(yamlfile.read(shelf.find("devices", name, where="--device")), DeviceFile)


def default_node(device: DeviceFile) -> NodeFile:
    """The catalogue's entry of the node that the device usually stands in."""
    path = shelf.find("nodes", device.default_node, where="--device")
    return validate(yamlfile.read(path), NodeFile)


def described_node(wiring: NodeWiring, told: Told, name: str) -> Reading:
    """The node of a cluster file, ``told.num_nodes`` times (once)."""
    device, notes = _device(wiring, told)
    usual = default_node(device)
    notes += wiring.notes
    islands, order = _islands(wiring)
    if order is not None:
        notes.append(f"NVLinks join GPUs that are not neighbours: set CUDA_VISIBLE_DEVICES={order}")
    rate = None if islands is None else _nvlink_rate(wiring, device, islands)
    node: dict[str, Any] = {
        "name": name,
        "device": device.name,
        "num_gpus": wiring.num_gpus,
        "gpu_link": _link(rate, usual.gpu_link.latency_us),
    }
    if rate is not None and islands == wiring.num_gpus and _is_direct(wiring, device):
        node["direct_links"] = True
    if wiring.num_hosts > 1:
        node["num_hosts"] = wiring.num_hosts
    if rate is None or islands != wiring.num_gpus:
        pcie = _pcie(wiring, device)
        node["gpu_link"] = _link(pcie, usual.gpu_link.latency_us)
        notes.append(f"GPUs without NVLink between them exchange {pcie:g} GB/s over PCIe")
        if rate is not None:
            latency = usual.islands[0].latency_us if usual.islands else usual.gpu_link.latency_us
            node["islands"] = [{"num_gpus": islands, **_link(rate, latency)}]
    node["nics"], told_of_nics = _nics(wiring, told, usual)
    notes += told_of_nics
    return Reading(nodes=[{"node": node, "count": told.num_nodes or 1}], fabric=[], notes=notes)


def _link(rate: float | None, latency_us: float) -> dict[str, float]:
    return {"bandwidth_gb_per_s_per_gpu": round(rate or 0, 4), "latency_us": latency_us}


def _device(wiring: NodeWiring, told: Told) -> tuple[DeviceFile, list[str]]:
    if told.device is not None:
        return device_file(told.device), []
    if wiring.pci_id is None:
        expected = "--device NAME (parplan catalog devices lists them)"
        message = "the file does not say which device it is"
        raise InputError(Problem(where=wiring.where, message=message, expected=expected))
    for name in shelf.names("devices"):
        if f'"{wiring.pci_id}"' in (shelf.DATA / "devices" / f"{name}.yaml").read_text("utf-8"):
            return device_file(name), [f"PCI number {wiring.pci_id} is {name}"]
    message = f"no device of the catalogue has the PCI number {wiring.pci_id}"
    raise InputError(
        Problem(where=wiring.where, message=message, expected="--device NAME of a similar one")
    )


def _islands(wiring: NodeWiring) -> tuple[int | None, str | None]:
    """GPUs of each group that NVLinks join, None if they join none or unequal groups; and the
    order that makes neighbours of them where they are not.
    """
    groups: list[list[int]] = []
    left = list(range(wiring.num_gpus))
    while left:
        group, found = [], [left[0]]
        while found:
            gpu = found.pop()
            if gpu in group:
                continue
            group.append(gpu)
            found += [each for each in left if wiring.nvlinks[gpu][each]]
            if wiring.switch_links[gpu]:
                found += [each for each in left if wiring.switch_links[each]]
        groups.append(sorted(group))
        left = [each for each in left if each not in group]
    size = len(groups[0])
    if size == 1 or any(len(group) != size for group in groups):
        return None, None
    order = [gpu for group in groups for gpu in group]
    return size, None if order == sorted(order) else ",".join(map(str, order))


def _nvlink_rate(wiring: NodeWiring, device: DeviceFile, size: int) -> float:
    """GB/s of one GPU over its NVLinks. The matrix of nvidia-smi shows a GPU's links to a switch
    at every other GPU: more of them than the device has means a switch.
    """
    nvlink: NvlinkFile | None = device.nvlink
    if nvlink is None:
        message = f"the file has NVLinks and {device.name} has none"
        raise InputError(Problem(where=wiring.where, message=message, expected="another --device"))
    direct = min(sum(row) for row in wiring.nvlinks)
    links = max(direct, min(wiring.switch_links))
    if direct > nvlink.links:
        links = min(link for row in wiring.nvlinks for link in row if link)
    if links > nvlink.links:
        message = f"{links} NVLinks a GPU among {size}, and {device.name} has {nvlink.links}"
        raise InputError(Problem(where=wiring.where, message=message, expected="another --device"))
    return links * nvlink.gb_per_s_per_link


def _is_direct(wiring: NodeWiring, device: DeviceFile) -> bool:
    """Whether every pair of GPUs has as many links of its own."""
    pairs = {
        links
        for one, row in enumerate(wiring.nvlinks)
        for two, links in enumerate(row)
        if one != two
    }
    total = sum(wiring.nvlinks[0])
    return len(pairs) == 1 and device.nvlink is not None and 0 < total <= device.nvlink.links


def _pcie(wiring: NodeWiring, device: DeviceFile) -> float:
    rate = wiring.pcie_gb_per_s or device.pcie_gb_per_s
    if rate is None:
        message = f"neither the file nor the entry of {device.name} says how fast its PCIe is"
        raise InputError(Problem(where=wiring.where, message=message, expected="another --device"))
    return rate


def _nics(
    wiring: NodeWiring, told: Told, usual: NodeFile
) -> tuple[dict[str, float | int], list[str]]:
    notes = []
    count = told.num_nics or wiring.num_nics
    if not count:
        count = max(1, usual.nics.count * wiring.num_gpus // usual.num_gpus)
        notes.append(f"NICs: {count}, the share of a {usual.name}; --nics says otherwise")
    rate = told.nic_gb_per_s or wiring.nic_gb_per_s
    if rate is None:
        rate = usual.nics.bandwidth_gb_per_s
        notes.append(f"GB/s of a NIC: {rate:g} as in a {usual.name}; --nic-gb-per-s says otherwise")
    latency = usual.nics.latency_us
    return {"count": count, "bandwidth_gb_per_s": rate, "latency_us": latency}, notes
