"""The schema of every kind of file, and its JSON Schema for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from profiles.calibrationfile import CalibrationFile
from profiles.clusterfile import ClusterFile
from profiles.hardwarefile import DeviceFile, NodeFile
from profiles.measuredfile import ProfileFile
from profiles.modelfile import CatalogModelFile, ModelFile
from profiles.target import TargetFile
from profiles.trainingfile import TrainingFile

if TYPE_CHECKING:
    from profiles.fileschema import FileSchema

__all__ = ["SCHEMAS", "json_schema"]

SCHEMAS: Final[dict[str, type[FileSchema]]] = {
    "device": DeviceFile,
    "node": NodeFile,
    "cluster": ClusterFile,
    "model": ModelFile,
    "catalog-model": CatalogModelFile,
    "training": TrainingFile,
    "calibration": CalibrationFile,
    "profile": ProfileFile,
    "target": TargetFile,
}


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file."""
    return SCHEMAS[kind].model_json_schema()
