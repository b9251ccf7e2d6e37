"""What a layer is made of once a strategy has split it: operators with shapes per rank.

An operator says what runs in each pass and what is kept for backward. The account follows
Korthikanti et al. 2022 (section 4) for transformer blocks: with dropout, unfused attention and no
recomputation it gives their 34 s b h + 5 a s^2 b bytes a layer exactly.
Ignored: attention masks, rotary tables, and other tensors that do not grow with s b h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodel.work import Collective, CollectiveKind, Gemm, Group, Stream, Work
from profiles.layers import Norm

if TYPE_CHECKING:
    from costmodel.layout import Strategy
    from profiles.training import TrainingSpec

__all__ = [
    "NO_WORK",
    "Operator",
    "Saved",
    "Shard",
    "TensorParallelWork",
    "eager_norm_bytes",
    "gemm",
    "normalised",
    "padded_vocab",
    "stream_operator",
]

VOCAB_MULTIPLE = 128  # Megatron's make_vocab_size_divisible_by
FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor kept from forward to backward. ``dropped_by``: the selective-recompute module
    that computes it anew.
    """

    name: str
    bytes: int
    dropped_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator on one rank for one micro-batch.

    ``backward_input`` makes the gradient of the input, ``backward_weight`` that of the weight
    (zero-bubble schedules move it), ``beside`` runs while the former does. ``module`` is what
    selective recomputation may name. ``transient_bytes`` live only while the operator runs
    backward.
    """

    name: str
    module: str = ""
    forward: tuple[Work, ...] = ()
    backward_input: tuple[Work, ...] = ()
    backward_weight: tuple[Work, ...] = ()
    beside: tuple[Work, ...] = ()
    saved: tuple[Saved, ...] = ()
    transient_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelWork:
    """Collectives at one end of a tensor-parallel region, by pass; ``again``: gathered a second
    time for the weight gradient, since only the shard was kept, while the input gradient is
    computed (Korthikanti et al. 2022, section 4.2.2).
    """

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    again: tuple[Work, ...] = ()


NO_WORK = TensorParallelWork()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Sizes that a strategy leaves to one rank. Tokens are ``micro_batch`` x sequence / cp.
    ``own_tokens``: the layer's sequence, where that is not the training's.
    """

    strategy: Strategy
    training: TrainingSpec
    micro_batch: int
    own_tokens: int | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of one sequence on all ranks."""
        return self.own_tokens or self.training.seq_len

    @property
    def seq(self) -> int:
        """Tokens of one sequence on this rank."""
        return -(-self.seq_len // self.strategy.cp)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on this rank."""
        return self.micro_batch * self.seq

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        return self.strategy.tp

    @property
    def sp_tokens(self) -> int:
        """Tokens of the parts between tensor-parallel regions."""
        return -(-self.tokens // self.tp) if self.strategy.sequence_parallel else self.tokens

    @property
    def kept_tokens(self) -> int:
        """Tokens of what is kept of the input of a tensor-parallel region."""
        return self.tokens if self.training.keeps_gathered else self.sp_tokens

    @property
    def element(self) -> int:
        """Bytes of one activation element."""
        return self.training.param_bytes

    def enter_tp(self, width: int) -> TensorParallelWork:
        """Collectives where activations of ``width`` enter a tensor-parallel region."""
        if self.tp == 1:
            return NO_WORK
        size = self.tokens * width * self.element
        if not self.strategy.sequence_parallel:
            reduce = Collective(CollectiveKind.ALL_REDUCE, Group.TP, size)
            return TensorParallelWork(backward=(reduce,))
        gather = Collective(CollectiveKind.ALL_GATHER, Group.TP, size)
        scatter = Collective(CollectiveKind.REDUCE_SCATTER, Group.TP, size)
        again = () if self.training.keeps_gathered else (gather,)
        return TensorParallelWork(forward=(gather,), backward=(scatter,), again=again)

    def leave_tp(self, width: int) -> TensorParallelWork:
        """Collectives where activations of ``width`` leave a tensor-parallel region."""
        if self.tp == 1:
            return NO_WORK
        size = self.tokens * width * self.element
        if not self.strategy.sequence_parallel:
            reduce = Collective(CollectiveKind.ALL_REDUCE, Group.TP, size)
            return TensorParallelWork(forward=(reduce,))
        gather = Collective(CollectiveKind.ALL_GATHER, Group.TP, size)
        scatter = Collective(CollectiveKind.REDUCE_SCATTER, Group.TP, size)
        return TensorParallelWork(forward=(scatter,), backward=(gather,))


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary rows after padding to a multiple of 128 x tp, as Megatron-LM does it."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


def gemm(
    name: str,
    shape: tuple[int, int, int],
    *,
    saved: tuple[Saved, ...] = (),
    module: str = "",
    groups: int = 1,
    block: bool = True,
    enter: TensorParallelWork = NO_WORK,
    leave: TensorParallelWork = NO_WORK,
) -> Operator:
    """A GEMM of (m, n, k): input gradient m x k x n, weight gradient k x n x m, with the
    collectives of the tensor-parallel region that it opens or closes.
    """
    m, n, k = shape
    return Operator(
        name=name,
        module=module,
        forward=(*enter.forward, Gemm(m, n, k, groups, block), *leave.forward),
        backward_input=(*leave.backward, Gemm(m, k, n, groups, block), *enter.backward),
        backward_weight=(Gemm(k, n, m, groups, block, weight_gradient=True),),
        beside=enter.again,
        saved=saved,
    )


def stream_operator(
    name: str,
    elements: int,
    shard: Shard,
    *,
    module: str = "",
    reads: int = 1,
    writes: int = 1,
    saved: tuple[Saved, ...] = (),
    passes: int = 1,
) -> Operator:
    """An element-wise operator on ``elements`` of the activation type.

    Backward reads the output gradient and the saved inputs and writes the input gradients.
    ``passes``: how many kernels it is, each of which passes through memory so.
    """
    size = elements * shard.element * passes
    return Operator(
        name=name,
        module=module,
        forward=(Stream(size * (reads + writes), passes),),
        backward_input=(Stream(size * (2 * reads + writes), passes),),
        saved=saved,
    )


def normalised(name: str, width: int, shard: Shard) -> Saved:
    """The input of the GEMM ``name``, behind a norm that can be computed again."""
    return Saved(f"{name} input", shard.kept_tokens * width * shard.element, "layernorm")


def eager_norm_bytes(norm: Norm, shard: Shard) -> int:
    """Bytes an element that an RMSNorm of several kernels keeps beside its input: a copy of it in
    fp32, and what its weight is multiplied with. Where the latter is in fp32 as well, as PyTorch
    has it on CPUs, the input in 16 bits is not kept, which comes to the same.
    """
    if norm is not Norm.RMS or shard.training.norms_are_fused:
        return 0
    return shard.element + (FP32 if shard.element < FP32 else 0)
