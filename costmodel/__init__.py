"""What a layout costs: time, memory, timeline. Pure functions of four inputs.

Everything is loaded when first used. The function ``costmodel.estimate.estimate`` is called
``estimate_layout`` here, since the module already has the shorter name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.estimate import Estimate
    from costmodel.estimate import estimate as estimate_layout
    from costmodel.layout import Layout, Mesh, Strategy

__all__ = ["CostContext", "Estimate", "Layout", "Mesh", "Strategy", "estimate_layout"]

_PLACES: Final = {
    "CostContext": ("context", "CostContext"),
    "Estimate": ("estimate", "Estimate"),
    "Layout": ("layout", "Layout"),
    "Mesh": ("layout", "Mesh"),
    "Strategy": ("layout", "Strategy"),
    "estimate_layout": ("estimate", "estimate"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _PLACES[name]
    return getattr(import_module(f"costmodel.{module}"), own)
