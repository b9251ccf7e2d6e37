"""What Slurm's topologies list, as levels of switches or as NVLink domains."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from profiles.errors import InputError, Problem
from profiles.nearest import nearest

if TYPE_CHECKING:
    from profiles.hardwarefile import NodeFile

__all__ = ["Group", "Groups", "check_hosts", "domains", "levels", "wrong"]

NAMES: Final = {0: "leaf", 1: "spine"}


@dataclass(slots=True)
class Group:
    """A switch or a block: the hosts or the switches that it joins, and where the file says so."""

    name: str
    where: str
    hosts: list[str]
    switches: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Groups:
    """What a file lists."""

    path: str
    switches: list[Group] = field(default_factory=list)
    blocks: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_hosts(found: Groups) -> None:
    """Every host and every switch is joined once."""
    seen: dict[str, str] = {}
    for group in (*found.switches, *found.blocks):
        for name in (f"host {each}" for each in group.hosts):
            if name in seen:
                raise wrong(group.where, f"{name} stands in {seen[name]} too", "one place a host")
            seen[name] = group.name
        if bool(group.hosts) == bool(group.switches):
            raise wrong(group.where, f"{group.name} joins {'both' if group.hosts else 'nothing'}",
                         "hosts or switches")  # fmt: skip


def domains(blocks: list[Group], usual: NodeFile) -> list[dict[str, Any]]:
    """Groups of nodes, of which each block fills some and leaves a smaller one."""
    gpus = usual.num_gpus // usual.num_hosts
    sizes: list[int] = []
    for block in blocks:
        full, rest = divmod(len(block.hosts), usual.num_hosts)
        sizes += [usual.num_gpus] * full + ([rest * gpus] if rest else [])
    groups: list[dict[str, Any]] = []
    for size, same in groupby(sizes):
        own = {} if size == usual.num_gpus else {"num_gpus": size}
        groups.append({"node": usual.name, "count": len(list(same)), **own})
    return groups


def levels(found: Groups, usual: NodeFile) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The nodes, and the levels of switches from them up, all but a single root."""
    rows = [found.blocks] if found.blocks else _rows(found)
    num_hosts = sum(len(group.hosts) for group in rows[0])
    per_switch, fabric = 1, list[dict[str, Any]]()
    for level, row in enumerate(rows):
        sizes = [len(group.hosts) or len(group.switches) for group in row]
        largest = max(sizes)
        per_switch *= largest
        if any(size != largest for size in sizes[:-1]):
            text = f"switches of {min(sizes)} to {largest} in one level are taken as {largest}"
            found.notes.append(text)
        if len(row) == 1:
            break
        if per_switch % usual.num_hosts or num_hosts % usual.num_hosts:
            expected = f"whole {usual.name}, {usual.num_hosts} hosts each"
            raise wrong(row[0].where, f"a switch of {per_switch} hosts", expected)
        name = "block" if found.blocks else NAMES.get(level, f"level-{level}")
        fabric.append({"name": name, "nodes_per_switch": per_switch // usual.num_hosts})
    if len(rows[-1]) > 1 and not found.blocks:
        found.notes.append(f"nothing joins {len(rows[-1])} top switches: taken as not blocking")
    return [{"node": usual.name, "count": num_hosts // usual.num_hosts}], fabric


def _rows(found: Groups) -> list[list[Group]]:
    """Switches by level from the hosts up, each level in the order of its parents."""
    by_name, parents = _joined(found)
    rows = [[switch for switch in found.switches if switch.name not in parents]]
    while rows[0] and rows[0][0].switches:
        uneven = next((switch for switch in rows[0] if not switch.switches), None)
        if uneven is not None:
            raise _uneven(uneven)
        rows.insert(0, [by_name[name] for switch in rows[0] for name in switch.switches])
    if not rows[0] or sum(map(len, rows)) < len(found.switches):
        raise wrong(found.switches[0].where, "switches join one another in a circle", "a tree")
    uneven = next((switch for switch in rows[0] if not switch.hosts), None)
    if uneven is not None:
        raise _uneven(uneven)
    return rows


def _joined(found: Groups) -> tuple[dict[str, Group], dict[str, str]]:
    """Switches by name, and the parent of each that has one."""
    by_name: dict[str, Group] = {}
    for switch in found.switches:
        if by_name.setdefault(switch.name, switch) is not switch:
            raise wrong(switch.where, f"a second switch {switch.name}", "another name")
    parents: dict[str, str] = {}
    for switch in found.switches:
        for name in switch.switches:
            if name not in by_name:
                hint = nearest(name, by_name)
                raise wrong(switch.where, f"there is no switch {name}", "one of the file", hint)
            if parents.setdefault(name, switch.name) != switch.name:
                raise wrong(switch.where, f"{name} is joined by {parents[name]} too", "one parent")
    return by_name, parents


def _uneven(switch: Group) -> InputError:
    message = f"{switch.name} stands beside switches with another number of levels below them"
    return wrong(switch.where, message, "as many levels under each switch")


def wrong(where: str, message: str, expected: str, hint: str = "") -> InputError:
    """The error of one place."""
    return InputError(Problem(where=where, message=message, expected=expected, hint=hint))
