"""Files that describe a machine or a cluster for other tools -> a cluster file.

The content tells the format: XML is NCCL's, a line that starts with GPU0 heads the matrix of
``nvidia-smi topo -m``, ``SwitchName=`` or a YAML list is Slurm's, ``npus_count:`` ASTRA-sim's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from profiles import yamlfile
from profiles.astrasim import read_astra_sim
from profiles.clusterfile import cluster_of
from profiles.errors import InputError, Problem
from profiles.ncclxml import read_nccl_xml
from profiles.shorthand import Catalog
from profiles.slurmtopology import is_topology_conf, read_topology_conf, read_topology_yaml
from profiles.topomatrix import is_topo_matrix, read_topo_matrix
from profiles.wiring import Told, described_node

if TYPE_CHECKING:
    from profiles.wiring import Reading

__all__ = ["FORMATS", "read_topology", "refuse_topology"]

FORMATS: Final = (
    "the output of nvidia-smi topo -m, a file of NCCL_TOPO_DUMP_FILE, Slurm's topology.conf or "
    "topology.yaml, or a network file of ASTRA-sim"
)
_ASTRA: Final = re.compile(r"^\s*npus_count\s*:", re.MULTILINE)
_SLURM_YAML: Final = re.compile(r"^- *topology *:", re.MULTILINE)


def read_topology(
    path: str | Path,
    *,
    device: str | None = None,
    num_nodes: int | None = None,
    num_nics: int | None = None,
    nic_gb_per_s: float | None = None,
) -> tuple[str, tuple[str, ...]]:
    """The text of a cluster file, and notes on what the file left open. Raises ``InputError``
    with the line that is wrong, or with the flag that is needed.
    """
    told = Told(device=device, num_nodes=num_nodes, num_nics=num_nics, nic_gb_per_s=nic_gb_per_s)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-._")[:60] or "cluster"
    reading = _reading(yamlfile.read_text(path), str(path), told, name)
    data = {"schema_version": 1, "kind": "cluster", "name": name, "nodes": reading.nodes}
    if reading.fabric:
        data["fabric"] = reading.fabric
    lines = [f"Read from {Path(path).name} by parplan import-cluster.", *reading.notes]
    comments = "".join(f"# {line}\n" for line in lines)
    text = comments + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=96)
    cluster_of(yamlfile.parse(text, f"{path}, as a cluster file"), Catalog("--device"))
    return text, tuple(reading.notes)


def refuse_topology(path: Path) -> None:
    """Raise ``InputError`` for a file that ``read_topology`` reads, where a cluster is wanted."""
    text = yamlfile.read_text(path)
    forms = (_ASTRA.search(text), _SLURM_YAML.search(text), text.lstrip().startswith("<"))
    if any(forms) or is_topo_matrix(text) or is_topology_conf(text):
        message = "is a topology of another tool"
        hint = f"parplan import-cluster {path} makes one of it"
        expected = "a cluster YAML"
        raise InputError(Problem(where=str(path), message=message, expected=expected, hint=hint))


def _reading(text: str, path: str, told: Told, name: str) -> Reading:
    if text.lstrip().startswith("<"):
        return described_node(read_nccl_xml(text, path), told, f"{name}-node")
    if is_topo_matrix(text):
        return described_node(read_topo_matrix(text, path), told, f"{name}-node")
    if is_topology_conf(text):
        return read_topology_conf(text, path, told)
    if _ASTRA.search(text):
        return read_astra_sim(yamlfile.parse(text, path), told, f"{name}-node")
    if _SLURM_YAML.search(text):
        return read_topology_yaml(yamlfile.parse(text, path), told)
    raise InputError(Problem(where=path, message="is of no format that is known", expected=FORMATS))
