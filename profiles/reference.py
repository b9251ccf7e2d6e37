"""References: how a file or a notebook names its inputs, and how a name is kept for later.

A reference is a name of the catalogue, a shorthand, or a path. Paths are kept relative to the
file that mentions them, with a leading ``./`` or ``../``, so that they cannot be taken for names
and a folder can be moved as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from profiles import catalog, shelf, yamlfile
from profiles.errors import InputError, Problem
from profiles.nearest import nearest
from profiles.shorthand import is_shorthand

if TYPE_CHECKING:
    from profiles.cluster import ClusterSpec
    from profiles.model import ModelSpec

__all__ = ["is_name", "kept_ref", "load_model_or_cluster", "resolved_ref"]


def is_name(ref: str) -> bool:
    """Whether ``ref`` is a model of the catalogue or a cluster's shorthand, not a path."""
    return is_shorthand(ref) or ref.lower() in shelf.names_and_aliases("models")


def kept_ref(ref: str, folder: str | Path) -> str:
    """``ref`` as a file in ``folder`` should say it."""
    if is_name(ref):
        return ref
    try:
        relative = Path(os.path.relpath(ref, folder)).as_posix()
    except ValueError:  # another drive
        return ref
    return relative if relative.startswith("..") else f"./{relative}"


def resolved_ref(ref: str, folder: str | Path) -> str:
    """What ``ref`` in a file of ``folder`` means from here."""
    if is_name(ref):
        return ref
    path = os.path.normpath(Path(folder) / ref)
    return f"./{path}" if is_name(path) else path


def load_model_or_cluster(ref: str, *, where: str = "reference") -> ModelSpec | ClusterSpec:
    """Whichever ``ref`` names. A catalogue name and a shorthand are tried before paths."""
    if is_shorthand(ref):
        return catalog.load_cluster(ref, where=where)
    if is_name(ref):
        return catalog.load_model(ref, where=where)
    path = Path(ref)
    if path.is_file() and path.suffix.lower() != ".json":
        from profiles.readtopology import refuse_topology  # noqa: PLC0415 - many readers, slow

        refuse_topology(path)
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        kind = yamlfile.read(path).data.get("kind")
        if kind == "cluster":
            return catalog.load_cluster(ref, where=where)
        if kind in ("model", "catalog-model"):
            return catalog.load_model(ref, where=where)
        raise InputError(_wrong_kind(ref, kind))
    if path.exists():
        return catalog.load_model(ref, where=where)
    raise InputError(_neither(ref, where))


def _wrong_kind(ref: str, kind: object) -> Problem:
    hint = (
        "parplan explain reads plans"
        if kind == "parallel-plan"
        else nearest(str(kind), ["model", "cluster"])
    )
    message = "has no kind" if kind is None else f"is of kind {kind!r}"
    return Problem(where=ref, message=message, expected="kind: model or kind: cluster", hint=hint)


def _neither(ref: str, where: str) -> list[Problem]:
    """What either reader says."""
    problems = []
    for load in (catalog.load_model, catalog.load_cluster):
        try:
            load(ref, where=where)
        except InputError as error:
            problems += error.problems
    return problems
