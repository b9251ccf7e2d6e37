"""Strategy: how one layer is split, in the peer's words; Vocab: how embedding and head are."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

SHORT: Final = re.compile(r"(\d+)-(\d+)(\*?)-(\d+)(f?)(-c)?(-sp)?")


class Strategy(NamedTuple):
    """Degrees; ``zero3`` or else the case's default (ZeRO-2 or plain data parallelism).

    ``neighbours``: whether the ranks of a TP group follow one another.
    """

    pp: int
    tp: int
    sp: int
    cp: int
    dp: int
    zero3: bool
    recompute: bool = False
    neighbours: bool = True

    @property
    def degree(self) -> int:
        """TP or SP: never both."""
        return max(self.tp, self.sp)

    @property
    def sharded(self) -> int:
        """Ranks that hold the same parameters: among them ZeRO shards."""
        return self.dp * self.sp * self.cp

    def __str__(self) -> str:
        star = "*" if self.degree > 1 else ""
        context = f"-cp{self.cp}" if self.cp > 1 else ""
        return (
            f"{self.pp}-{self.degree}{star}-{self.dp}{'f' * self.zero3}{context}"
            f"{'-c' * self.recompute}{'-sp' * (self.sp > 1)}"
        )


class Vocab(NamedTuple):
    """How embedding and head are split; ``ulysses`` by SP, of degree 1 too."""

    strategy: Strategy
    ulysses: bool

    def __str__(self) -> str:
        way = "sp" if self.ulysses else "tp"
        return f"{way}{self.strategy.degree}{'f' * self.strategy.zero3}"


def parse_strategy(text: str, *, engine: str = "main") -> Strategy:
    """The short form. In v2.4.0 a star is only there where TP ranks could also stand apart."""
    match = SHORT.fullmatch(text)
    if match is None:
        raise ValueError(text)
    pp, degree, star, dp, zero3, recompute, ulysses = match.groups()
    apart = engine != "main" and int(degree) > 1 and int(dp) > 1 and not star
    return Strategy(
        pp=int(pp),
        tp=1 if ulysses else int(degree),
        sp=int(degree) if ulysses else 1,
        cp=1,
        dp=int(dp),
        zero3=bool(zero3),
        recompute=bool(recompute),
        neighbours=not apart,
    )
