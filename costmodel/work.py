"""Work: the few kinds of thing that a device or a link does, with shapes.

FLOP are what the arithmetic needs (2mnk for a GEMM; both score and context products of attention,
the masked half included, as torch's counter has it); what a kernel really executes is
``costmodel.compute``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.training import AttentionKernel

__all__ = ["AttentionCore", "Collective", "CollectiveKind", "Gemm", "Group", "Stream", "Work"]


class Group(StrEnum):
    """Which group of ranks a collective runs in."""

    TP = "tp"
    CP = "cp"
    EP = "ep"
    EXPERT_TP = "expert_tp"


class CollectiveKind(StrEnum):
    """The collectives of training."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    RING_EXCHANGE = "ring-exchange"  # each rank's block visits all others (ring attention)


@dataclass(frozen=True, slots=True)
class Gemm:
    """``groups`` products of an m x k by a k x n matrix. ``block``: of a block's weights, so it
    runs in the block's GEMM precision (fp8 where asked for). ``weight_gradient``: the result is
    added to a weight's gradient.
    """

    m: int
    n: int
    k: int
    groups: int = 1
    block: bool = True
    weight_gradient: bool = False

    @property
    def flop(self) -> int:
        """2 m n k per product."""
        return 2 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCore:
    """Scores, softmax and context of one layer; shapes per rank.

    ``query_len`` queries attend to ``key_len`` keys; ``visible`` is the mean number of keys that
    a query sees (causal: about half, window: at most its width).
    """

    batch: int
    heads: int
    query_len: int
    key_len: int
    head_dim: int
    value_head_dim: int
    visible: float
    kernel: AttentionKernel
    backward: bool = False

    @property
    def flop(self) -> int:
        """Forward: two products. Backward: four, and flash kernels compute the scores again."""
        pairs = 2 * self.batch * self.heads * self.query_len * self.key_len
        both = pairs * (self.head_dim + self.value_head_dim)
        if not self.backward:
            return both
        again = 0 if self.kernel.stores_scores else pairs * self.head_dim
        return 2 * both + again


@dataclass(frozen=True, slots=True)
class Stream:
    """Element-wise work: bytes read and written by ``kernels`` kernels."""

    bytes: int
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective; ``bytes`` is the size of the *whole* (unsharded) tensor of one rank's group:
    the result of an all-gather, the input of a reduce-scatter or all-reduce, what one rank sends
    (its own share included) in an all-to-all, one rank's own block in a ring exchange.
    ``copies`` (all-to-all): how many ranks each part goes to; one copy travels to each sub-tree.
    """

    kind: CollectiveKind
    group: Group
    bytes: int
    copies: int = 1


Work = Gemm | AttentionCore | Stream | Collective
