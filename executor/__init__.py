"""Apply a plan: the native PyTorch runtime, and export to and import from other launchers.

Loaded when first used; only the modules that run a plan import torch.

exported = export_plan("plan.yaml", "megatron")
save_files(exported.files, "job")

parallelize(model, load_plan("plan.yaml"))  # a model of transformers, on every rank
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from executor.checking import Checked, check_arguments
    from executor.exporting import Exported, export_layout, export_plan, save_files
    from executor.huggingface import own_sequences, parallelize
    from executor.importing import Asked, Imported, import_job, import_text, save_import
    from executor.launchers.registry import NAMES

__all__ = [
    "NAMES",
    "Asked",
    "Checked",
    "Exported",
    "Imported",
    "check_arguments",
    "export_layout",
    "export_plan",
    "import_job",
    "import_text",
    "own_sequences",
    "parallelize",
    "save_files",
    "save_import",
]

_MODULES: Final = {
    "NAMES": "launchers.registry",
    "Asked": "importing",
    "Checked": "checking",
    "Imported": "importing",
    "check_arguments": "checking",
    "import_job": "importing",
    "import_text": "importing",
    "own_sequences": "huggingface",
    "parallelize": "huggingface",
    "save_import": "importing",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"executor.{_MODULES.get(name, 'exporting')}"), name)
