"""JSON read strictly, with the place of every value.

The data come from the ``json`` module. JSON is nearly a subset of YAML, so the places come from
YAML's parser, and where that cannot follow, messages name the file only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from profiles import yamlfile
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read"]


def read(path: str | Path) -> yamlfile.Document:
    """Read a JSON object. Raises ``InputError`` where it cannot be read as JSON."""
    text = yamlfile.read_text(path)
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated.extend(key for key in set(keys) if keys.count(key) > 1)
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        message = f"not valid JSON: {error.msg}" if text.strip() else "the file is empty"
        raise InputError(Problem(where=where, message=message)) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(Problem(where=str(path), message=f"not valid JSON: {reason}")) from None
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "a single value"
        raise InputError(
            Problem(where=f"{path}:1:1", message=f"the file holds {kind}", expected="an object")
        )
    try:
        places = yamlfile.parse(text, str(path))
    except InputError:
        places = yamlfile.Document(path=str(path), data=data)
    found = places.found
    if repeated and not found:
        message = f"the key {repeated[0]!r} stands twice"
        found = ((yamlfile.Mark(0, 0), Problem(where=str(path), message=message)),)
    return yamlfile.Document(
        path=str(path), data=data, values=places.values, keys=places.keys, found=found
    )


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not a number of JSON")
