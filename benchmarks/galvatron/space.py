"""What may be chosen: families of plans that differ in embedding and head and in layer counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from benchmarks.galvatron.cases import Case, LayerKind
    from benchmarks.galvatron.figures import Figures
    from benchmarks.galvatron.strategy import Strategy


class Vocab(NamedTuple):
    """How embedding and head are split; ``ulysses`` by SP, of degree 1 too."""

    strategy: Strategy
    ulysses: bool

    def __str__(self) -> str:
        return f"{'sp' if self.ulysses else 'tp'}{self.strategy.degree}" + (
            "f" if self.strategy.zero3 else ""
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """Plans of one (pp, chunks, cut, buffer): which strategy each layer takes is open.

    ``counts[stage][kind]`` layers; ``steady_ms[kind, strategy]`` one micro-batch without gradient
    reduction, ``sync_ms`` what that adds; ``layer_mib[stage, kind, strategy]`` whole MiB;
    ``ends_ms[vocab, stage]``, ``fixed_mib[vocab, stage]``. ``pairs``: where all layers take one
    strategy, (vocab, strategy) that go together. ``least`` and ``most``: the degrees that set the
    batch's cut (v2.4.0) and the buffer.
    """

    pp: int
    chunks: int
    mode: str
    least: int
    most: int
    cut: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    strategies: tuple[Strategy, ...]
    vocabs: tuple[Vocab, ...]
    steady_ms: NDArray[np.float64]
    sync_ms: NDArray[np.float64]
    layer_mib: NDArray[np.int64]
    ends_ms: NDArray[np.float64]
    fixed_mib: NDArray[np.int64]
    pairs: tuple[tuple[int, int], ...] = ()


def kinds_of_stages(
    kinds: tuple[LayerKind, ...], cut: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """How many layers of each kind each stage has."""
    owners = [index for index, kind in enumerate(kinds) for _ in range(kind.count)]
    counts, start = [], 0
    for length in cut:
        own = owners[start : start + length]
        counts.append(tuple(own.count(index) for index in range(len(kinds))))
        start += length
    return tuple(counts)


def even_cut(num_layers: int, pp: int) -> tuple[int, ...]:
    """Equal stages, the remainder on the last."""
    each = num_layers // pp
    return (*[each] * (pp - 1), num_layers - each * (pp - 1))


def degrees(world: int, most: int = -1) -> list[int]:
    """Divisors up to a limit (-1: none): the powers of two where the world is one, as the peer
    has them, and for other worlds what divides them.
    """
    return [d for d in range(1, world + 1) if world % d == 0 and (most == -1 or d <= most)]


def measured_degrees(figures: Figures, *, curves: bool, ulysses: bool) -> set[int]:
    """TP (or SP) degrees whose activations and, where they are looked up, collectives are known."""
    found = set.intersection(*(set(layer.activation_mib) for layer in figures.layers))
    if curves:
        table = figures.links.all_to_all if ulysses else figures.links.gather
        found &= {1, *table}
    return found


def families(case: Case, figures: Figures) -> Iterator[Family]:
    """Every family of the engine's space, without those that another one contains."""
    from benchmarks.galvatron import mainspace, space24  # noqa: PLC0415 - they build on this module

    yield from (mainspace if case.engine == "main" else space24).families(case, figures)
