"""``torch.compile`` of the blocks of a chain, each between what must stay as it is.

A block is one region, with the collectives of tp inside; where it is recomputed in full, the
region is what is computed again. A block that keeps or recomputes parts of itself has one region
for each part in between, since what a compiled region keeps is the compiler's choice: selective
recomputation, the input that sequence parallelism gathers again, and full recomputation under tp,
which ends before the last collective; and so has one whose keys and values go round a ring. FSDP
gathers and reduces around a block, so outside.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from costmodel.layout import RecomputeKind
from executor.models.block import NativeBlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from executor.models.chain import Chain

__all__ = ["compile_blocks"]


def compile_blocks(chain: Chain) -> None:
    """Compile the blocks of ``chain`` when they first run; alike blocks share what is compiled."""
    told = r"Dynamo detected a call to a `functools\.lru_cache`"  # of angles, which never change
    warnings.filterwarnings("ignore", told, UserWarning)
    for layer in chain.layers.values():
        for module, method in _regions(layer) if isinstance(layer, NativeBlock) else ():
            setattr(module, method, torch.compile(getattr(module, method), fullgraph=True))


def _regions(block: NativeBlock) -> Iterator[tuple[nn.Module, str]]:
    """Methods that are compiled, with their modules."""
    kind, in_ring = block.recompute.kind, block.attention.context.ring
    if kind is RecomputeKind.FULL and block.tp.size == 1 and not in_ring:
        yield block, "_plain"
    elif kind is RecomputeKind.NONE and not block.tp.sequence and not in_ring:
        yield block, "forward"
    else:
        yield from ((norm, "forward") for norm in block.norms)
        yield block.attention, "project"
        yield block.feed_forward, "inner"
