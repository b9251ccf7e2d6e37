"""The network file of ASTRA-sim's analytical backend -> nodes and fabric of a cluster file.

Dimensions stand from the NPUs up; ``bandwidth`` is GB/s of one link in one direction, ``latency``
ns. The first dimension is taken as the node, the second as its NICs (one a NPU), each further one
as a level of switches. A NPU of a ring or a switch sends on one link at a time, a fully connected
one on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from profiles.errors import InputError, Problem
from profiles.fileschema import FileSchema, problem_at, validate
from profiles.hardwarefile import MAX_NODE_GPUS
from profiles.wiring import Reading, default_node, device_file

if TYPE_CHECKING:
    from profiles.wiring import Told
    from profiles.yamlfile import Document

__all__ = ["read_astra_sim"]

PER_GPU = "GB/s of each NPU in one direction"


class AstraSimFile(FileSchema):
    """The four lists, one entry a dimension."""

    topology: list[Literal["Ring", "Switch", "FullyConnected"]] = Field(
        min_length=1, max_length=8, description="Kind of each dimension."
    )
    npus_count: list[int] = Field(min_length=1, description="NPUs along each dimension.")
    bandwidth: list[float] = Field(min_length=1, description=PER_GPU)
    latency: list[float] = Field(min_length=1, description="Nanoseconds of a link.")


def read_astra_sim(document: Document, told: Told, name: str) -> Reading:
    """The cluster of a network file."""
    file = validate(document, AstraSimFile)
    _check(document, file)
    for flag, value in (("--nodes", told.num_nodes), ("--nics", told.num_nics)):
        if value is not None:
            raise _wrong(flag, f"with {document.path}, which says it itself", "either")
    if told.nic_gb_per_s is not None:
        raise _wrong("--nic-gb-per-s", f"with {document.path}, which says it itself", "either")
    if told.device is None:
        raise _wrong(document.path, "the file does not say which device it is", "--device NAME")
    device = device_file(told.device)
    rates = [
        rate * (count - 1 if kind == "FullyConnected" else 1)
        for kind, count, rate in zip(file.topology, file.npus_count, file.bandwidth, strict=True)
    ]
    size, *rest = file.npus_count
    notes = ["the first dimension is taken as the node, the second as its NICs"]
    usual = default_node(device).nics
    nics = {"count": usual.count, "bandwidth_gb_per_s": usual.bandwidth_gb_per_s}
    nics["latency_us"] = usual.latency_us
    if rest:
        latency = file.latency[1] / 1000
        nics = {"count": size, "bandwidth_gb_per_s": rates[1], "latency_us": latency}
    else:
        notes.append(f"NICs: those of a {device.default_node}, which one node does not use")
    node = {
        "name": name,
        "device": device.name,
        "num_gpus": size,
        "gpu_link": {"bandwidth_gb_per_s_per_gpu": rates[0], "latency_us": file.latency[0] / 1000},
        "direct_links": file.topology[0] == "FullyConnected" and size > 1,
        "nics": nics,
    }
    num_nodes = 1
    fabric: list[dict[str, Any]] = []
    for level, count in enumerate(rest, 1):
        num_nodes *= count
        if level < len(rest):
            above = file.latency[level + 1] - file.latency[level]
            fabric.append(
                {
                    "name": f"dimension-{level + 1}",
                    "nodes_per_switch": num_nodes,
                    "oversubscription": max(1.0, rates[1] / rates[level + 1]),
                    "latency_us": max(0.0, above / 1000),
                }
            )
    return Reading(nodes=[{"node": node, "count": num_nodes}], fabric=fabric, notes=notes)


def _check(document: Document, file: AstraSimFile) -> None:
    problems = []
    for key in ("npus_count", "bandwidth", "latency"):
        values = getattr(file, key)
        if len(values) != len(file.topology):
            message = f"{key} has {len(values)} entries"
            expected = f"{len(file.topology)}, one for each dimension of topology"
            problems.append(problem_at(document, (key,), message, expected=expected))
        for position, value in enumerate(values):
            least = 0 if key == "latency" else 1
            if not least <= value <= 10**9:
                where, expected = (key, position), f"{least} to 1,000,000,000"
                problems.append(problem_at(document, where, f"{value:g}", expected=expected))
    if file.npus_count[0] > MAX_NODE_GPUS:
        message, expected = f"{file.npus_count[0]:,} NPUs in a node", f"at most {MAX_NODE_GPUS:,}"
        problems.append(problem_at(document, ("npus_count", 0), message, expected=expected))
    document.raise_problems(problems)


def _wrong(where: str, message: str, expected: str) -> InputError:
    return InputError(Problem(where=where, message=message, expected=expected))
