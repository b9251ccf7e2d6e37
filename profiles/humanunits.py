"""Entries of a file in human units <-> frozen values in seconds, bytes and FLOP.

The unit is in the name on both sides: ``forward_s`` is ``forward_ms`` in a file, ``saved_bytes`` is
``saved_mib``, ``bytes_per_s`` is ``gb_per_s``, ``flop_per_s`` is ``tflops``. Every other field is
called alike.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, get_type_hints

from profiles.units import GB, MIB, TERA

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["in_file", "of_file"]

Value = TypeVar("Value")


class _Unit(NamedTuple):
    inside: str
    in_file: str
    size: float  # of the file's unit in that of the inside


DIGITS: Final = 15
UNITS: Final = (
    _Unit("bytes_per_s", "gb_per_s", GB),
    _Unit("flop_per_s", "tflops", TERA),
    _Unit("num_bytes", "mib", MIB),
    _Unit("bytes", "mib", MIB),
    _Unit("seconds", "ms", 1e-3),
    _Unit("_s", "_ms", 1e-3),
)


def _unit(name: str) -> _Unit:
    found = (unit for unit in UNITS if name.endswith(unit.inside))
    return next(found, _Unit("", "", 1))


def _file_name(name: str) -> str:
    unit = _unit(name)
    return name.removesuffix(unit.inside) + unit.in_file


def in_file(entry: Any) -> dict[str, Any]:
    """The entry as plain data in the file's units; what has its default is left out."""
    return {
        _file_name(own.name): _plain(getattr(entry, own.name), _unit(own.name).size)
        for own in fields(entry)
        if not _is_default(getattr(entry, own.name), own)
    }


def _is_default(value: Any, own: Any) -> bool:
    usual = own.default if own.default_factory is MISSING else own.default_factory()
    return usual is not MISSING and bool(value == usual)


def _plain(value: Any, size: float) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part, size) for key, part in value.items()}
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, StrEnum):
        return value.value
    if size == 1 or isinstance(value, bool | str | None):
        return value
    return float(f"{value / size:.{DIGITS}g}")  # hides what division leaves behind


def of_file(kind: type[Value], data: Mapping[str, Any]) -> Value:
    """The value of an entry, whose keys and types a schema has checked. ``data`` may lack keys
    that have a default, and hold None for them.
    """
    types = get_type_hints(kind)
    values = {}
    for own in fields(kind):  # type: ignore[arg-type]
        found = data.get(_file_name(own.name))
        if found is not None:
            values[own.name] = _inside(found, types[own.name], _unit(own.name).size)
    return kind(**values)


def _inside(value: Any, kind: Any, size: float) -> Any:
    if isinstance(value, dict):
        by_degree = getattr(kind, "__args__", (str,))[0] is int
        return {int(k) if by_degree else k: _inside(v, float, size) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    if size == 1 or isinstance(value, bool | str):
        return value
    return round(value * size) if kind is int else value * size
