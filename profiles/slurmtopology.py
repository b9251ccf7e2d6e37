"""Slurm's ``topology.conf`` and ``topology.yaml`` -> nodes and fabric of a cluster file.

Both list switches (of hosts or of switches) or blocks of hosts. What they do not say is the
machine, which ``--device`` names, and the uplinks, which are taken as not oversubscribed. A block
is the NVLink domain where the device's default node has several hosts; else it is a switch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pydantic import Field

from profiles.fileschema import FileSchema, validate
from profiles.hostlist import HostlistError, expanded
from profiles.nearest import nearest
from profiles.slurmtree import Group, Groups, check_hosts, domains, levels, wrong
from profiles.wiring import Reading, default_node, device_file
from profiles.yamlfile import Document

if TYPE_CHECKING:
    from profiles.wiring import Told

__all__ = ["is_topology_conf", "read_topology_conf", "read_topology_yaml"]

_KEYS: Final = {"switchname", "switches", "nodes", "linkspeed", "blockname", "blocksizes"}
_PAIR: Final = re.compile(r"([^\s=]+)=(\S*)")
_LINE: Final = re.compile(r"^\s*(switchname|blockname)=", re.IGNORECASE | re.MULTILINE)


def is_topology_conf(text: str) -> bool:
    """Whether a line names a switch or a block."""
    return _LINE.search(text) is not None


def read_topology_conf(text: str, path: str, told: Told) -> Reading:
    """The cluster of a ``topology.conf``."""
    found = Groups(path)
    whole = re.sub(r"\\\n", " ", text)  # a continued line is told by its first number
    for number, line in enumerate(whole.splitlines(), 1):
        plain = line.split("#", 1)[0].strip()
        if plain:
            _add_line(found, plain, f"{path}:{number}")
    return _reading(found, told)


def _add_line(found: Groups, plain: str, where: str) -> None:
    pairs = {key.lower(): value for key, value in _PAIR.findall(plain)}
    unknown = pairs.keys() - _KEYS
    if unknown or not pairs:
        word = min(unknown) if unknown else plain[:40]
        raise wrong(where, f"{word!r}", "SwitchName=, BlockName= or BlockSizes= and what it joins",
                     nearest(word, _KEYS))  # fmt: skip
    if "blocksizes" in pairs and len(pairs) == 1:
        return
    hosts, switches = (_names(where, pairs.get(key, "")) for key in ("nodes", "switches"))
    if "switchname" in pairs:
        found.switches.append(Group(pairs["switchname"], where, hosts, switches))
    elif "blockname" in pairs:
        found.blocks.append(Group(pairs["blockname"], where, hosts))
    else:
        raise wrong(where, f"{plain[:40]!r}", "SwitchName= or BlockName= on the same line")


class SlurmSwitch(FileSchema):
    """A switch of a tree."""

    switch: str
    nodes: str = ""
    children: str = ""
    link_speed: int | None = None


class SlurmTree(FileSchema):
    """Switches in any order."""

    switches: list[SlurmSwitch] = Field(min_length=1, max_length=100_000)


class SlurmBlock(FileSchema):
    """Hosts that stand together."""

    block: str
    nodes: str


class SlurmBlocks(FileSchema):
    """Blocks, and the sizes that Slurm plans with."""

    block_sizes: list[int] = Field([])
    blocks: list[SlurmBlock] = Field(min_length=1, max_length=100_000)


class SlurmTopology(FileSchema):
    """One of the topologies of a ``topology.yaml``."""

    topology: str
    cluster_default: bool = False
    tree: SlurmTree | None = None
    block: SlurmBlocks | None = None
    flat: bool = False


class SlurmFile(FileSchema):
    """All of them, under a key of our own, since the file is a list."""

    topologies: list[SlurmTopology] = Field(min_length=1, max_length=1_000)


def read_topology_yaml(document: Document, told: Told) -> Reading:
    """The cluster of a ``topology.yaml``: its default topology, else its first."""
    top = "topologies"
    wrapped = Document(
        path=document.path,
        data={top: document.data},
        values={(top, *place): mark for place, mark in document.values.items()},
        keys={(top, *place): mark for place, mark in document.keys.items()},
        found=document.found,
    )
    file = validate(wrapped, SlurmFile)
    number = next((n for n, each in enumerate(file.topologies) if each.cluster_default), 0)
    chosen = file.topologies[number]
    found = Groups(document.path)
    if len(file.topologies) > 1:
        found.notes.append(f"of {len(file.topologies)} topologies, {chosen.topology!r} is read")
    for position, switch in enumerate(chosen.tree.switches if chosen.tree else ()):
        where = wrapped.where((top, number, "tree", "switches", position))
        hosts, switches = _names(where, switch.nodes), _names(where, switch.children)
        found.switches.append(Group(switch.switch, where, hosts, switches))
    for position, block in enumerate(chosen.block.blocks if chosen.block else ()):
        where = wrapped.where((top, number, "block", "blocks", position))
        found.blocks.append(Group(block.block, where, _names(where, block.nodes)))
    return _reading(found, told)


def _names(where: str, text: str) -> list[str]:
    try:
        return expanded(text)
    except HostlistError as error:
        raise wrong(where, str(error), "a hostlist like n[0-7,9],m1") from None


def _reading(found: Groups, told: Told) -> Reading:
    if told.num_nodes is not None:
        raise wrong("--nodes", f"with {found.path}, which lists the nodes", "either")
    if told.device is None:
        raise wrong(found.path, "the file does not say which machines it lists", "--device NAME")
    if not found.switches and not found.blocks:
        raise wrong(found.path, "the file lists no hosts", "switches or blocks of hosts")
    check_hosts(found)
    usual = default_node(device_file(told.device))
    nodes, fabric = (
        (domains(found.blocks, usual), [])
        if found.blocks and usual.num_hosts > 1
        else levels(found, usual)
    )
    if told.num_nics or told.nic_gb_per_s:
        nics = usual.nics
        own = {
            "count": told.num_nics or nics.count,
            "bandwidth_gb_per_s": told.nic_gb_per_s or nics.bandwidth_gb_per_s,
            "latency_us": nics.latency_us,
        }
        nodes = [{**group, "nics": own} for group in nodes]
    notes = [f"each host is a {usual.name}" if usual.num_hosts == 1 else
             f"{usual.num_hosts} hosts are a {usual.name}", *found.notes]  # fmt: skip
    if fabric:
        notes.append("the file does not say uplinks: no switch is taken as oversubscribed")
    return Reading(nodes=nodes, fabric=fabric, notes=notes)
