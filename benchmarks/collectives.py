"""Collectives against measurements: python -m benchmarks.collectives [FILE.csv] [--write]

A file has the columns gpu, op, n_gpus, nodes, size_bytes, time_us or busbw_GBps (as nccl-tests
define it), link and notes. Every group of collectives (device, operation, GPUs, nodes) is
predicted by links fitted to the other groups of its device. Prints the table by device, the links
fitted to all, and what could not be predicted with the reason; --write records the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.figures import Figures, figures, table
from costmodel.linkfit import LinkFit, MeasuredCollective, fit_links
from costmodel.work import CollectiveKind
from profiles import load_cluster, shelf
from profiles.calibrations import datasheet
from profiles.shorthand import Catalog
from profiles.topology import Topology

ROOT = Path(__file__).parents[1]
FULL = ROOT.parent / "shared" / "runs" / "collectives.csv"
RECORD = ROOT / "benchmarks" / "collectives.json"
LEAST_BYTES = 2**20
KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
}
# How sources write what the catalogue has under another name.
DEVICES = {"a100-class (not named)": "a100-80g", "mi200-gcd": "mi250x-gcd"}
CONCURRENT = re.compile(r"(\d+) GPUs, groups of (\d+) within node x (\d+) nodes")
IN_NODE = re.compile(r"(\d+) (?:GPU|GCD) node")
RINGS = re.compile(r"\bring\b|NVLS off")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured collective and where it belongs."""

    device: str
    group: tuple[str, int, int]  # operation, GPUs, nodes
    measured: MeasuredCollective


def device_of(gpu: str) -> str:
    """The catalogue's name: V100-SXM2-16GB, H100-80 and v100-16g are what they seem to be."""
    name = DEVICES.get(gpu.lower(), re.sub(r"-sxm\d?", "", gpu.lower()))
    sized = re.sub(r"-(\d+)(gb)?$", r"-\1g", name)
    known = shelf.names_and_aliases("devices")
    found = known.get(sized) or known.get(name)
    if found is None:
        raise ValueError(f"{gpu} is not in the catalogue of devices")
    return found


@cache
def topology(device: str, per_node: int, nodes: int, maker: str) -> Topology:
    """Nodes of the device's usual kind, or of a maker where one is known; of another kind where
    only that one has so many GPUs.
    """
    catalog = Catalog(device)
    names = [catalog.device_file(device).default_node, *shelf.nodes_of(device)]
    kinds = [catalog.node(name) for name in sorted(names, key=lambda name: maker not in name)]
    exact = [node for node in kinds if node.num_gpus == per_node]
    large = [node for node in kinds if node.num_gpus >= per_node]
    if not large:
        raise ValueError(f"no node of the catalogue has {per_node} {device}")
    node = large[0] if nodes == 1 or not exact else exact[0]
    return Topology(load_cluster(f"{nodes}x{node.name}"))


def row_of(cells: dict[str, str]) -> Row:
    """Raises ValueError with the reason why a line says nothing that can be predicted."""
    n, nodes = int(cells["n_gpus"]), int(cells["nodes"])
    if not cells["size_bytes"]:
        raise ValueError("no size is stated")
    size, kind = int(float(cells["size_bytes"])), KINDS.get(cells["op"])
    if kind is None:
        raise ValueError(f"{cells['op']} is no collective")
    if size < LEAST_BYTES:
        raise ValueError("smaller than 1 MiB")
    device, per_node = device_of(cells["gpu"]), n // nodes
    concurrent = CONCURRENT.match(cells["link"])
    in_node = int(concurrent[1]) // nodes if concurrent else per_node
    if stated := IN_NODE.search(cells["link"]):
        in_node = int(stated[1])
    tree = topology(device, in_node, nodes, "aws" if "EFA" in cells["link"] else "")
    stride = tree.cluster.gpus_per_node
    dims = tuple(dim for dim in ((per_node, 1), (nodes, stride)) if dim[0] > 1)
    ranks = tree.cluster.num_gpus if concurrent else (nodes - 1) * stride + per_node
    link = tree.axis(dims, num_ranks=ranks)
    if RINGS.search(cells["notes"]):
        link = replace(link, levels=tuple(replace(each, reduces=False) for each in link.levels))
    return Row(
        device=device,
        group=(cells["op"], n, nodes),
        measured=MeasuredCollective(
            kind=kind, size=size, link=link, seconds=seconds_of(cells, n, size)
        ),
    )


def seconds_of(cells: dict[str, str], n: int, size: int) -> float:
    """The time, or what the bus bandwidth makes of it."""
    if cells["time_us"]:
        return float(cells["time_us"]) * 1e-6
    passes = (2 if cells["op"] == "all_reduce" else 1) * (n - 1) / n
    return passes * size / (float(cells["busbw_GBps"]) * 1e9)


def read(path: Path) -> tuple[list[Row], Counter[str]]:
    """What can be predicted, and how often what cannot for which reason."""
    rows, left_out = [], Counter[str]()
    with path.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            try:
                rows.append(row_of(cells))
            except ValueError as reason:
                left_out[str(reason)] += 1
    return rows, left_out


def cross_validated(rows: list[Row]) -> tuple[dict[str, list[float]], dict[str, LinkFit]]:
    """Errors by device, each group's by links that have not seen it; the links fitted to all."""
    own = datasheet().efficiencies
    devices: dict[str, dict[object, list[MeasuredCollective]]] = {}
    for row in rows:
        groups = devices.setdefault(row.device, {})
        groups.setdefault(row.group, []).append(row.measured)
    errors: dict[str, list[float]] = {}
    fitted = {}
    for device, groups in devices.items():
        errors[device] = []
        for group, held_out in groups.items():
            others = [each for key, some in groups.items() if key != group for each in some]
            found = fit_links(others, own)
            estimates = found.seconds(held_out, own)
            errors[device] += [
                seconds / each.seconds - 1
                for seconds, each in zip(estimates, held_out, strict=True)
            ]
        fitted[device] = fit_links([each for some in groups.values() for each in some], own)
    return errors, fitted


def measure(path: Path) -> tuple[dict[str, Figures], dict[str, LinkFit], Counter[str]]:
    """Figures by device and in total, the links fitted to all, and what was left out."""
    rows, left_out = read(path)
    errors, fitted = cross_validated(rows)
    found = {device: figures(own) for device, own in sorted(errors.items())}
    total = figures([error for own in errors.values() for error in own])
    return {**found, "total": total}, fitted, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FULL)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    found, fitted, left_out = measure(asked.file)
    print(table("device", found))
    for device, own in sorted(fitted.items()):
        print(f"{device}: {own}")
    for reason, count in left_out.items():
        print(f"left out: {count} lines: {reason}")
    if asked.write:
        record = {device: asdict(own) for device, own in found.items()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
