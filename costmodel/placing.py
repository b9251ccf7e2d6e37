"""Layers on stages: an even cut, and the chunks of a cut under one recomputation."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from costmodel.layout import Chunk, LayerSpan
from profiles.layers import Block, Embedding

if TYPE_CHECKING:
    from costmodel.layout import Recompute, Strategy
    from costmodel.schedules import Path
    from profiles.model import ModelSpec

__all__ = ["even_cut", "placed_chunks"]


def even_cut(blocks: int, count: int) -> list[int]:
    """Blocks of each of ``count`` chunks in model order. The first chunk has the embedding and
    the last one the head, so inner ones take what does not divide.
    """
    share, more = divmod(blocks, count)
    inner = [*range(1, count - 1), 0, count - 1]
    fuller = set(inner[:more])
    return [share + (virtual in fuller) for virtual in range(count)]


def placed_chunks(
    model: ModelSpec,
    sizes: list[int],
    path: Path,
    plain: Strategy,
    recompute: tuple[Recompute, int | None],
) -> tuple[Chunk, ...]:
    """The chunks of a cut, at the places of ``path``; embedding and head stand at the ends and are
    never recomputed. ``recompute``: how, and how many blocks of a chunk (None: all).
    """
    option, most = recompute
    changed = replace(plain, recompute=option)
    layers = model.layers
    lead = int(isinstance(layers[0], Embedding))
    placed, first = [], 0
    for virtual, size in enumerate(sizes):
        stop = first + size + (lead if virtual == 0 else 0)
        if virtual == len(sizes) - 1:
            stop = len(layers)
        taken, own = 0, []
        for layer in layers[first:stop]:
            takes = isinstance(layer, Block) and (most is None or taken < most)
            taken += takes
            own.append(changed if takes else plain)
        spans = []
        for strategy, group in groupby(own):
            end = first + len(list(group))
            spans.append(LayerSpan(first, end, strategy))
            first = end
        placed.append(Chunk(*path[virtual], tuple(spans)))
    return tuple(placed)
