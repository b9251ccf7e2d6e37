"""Whatever the user names, loaded: a model, a cluster, a training run, a calibration.

A reference is a name of the catalogue or a path. A catalogue name wins over a file of the same
name; ``./name`` is always the file. Schemas are slow to build: those of files that are seldom
read are imported where one is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from profiles import huggingface, shelf, yamlfile
from profiles.errors import InputError, Problem
from profiles.fileschema import validate
from profiles.hardwarefile import DeviceFile, NodeFile
from profiles.modelfile import CatalogModelFile
from profiles.nearest import nearest
from profiles.shorthand import GRAMMAR, Catalog, cluster_from_shorthand, is_shorthand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from profiles.calibration import Calibration
    from profiles.cluster import ClusterSpec
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = [
    "CatalogEntry",
    "catalog_names",
    "load_calibration",
    "load_cluster",
    "load_model",
    "load_training",
]

MODEL_FORMS: Final = (
    "a name of the catalogue, a Hugging Face config.json or its folder, or a model YAML"
)
_PATH_LIKE: Final = re.compile(r"[/\\]|\.(json|ya?ml)$", re.IGNORECASE)


def load_model(ref: str, *, where: str = "model") -> ModelSpec:
    """The model of a catalogue name, a ``config.json`` or its folder, or a model YAML."""
    if ref.lower() in shelf.names_and_aliases("models"):
        return _catalog_model(shelf.find("models", ref, where=where))
    path = _existing(ref)
    if path is None:
        raise InputError(_unknown(ref, where, "models", MODEL_FORMS))
    if path.is_dir():
        if not (path / "config.json").is_file():
            message = f"the folder {ref} has no config.json"
            raise InputError(Problem(where=where, message=message, expected=MODEL_FORMS))
        return huggingface.load_config(path)
    if path.suffix.lower() == ".json":
        return huggingface.load_config(path)
    document = yamlfile.read(path)
    if document.data.get("kind") == "catalog-model":
        return _catalog_model(path)
    from profiles.modelchain import model_of  # noqa: PLC0415 - see above

    return model_of(document)


def _catalog_model(path: Path) -> ModelSpec:
    document = yamlfile.read(path)
    file = validate(document, CatalogModelFile)
    return huggingface.model_from_config(document, name=file.name, place=("config",))


def load_cluster(ref: str, *, where: str = "cluster") -> ClusterSpec:
    """The cluster of a shorthand like ``16x8xh100-80g`` or of a cluster YAML."""
    if is_shorthand(ref):
        return cluster_from_shorthand(ref, where=where)
    path = _existing(ref)
    if path is None:
        raise InputError(_unknown(ref, where, "devices", GRAMMAR))
    from profiles.clusterfile import cluster_of  # noqa: PLC0415 - see above
    from profiles.readtopology import refuse_topology  # noqa: PLC0415 - see above

    refuse_topology(path)
    return cluster_of(yamlfile.read(path), Catalog(where))


def load_calibration(
    stack: str | None, cluster: ClusterSpec, path: str | Path | None = None
) -> tuple[Calibration, str | None]:
    """The calibration of a software stack on the cluster's slowest device, and a note where it
    is not exactly what was asked for. ``path`` names a file of the user's instead.
    """
    from profiles.calibrationfile import calibration_of  # noqa: PLC0415 - see above
    from profiles.calibrations import nearest_calibration  # noqa: PLC0415 - see above

    device = cluster.slowest_device.name
    if path is not None:
        calibration = calibration_of(yamlfile.read(path))
        if calibration.device in ("any", device):
            return calibration, None
        return calibration, f"{calibration.name} was made on {calibration.device}, not on {device}"
    return nearest_calibration(device, stack)


def load_training(
    path: str | Path | None, overrides: Mapping[str, Any] | None = None
) -> TrainingSpec:
    """The training run of a file or of usual values, with ``overrides`` in place of its fields."""
    from profiles import trainingfile  # noqa: PLC0415 - see above

    return trainingfile.load_training(path, overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One line of ``parplan catalog``: ``facts`` by column, in human units."""

    name: str
    aliases: tuple[str, ...]
    facts: dict[str, str | int | float]


def catalog_names(kind: Literal["models", "devices", "nodes"]) -> list[CatalogEntry]:
    """Every entry of a shelf in natural order, with its columns."""
    schemas: dict[str, Any] = {
        "models": CatalogModelFile,
        "devices": DeviceFile,
        "nodes": NodeFile,
    }
    entries = []
    for name in shelf.names(kind):
        file = validate(yamlfile.read(shelf.DATA / kind / f"{name}.yaml"), schemas[kind])
        facts = _FACTS[kind](file)
        entries.append(CatalogEntry(name=name, aliases=tuple(file.aliases), facts=facts))
    return entries


def _model_facts(file: CatalogModelFile) -> dict[str, str | int | float]:
    return {
        "family": str(file.config["model_type"]),
        "parameters": file.expect.params_total,
        "active": file.expect.params_active,
        "source": file.source,
    }


def _device_facts(file: DeviceFile) -> dict[str, str | int | float]:
    peaks = file.peak_tflops
    return {
        "memory GiB": file.memory_gib,
        "memory GB/s": file.memory_bandwidth_gb_per_s,
        "16-bit TFLOP/s": peaks.bf16 or peaks.fp16 or "",
        "fp8 TFLOP/s": peaks.fp8 or "",
        "node": file.default_node,
    }


def _node_facts(file: NodeFile) -> dict[str, str | int | float]:
    return {
        "device": file.device,
        "GPUs": file.num_gpus,
        "link GB/s per GPU": file.gpu_link.bandwidth_gb_per_s_per_gpu,
        "NICs": file.nics.count,
        "GB/s per NIC": file.nics.bandwidth_gb_per_s,
    }


_FACTS: Final[dict[str, Any]] = {
    "models": _model_facts,
    "devices": _device_facts,
    "nodes": _node_facts,
}


def _existing(ref: str) -> Path | None:
    """The path that ``ref`` names, if it is one."""
    try:
        path = Path(ref)
        return path if ref and path.exists() else None
    except (OSError, ValueError):
        return None


def _unknown(ref: str, where: str, kind: Literal["models", "devices"], forms: str) -> Problem:
    """Neither a name nor a path: both possibilities, with the nearest names."""
    shown = ref if len(ref) <= _SHOWN else ref[:_SHOWN] + "..."
    name = Path(ref).stem if _PATH_LIKE.search(ref) else ref
    name = re.sub(r"^([0-9]+x)+", "", name, flags=re.IGNORECASE)
    known = shelf.names_and_aliases(kind)
    hint = nearest(name, known)
    if kind == "devices" and name.lower() in known:
        hint = f"say how many: 8x{name}"
    if _PATH_LIKE.search(ref):
        message = f"there is no file {shown}"
    else:
        message = f"{shown!r} is neither in the catalogue nor a file here"
    return Problem(where=where, message=message, expected=forms, hint=hint)


_SHOWN: Final = 100
