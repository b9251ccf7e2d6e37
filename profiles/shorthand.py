"""Clusters in one word: ``8xh100``, ``16x8xh100-80g`` -> groups of nodes of the catalogue."""

from __future__ import annotations

import re
from math import prod
from typing import Final

from profiles import shelf, yamlfile
from profiles.cluster import ClusterSpec, DeviceSpec, NodeGroup, NodeSpec
from profiles.clusterfile import MAX_GPUS
from profiles.errors import InputError, Problem
from profiles.fileschema import validate
from profiles.hardwarefile import DeviceFile, NodeFile, device_of, node_of, resized

__all__ = ["GRAMMAR", "Catalog", "cluster_from_shorthand", "is_shorthand"]

GRAMMAR: Final = (
    "GPUSxDEVICE (8xh100), NODESxGPUSxDEVICE (16x8xh100-80g), NODESxNODE (4xdgx-h100), or the path "
    "of a cluster YAML"
)
_SHORTHAND: Final = re.compile(
    r"(?:([-+]?[0-9]+)x)?([-+]?[0-9]+)x([A-Za-z][\w.-]*)", re.IGNORECASE | re.ASCII
)


class Catalog:
    """Devices and nodes of the catalogue, for those who only name them."""

    def __init__(self, where: str) -> None:
        """``where`` is what a message about an unknown name points at."""
        self._where = where

    def device_file(self, name: str) -> DeviceFile:
        """The file of a device."""
        path = shelf.find("devices", name, where=self._where)
        return validate(yamlfile.read(path), DeviceFile)

    def device(self, name: str) -> DeviceSpec:
        """The device of that name or alias."""
        file = self.device_file(name)
        return device_of(file.name, file)

    def node(self, name: str) -> NodeSpec:
        """The node of that name or alias, with its device."""
        path = shelf.find("nodes", name, where=self._where)
        file = validate(yamlfile.read(path), NodeFile)
        return node_of(file, self.device(file.device))


def is_shorthand(ref: str) -> bool:
    """Whether ``ref`` has the form of a shorthand, known device or not."""
    return _SHORTHAND.fullmatch(ref) is not None


def cluster_from_shorthand(ref: str, *, where: str) -> ClusterSpec:
    """The cluster. A count of devices fills nodes and leaves the rest in a last, smaller one;
    a name that is both a device's and a node's is the device's.

    NODESxGPUSxDEVICE counts machines. Where several share one NVLink domain, they fill domains:
    ``18x4xgb200`` is one rack, the same as ``72xgb200``.
    """
    form = _SHORTHAND.fullmatch(ref)
    assert form is not None
    catalog = Catalog(where)
    numbers = [_count(part, ref, where) for part in form.groups()[:2] if part is not None]
    by_node = len(numbers) == 1 and _is_node(form[3])
    node = catalog.node(form[3] if by_node else catalog.device_file(form[3]).default_node)
    total = prod(numbers) * (node.num_gpus if by_node else 1)
    if total > MAX_GPUS:
        message, expected = f"{ref} has {total:,} GPUs", f"at most {MAX_GPUS:,}"
        raise InputError(Problem(where=where, message=message, expected=expected))
    size = node.num_gpus
    if len(numbers) > 1 and numbers[1] <= node.gpus_per_host:
        size = numbers[1] * node.num_hosts  # whole hosts, with some of their GPUs
    elif len(numbers) > 1:
        size = numbers[1]
    if size > node.num_gpus:
        raise InputError(_too_many(ref, where, size, node, f"{total}x{form[3]}"))
    full, rest = divmod(total, size)
    groups = [NodeGroup(resized(node, size), full)] if full else []
    groups += [NodeGroup(resized(node, rest), 1)] if rest else []
    return ClusterSpec(name=ref, groups=tuple(groups))


def _is_node(name: str) -> bool:
    known = shelf.names_and_aliases
    return name.lower() in known("nodes") and name.lower() not in known("devices")


def _too_many(ref: str, where: str, num_gpus: int, node: NodeSpec, spread: str) -> Problem:
    return Problem(
        where=where,
        message=f"{ref} wants {num_gpus} GPUs a node",
        expected=f"at most {node.num_gpus}, the size of a {node.name}",
        hint=f"{spread} spreads them over nodes; a cluster YAML can describe larger ones",
    )


def _count(text: str, ref: str, where: str) -> int:
    number = int(text) if len(text) < _LONG else MAX_GPUS + 1
    if not 1 <= number <= MAX_GPUS:
        message = f"{text} in {ref}" if len(ref) < 4 * _LONG else "a huge number"
        expected = f"a count from 1 to {MAX_GPUS:,}"
        raise InputError(Problem(where=where, message=message, expected=expected))
    return number


_LONG: Final = 20
