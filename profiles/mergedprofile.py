"""Several profiles as one: layers of one, links of another."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from profiles import yamlfile
from profiles.errors import InputError, Problem
from profiles.measured import Profile
from profiles.measuredfile import SECTIONS, profile_of, profile_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from profiles.measured import DeviceFacts, ModelFacts

__all__ = ["load_profiles", "merged_profile", "merged_text"]


def load_profiles(paths: Sequence[str | Path]) -> Profile:
    """The profile of a file, or of several together. Raises ``InputError``."""
    found = [(str(path), profile_of(yamlfile.read(path))) for path in paths]
    return found[0][1] if len(found) == 1 else merged_profile(found)


def merged_text(paths: Sequence[str | Path]) -> str:
    """The text of the merged profile of files. Raises ``InputError``."""
    return "# Made by parplan profile merge.\n" + profile_text(load_profiles(paths))


def merged_profile(found: Sequence[tuple[str, Profile]]) -> Profile:
    """The entries of all, each once, a later file's after an earlier one's. Raises ``InputError``
    where they tell of different things under one name; ``found`` has their files' names.
    """
    problems: list[Problem] = []
    devices: dict[str, tuple[str, DeviceFacts]] = {}
    models: dict[str, ModelFacts] = {}
    for path, profile in found:
        for own in profile.devices:
            first, known = devices.setdefault(own.device, (path, own))
            problems += _devices_differ(path, own, first, known)
        for facts in profile.models:
            before = models.setdefault(facts.model, facts)
            changed = [
                name
                for name in before.layers.keys() & facts.layers.keys()
                if before.layers[name] != facts.layers[name]
            ]
            if changed:
                message = f"{', '.join(sorted(changed))} of {facts.model} differ from another file"
                problems.append(Problem(where=path, message=message))
    if problems:
        raise InputError(problems)
    entries = {
        section: tuple(
            dict.fromkeys(own for _, profile in found for own in getattr(profile, section))
        )
        for section in SECTIONS
    }
    entries["devices"] = tuple(_completed(own, found) for _, own in devices.values())
    names = dict.fromkeys(profile.name for _, profile in found)
    sources = dict.fromkeys(profile.source for _, profile in found)
    return Profile(name="+".join(names)[:100], source="; ".join(sources), **entries)


def _devices_differ(path: str, own: DeviceFacts, first: str, known: DeviceFacts) -> list[Problem]:
    """Whether two files call different devices, or software, by one name."""
    return [
        Problem(
            where=path,
            message=f"{own.device} was measured with {name} {getattr(own, name)}",
            expected=f"{getattr(known, name)}, as in {first}",
        )
        for name in ("hardware", "torch", "threads")
        if getattr(own, name) != getattr(known, name)
    ]


def _completed(own: DeviceFacts, found: Sequence[tuple[str, Profile]]) -> DeviceFacts:
    """The first facts of a device, with what only a later file has."""
    values = {field.name: getattr(own, field.name) for field in fields(own)}
    for _, profile in found:
        for other in profile.devices:
            if other.device == own.device:
                values = {name: value or getattr(other, name) for name, value in values.items()}
    return type(own)(**values)
