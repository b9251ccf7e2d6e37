"""Did you mean: the names most similar to one that is not known."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint with the most similar names, empty where none is similar."""
    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower()[:100], by_lower, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(by_lower[each] for each in close)}?" if close else ""
