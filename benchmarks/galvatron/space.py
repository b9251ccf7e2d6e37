"""What may be chosen: families of plans that differ in embedding and head and in layer counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from benchmarks.galvatron.cases import Case, LayerKind
    from benchmarks.galvatron.figures import Figures
    from benchmarks.galvatron.sharedrules import Rules
    from benchmarks.galvatron.strategy import Strategy, Vocab


@dataclass(frozen=True, kw_only=True)
class Family:
    """Plans of one (pp, chunks, cut, buffer): which strategy each layer takes is open.

    ``counts[stage][kind]`` layers; ``steady_ms[kind, strategy]`` one micro-batch without gradient
    reduction, ``sync_ms`` what that adds; ``layer_mib[stage, kind, strategy]`` whole MiB;
    ``ends_ms[vocab, stage]``, ``fixed_mib[vocab, stage]``. ``pairs``: where all layers take one
    strategy, (vocab, strategy) that go together. ``ulysses_only``: SP alone, without the buffer of
    TP. ``least`` and ``most``: the degrees that set the batch's cut (v2.4.0) and the buffer.
    """

    pp: int
    chunks: int
    ulysses_only: bool
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


@dataclass(frozen=True)
class Choices:
    """Strategies of a layer under one set of rules and one cut, with their costs; from it the
    families that offer some of them. ``ends`` keeps what embedding and head cost.
    """

    rules: Rules
    cut: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    strategies: tuple[Strategy, ...]
    times: NDArray[np.float64]  # [kind, strategy, with and without reduction]
    mib: NDArray[np.int64]  # [stage, kind, strategy]
    ends: dict[Vocab, tuple[list[float], list[float]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rules: Rules, case: Case, cut: tuple[int, ...], strategies: Sequence[Strategy]
    ) -> Choices:
        """Cost every strategy for every kind of layer on every stage."""
        kinds = range(len(case.kinds))
        times = [[rules.layer_ms(kind, each) for each in strategies] for kind in kinds]
        stages = range(len(cut))
        mib = [[[rules.layer_mib(kind, each, at) for each in strategies] for kind in kinds]
               for at in stages]  # fmt: skip
        counts = kinds_of_stages(case.kinds, cut)
        return cls(rules, cut, counts, tuple(strategies), np.array(times), _whole(mib))

    def family(
        self,
        vocabs: Sequence[Vocab],
        own: list[int],
        *,
        ulysses_only: bool,
        least: int,
        most: int,
        pairs: Sequence[tuple[int, int]],
    ) -> Family:
        """The family that offers the strategies of these numbers."""
        pp = len(self.cut)
        buffer = self.rules.buffer_mib(pp, most, ulysses_only=ulysses_only)
        for vocab in vocabs:
            if vocab not in self.ends:
                self.ends[vocab] = self.rules.ends_ms(vocab), self.rules.ends_mib(vocab)
        return Family(
            pp=pp,
            chunks=self.rules.chunks,
            ulysses_only=ulysses_only,
            least=least,
            most=most,
            cut=self.cut,
            counts=self.counts,
            strategies=tuple(self.strategies[index] for index in own),
            vocabs=tuple(vocabs),
            steady_ms=self.times[:, own, 1],
            sync_ms=self.times[:, own, 0] - self.times[:, own, 1],
            layer_mib=self.mib[:, :, own],
            ends_ms=np.array([self.ends[each][0] for each in vocabs]),
            fixed_mib=_whole([self.ends[each][1] for each in vocabs]) + buffer,
            pairs=tuple(pairs),
        )


def _whole(mib: object) -> NDArray[np.int64]:
    """MiB rounded up."""
    whole: NDArray[np.int64] = np.ceil(np.array(mib)).astype(np.int64)
    return whole


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


def recomputations(case: Case, figures: Figures) -> tuple[bool, ...]:
    """Whether layers may be recomputed: if that was measured and is not switched off."""
    known = all(layer.recomputed_mib is not None for layer in figures.layers)
    return (False, True) if known and not case.options["disable_ckpt"] else (False,)
