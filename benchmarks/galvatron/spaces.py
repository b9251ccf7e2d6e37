"""The space of each engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.galvatron import mainspace, space24

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.figures import Figures
    from benchmarks.galvatron.space import Family


def families(case: Case, figures: Figures) -> Iterator[Family]:
    """Every family of the engine's space, without those that another one contains."""
    if case.engine == "main":
        return mainspace.families(case, figures)
    return space24.families(case, figures)
