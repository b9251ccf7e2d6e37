"""What is known about models, hardware, training runs and measured behaviour.

The readers of files import pydantic, which is slow, so they are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from profiles.calibration import Calibration
    from profiles.catalog import (
        catalog_names,
        load_calibration,
        load_cluster,
        load_model,
        load_training,
    )
    from profiles.cluster import ClusterSpec
    from profiles.errors import InfeasibleError, InputError
    from profiles.mergedprofile import merged_text
    from profiles.model import ModelSpec
    from profiles.outputfile import refuse_to_overwrite, save_text
    from profiles.profileimport import import_profile
    from profiles.readtopology import read_topology
    from profiles.reference import load_model_or_cluster
    from profiles.target import load_target
    from profiles.training import TrainingSpec

__all__ = [
    "Calibration",
    "ClusterSpec",
    "InfeasibleError",
    "InputError",
    "ModelSpec",
    "TrainingSpec",
    "catalog_names",
    "import_profile",
    "load_calibration",
    "load_cluster",
    "load_model",
    "load_model_or_cluster",
    "load_target",
    "load_training",
    "merged_text",
    "read_topology",
    "refuse_to_overwrite",
    "save_text",
]

_MODULES: Final = {
    "Calibration": "profiles.calibration",
    "ClusterSpec": "profiles.cluster",
    "InfeasibleError": "profiles.errors",
    "InputError": "profiles.errors",
    "ModelSpec": "profiles.model",
    "TrainingSpec": "profiles.training",
    "import_profile": "profiles.profileimport",
    "load_target": "profiles.target",
    "merged_text": "profiles.mergedprofile",
    "load_model_or_cluster": "profiles.reference",
    "read_topology": "profiles.readtopology",
    "refuse_to_overwrite": "profiles.outputfile",
    "save_text": "profiles.outputfile",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "profiles.catalog")), name)
