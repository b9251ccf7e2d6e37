"""Errors of many estimates in four figures, and the table that shows them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Number, median and 90 % quantile of the errors without their sign, median with it."""

    n: int
    median: float
    p90: float
    bias: float


def figures(errors: Sequence[float]) -> Figures:
    sizes = sorted(abs(error) for error in errors)
    return Figures(
        n=len(sizes),
        median=median(sizes),
        p90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        bias=median(errors),
    )


def table(first: str, found: Mapping[str, Figures]) -> str:
    """In Markdown, one line a key."""
    lines = [f"| {first} | n | median | P90 | bias |", "| --- | --- | --- | --- | --- |"]
    for name, own in found.items():
        words = " | ".join(f"{100 * cell:.1f} %" for cell in (own.median, own.p90, own.bias))
        lines.append(f"| {name} | {own.n} | {words} |")
    return "\n".join(lines)
