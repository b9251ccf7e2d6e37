"""Fingerprints: whether an input is still the one that a plan was made for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

__all__ = ["fingerprint"]


def fingerprint(value: Any) -> str:
    """SHA-256 of a frozen value's facts, in hexadecimal.

    The value's own name is a label and no fact. Fields at their default are left out, so that a
    field which a later version adds changes no fingerprint of what does not use it.
    """
    plain = {key: part for key, part in _plain(value).items() if key != "name"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        stated = {
            field.name: _plain(getattr(value, field.name))
            for field in fields(value)
            if field.default is MISSING or getattr(value, field.name) != field.default
        }
        return {"type": type(value).__name__, **stated}
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value
