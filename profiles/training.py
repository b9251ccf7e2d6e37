"""TrainingSpec: what is trained with what: batch, precision, optimizer, kernels.

Every default is stated here and printed by ``parplan plan``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "DEFAULT_GLOBAL_BATCH",
    "DEFAULT_SEQ_LEN",
    "AttentionKernel",
    "CudaGraphs",
    "Dispatch",
    "GradDtype",
    "LossKernel",
    "Optimizer",
    "Precision",
    "TrainingSpec",
]

# Where neither a file nor a flag says them: four million tokens a step.
DEFAULT_GLOBAL_BATCH = 1024
DEFAULT_SEQ_LEN = 4096
FP32_BYTES = 4


class Precision(StrEnum):
    """Precision of the matrix multiplications and of the weights that they read.

    ``fp8-tensorwise``: block GEMMs in fp8 with a scale per tensor, everything else in bf16;
    ``fp8-blockwise``: a scale per row or block (MXFP8); ``nvfp4``: four bits and such scales.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_TENSORWISE = "fp8-tensorwise"
    FP8_BLOCKWISE = "fp8-blockwise"
    NVFP4 = "nvfp4"

    @property
    def bytes(self) -> int:
        """Bytes of one weight or activation element."""
        return 4 if self is Precision.FP32 else 2

    @property
    def gemm(self) -> str:
        """Key of the device's peak rate for the GEMMs of a block."""
        if self is Precision.NVFP4:
            return "fp4"
        return "fp8" if self.is_quantised else self.value

    @property
    def other(self) -> str:
        """Key of the device's peak rate for attention and for the head."""
        return "bf16" if self.is_quantised else self.value

    @property
    def is_quantised(self) -> bool:
        """Whether the operands of block GEMMs are converted to fewer bits first."""
        return self in (Precision.FP8_TENSORWISE, Precision.FP8_BLOCKWISE, Precision.NVFP4)


class GradDtype(StrEnum):
    """Data type in which gradients are accumulated and reduced."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def bytes(self) -> int:
        """Bytes of one gradient element."""
        return 4 if self is GradDtype.FP32 else 2


class AttentionKernel(StrEnum):
    """Attention kernel: ``fused`` is the vendor's (cuDNN); ``unfused`` stores the scores, with
    scale, mask and softmax in one kernel; ``eager`` stores them too, in PyTorch's own operators.
    """

    FLASH1 = "flash1"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    FUSED = "fused"
    UNFUSED = "unfused"
    EAGER = "eager"

    @property
    def stores_scores(self) -> bool:
        """Whether the s x s scores go to memory."""
        return self in (AttentionKernel.UNFUSED, AttentionKernel.EAGER)


class LossKernel(StrEnum):
    """How the cross entropy runs. ``fused``: on each rank's part of the vocabulary, in place, in
    fp32; ``half``: the same in the activation type; ``eager``: PyTorch's own, on logits gathered
    over tensor parallelism; ``sharded``: PyTorch's own on each rank's part, the logits given up
    before its backward (torchtitan); ``chunked``: that in eight pieces of the tokens.
    """

    FUSED = "fused"
    HALF = "half"
    EAGER = "eager"
    SHARDED = "sharded"
    CHUNKED = "chunked"


class CudaGraphs(StrEnum):
    """What the host launches as one CUDA graph instead of kernel by kernel: nothing; of each layer
    what lies outside the routed experts (the sizes of their GEMMs are only known once tokens are
    routed); each whole layer; the whole step. Megatron-Core's ``cuda_graph_scope``.
    """

    NONE = "none"
    OUTSIDE_EXPERTS = "outside-experts"
    LAYERS = "layers"
    STEP = "step"


class Dispatch(StrEnum):
    """How tokens travel to their experts: ``once`` to each rank or node that has some of them
    (DeepEP, HybridEP), or ``each``: a copy for each expert, sorted again on arrival (the
    all-to-all of NCCL, as in Megatron's and torchtitan's own dispatchers).
    """

    ONCE = "once"
    EACH = "each"


class Optimizer(StrEnum):
    """Optimizer; the suffix says how its states are kept."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"  # with momentum
    LION = "lion"
    ADAMW_8BIT = "adamw-8bit"
    ADAMW_BF16 = "adamw-bf16"  # states in bf16 and no fp32 copy of the weights

    @property
    def state_bytes(self) -> int:
        """Bytes of the moments of one parameter, without a master copy."""
        return {
            Optimizer.ADAMW: 8,
            Optimizer.ADAM: 8,
            Optimizer.SGD: 4,
            Optimizer.LION: 4,
            Optimizer.ADAMW_8BIT: 2,
            Optimizer.ADAMW_BF16: 4,
        }[self]

    @property
    def keeps_master(self) -> bool:
        """Whether a master copy in fp32 stands beside 16-bit weights."""
        return self is not Optimizer.ADAMW_BF16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """One training run. ``global_batch`` in sequences a step, ``seq_len`` in tokens.

    ``micro_batch`` None lets the search choose. ``fused_kernels``: norm, activation, rotary
    embedding each as one kernel (as in Megatron-LM, Transformer Engine or compiled PyTorch);
    without, each reads and writes memory several times and saves more. ``fused_norms`` says so of
    the norms alone, and ``loss`` how the loss runs (None: as ``fused_kernels``).
    ``keeps_gathered``: what sequence parallelism gathers is kept for the backward pass, as
    PyTorch's DTensor does, instead of gathered again. Under ZeRO-3, ``reduces_in_fp32``: 16-bit
    gradients are copied to fp32 on their way to the shards; ``prefetches``: the next layer's
    weights are gathered while one runs. ``fsdp2``: states are kept as the native executor keeps
    them with PyTorch's FSDP2: shards of the fp32 weights alone, from which working copies are made
    when they are gathered; a layer's gradients in the activation type until they are added to the
    others; vocabularies without padding. ``keeps_half_gradients``: gradients of the last backward
    pass stay in the activation type beside the ones that are accumulated. ``overlaps_experts``:
    tokens of one micro-batch travel while another one's are computed.
    """

    global_batch: int
    seq_len: int
    micro_batch: int | None = None
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    grad_dtype: GradDtype = GradDtype.FP32
    attention: AttentionKernel = AttentionKernel.FLASH2
    fused_kernels: bool = True
    fused_norms: bool | None = None
    loss: LossKernel | None = None
    keeps_gathered: bool = False
    reduces_in_fp32: bool = False
    prefetches: bool = True
    fsdp2: bool = False
    keeps_half_gradients: bool = False
    graphs: CudaGraphs = CudaGraphs.NONE
    dispatch: Dispatch = Dispatch.ONCE
    overlaps_experts: bool = False

    @property
    def norms_are_fused(self) -> bool:
        """Whether each norm is one kernel."""
        return self.fused_kernels if self.fused_norms is None else self.fused_norms

    @property
    def loss_kernel(self) -> LossKernel:
        """How the loss runs."""
        if self.loss is not None:
            return self.loss
        return LossKernel.FUSED if self.fused_kernels else LossKernel.EAGER

    @property
    def reduce_copy_bytes(self) -> int:
        """Bytes of the copy of a gradient element that is reduced."""
        return 4 if self.reduces_in_fp32 else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes that a parameter's gradient keeps, whatever is reduced of them."""
        return self.grad_dtype.bytes + (self.param_bytes if self.keeps_half_gradients else 0)

    @property
    def gradient_traffic(self) -> int:
        """Bytes that the GEMM of a weight's gradient moves for each element: in fp32 it reads the
        sum of the micro-batches before and writes the new one (Megatron's
        ``gradient_accumulation_fusion``), else it writes the gradient.
        """
        return 2 * FP32_BYTES if self.grad_dtype is GradDtype.FP32 else self.param_bytes

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len

    @property
    def param_bytes(self) -> int:
        """Bytes of one parameter as the forward pass reads it."""
        return self.precision.bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer states and master copy of one parameter (ZeRO's K: 12 for Adam)."""
        master = 4 if self.optimizer.keeps_master and self.precision is not Precision.FP32 else 0
        return self.optimizer.state_bytes + master

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer states of one parameter (16, 18, 8, ...)."""
        return self.param_bytes + self.gradient_bytes + self.optimizer_bytes
