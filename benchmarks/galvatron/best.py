"""The best plan so far, and what is certain of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from benchmarks.galvatron.relaxation import INFINITE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from benchmarks.galvatron.relaxation import Floats
    from benchmarks.galvatron.space import Family
    from benchmarks.galvatron.strategy import Strategy, Vocab

EQUAL = 1e-12  # relative: times closer than this are one


class Chosen(NamedTuple):
    """A plan: its time, its family, the number of its split of embedding and head, and how many
    layers take each strategy.
    """

    iteration_ms: float
    family: Family
    vocab: int
    counts: NDArray[np.int64]  # [stage, kind, strategy]

    @property
    def vocab_split(self) -> Vocab:
        """How embedding and head are split."""
        return self.family.vocabs[self.vocab]

    def strategies(self) -> list[Strategy]:
        """Of every layer in order; equal ones of a stage stand together."""
        return [
            strategy
            for stage in self.counts
            for kind in stage
            for strategy, count in zip(self.family.strategies, kind, strict=True)
            for _ in range(int(count))
        ]


class Best:
    """Keeps the fastest plan; ``unlisted`` is the least bound of plans that were not looked at."""

    def __init__(self) -> None:
        self.chosen: Chosen | None = None
        self.unlisted = INFINITE
        self.short = INFINITE
        self.num_solved = 0

    @property
    def worth(self) -> float:
        """Only less than this is of interest."""
        return INFINITE if self.chosen is None else self.chosen.iteration_ms * (1 - EQUAL)

    def note_shortage(self, short: Floats) -> None:
        """What plans lack, a row a plan and a column a stage."""
        self.short = min(self.short, float(short.max(1).min()))

    def leave(self, bound: float) -> None:
        """Some plans, none below ``bound``, are not looked at."""
        self.unlisted = min(self.unlisted, bound)

    def take(self, chosen: Chosen) -> None:
        """Keep it if it is the best."""
        if chosen.iteration_ms < self.worth:
            self.chosen = chosen
