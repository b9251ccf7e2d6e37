"""Measurements of other tools -> the text of a profile file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from profiles import yamlfile
from profiles.galvatron import read_galvatron
from profiles.measuredfile import profile_of, profile_text
from profiles.nccltests import read_nccl_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from profiles.measured import Profile

__all__ = ["IMPORTERS", "import_profile"]

Importer: TypeAlias = "Callable[[list[Path], str, str], tuple[Profile, list[str]]]"
IMPORTERS: Final[dict[str, Importer]] = {
    "galvatron": read_galvatron,
    "nccl-tests": read_nccl_tests,
}
TOOLS: Final = {"galvatron": "Hetu-Galvatron", "nccl-tests": "nccl-tests"}


def import_profile(tool: str, paths: Sequence[str | Path]) -> tuple[str, list[str]]:
    """The profile of files, or of folders of files, and notes on what was left out. Raises
    ``InputError`` with every problem of every file.
    """
    files = [Path(path) for path in paths]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", files[0].resolve().stem).strip("-._")[:60] or "profile"
    source = f"{TOOLS[tool]}: {', '.join(path.resolve().name for path in files)}"
    profile, notes = IMPORTERS[tool](files, name, source)
    text = f"# Made by parplan profile import --from {tool}.\n" + profile_text(profile)
    profile_of(yamlfile.parse(text, "the profile made of them"))
    return text, notes
