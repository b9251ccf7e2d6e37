"""A model of blocks as a model YAML, which reads back as the same model."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import yaml

from profiles.layers import Block, layer_kind

if TYPE_CHECKING:
    from profiles.layers import Layer
    from profiles.model import ModelSpec

__all__ = ["model_text"]

ALWAYS: Final = ("norm", "tied")  # what a reader looks for, though it may be usual


def model_text(model: ModelSpec, *, comment: str = "") -> str:
    """The YAML of a model; ``comment`` is its first line."""
    document: dict[str, Any] = {"schema_version": 1, "kind": "model", "name": model.name}
    if model.max_seq_len:
        document["max_seq_len"] = model.max_seq_len
    document["layers"] = [_entry(run.layer, run.count) for run in model.runs]
    text = yaml.safe_dump(document, sort_keys=False, width=100)
    return f"# {comment}\n{text}" if comment else text


def _entry(layer: Layer, count: int) -> dict[str, Any]:
    kind = "block" if isinstance(layer, Block) else layer_kind(layer)
    counted = {"count": count} if count > 1 else {}
    return {"kind": kind, **counted, **_fields(layer)}


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a value that are not usual, as plain data."""
    found = {}
    for each in fields(value):
        own = getattr(value, each.name)
        usual = each.default is not MISSING and own == each.default
        if own is None or (usual and each.name not in ALWAYS):
            continue
        found[each.name] = _plain(own)
    return found


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    return value.value if isinstance(value, Enum) else value
