"""What a search answers: simulated plans, and what was shown about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costmodel.estimate import Estimate
    from costmodel.layout import Layout
    from planner.choices import Candidate

__all__ = ["Finalist", "SearchResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A simulated plan and the candidate that it comes from."""

    candidate: Candidate
    layout: Layout
    estimate: Estimate

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal where two plans are the same in all that a user would call different."""
        return (*self.candidate.degrees, self.candidate.zero)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan, the next best different ones, and the proof.

    ``bound_s``: no layout of the space is faster. ``gap`` is (step - bound) / step. ``proven``:
    the gap is zero. ``pruned`` counts candidates by what excluded them, ``refused`` what the
    space left out, by rule. ``complete`` is False when the search was stopped from outside.
    ``tried`` is every simulated layout that fits.
    """

    finalists: tuple[Finalist, ...]
    bound_s: float
    candidates: int
    visited: int
    simulated: int
    pruned: dict[str, int]
    refused: dict[str, int]
    complete: bool
    tried: tuple[Finalist, ...] = ()

    @property
    def best(self) -> Finalist | None:
        """The fastest plan that fits, None if there is none."""
        return self.finalists[0] if self.finalists else None

    @property
    def gap(self) -> float:
        """Relative distance of the best plan from the bound."""
        if self.best is None:
            return 1.0
        return max(0.0, 1 - self.bound_s / self.best.estimate.step_s)

    @property
    def proven(self) -> bool:
        """Whether the best plan is shown to be the fastest."""
        return self.best is not None and self.gap == 0.0
