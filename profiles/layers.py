"""Layer kinds: what models are made of, with shapes and parameter tensors.

A layer is a frozen value; equal layers are equal values. Every layer lists its parameter tensors
once, with how tensor and expert parallelism split them; counts, memory and communication are
derived from that list and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Attention",
    "Block",
    "Conv2d",
    "CustomLayer",
    "Embedding",
    "ExpertFeedForward",
    "FeedForward",
    "Head",
    "LatentAttention",
    "Layer",
    "Linear",
    "Norm",
    "Parameter",
    "QKNorm",
    "Split",
    "Table",
    "layer_kind",
]


class Split(StrEnum):
    """How a parameter tensor is divided over ranks."""

    COLUMN = "column"  # over tp, along the output dim
    ROW = "row"  # over tp, along the input dim
    KV = "kv"  # over tp up to the number of key/value heads, replicated beyond
    VOCAB = "vocab"  # over tp, along the (padded) vocabulary
    EXPERT = "expert"  # over ep by expert, then over expert_tp
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor: name inside its layer, full shape, and its split."""

    name: str
    shape: tuple[int, ...]
    split: Split

    @property
    def count(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


class Norm(StrEnum):
    """Kind of normalisation; RMSNorm has a weight only, LayerNorm a weight and a bias, or less."""

    RMS = "rms"
    LAYER = "layer"
    LAYER_NO_BIAS = "layer-no-bias"
    LAYER_NO_WEIGHT = "layer-no-weight"
    NONE = "none"

    @property
    def vectors(self) -> int:
        """Learned vectors of one norm."""
        return {Norm.RMS: 1, Norm.LAYER: 2, Norm.LAYER_NO_BIAS: 1}.get(self, 0)


class QKNorm(StrEnum):
    """Normalisation of queries and keys."""

    NONE = "none"
    PER_HEAD = "per-head"  # one weight of head_dim, shared by the heads (Qwen3)
    FULL = "full"  # one weight over all heads (OLMo 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Low-rank projections of multi-head latent attention (DeepSeek V2/V3).

    ``query_rank`` None means that queries are projected directly (V2-Lite).
    """

    query_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention:
    """A second attention of a block, to another tower's output: ``source_tokens`` of a sequence,
    each of width ``source_hidden``. Its heads are those of the self-attention.
    """

    source_hidden: int
    source_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Self-attention: heads, key/value heads, sizes of a head, and its variants.

    ``window``: keys that a query sees at most (None = all). ``value_head_dim`` differs from
    ``head_dim`` only for latent attention, where ``head_dim`` is rope_dim + nope_dim.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    window: int | None = None
    causal: bool = True
    latent: LatentAttention | None = None
    rope: bool = True
    sinks: bool = False  # one learned logit a head beside the keys (gpt-oss)
    cross: CrossAttention | None = None

    @property
    def query_width(self) -> int:
        """Elements of all queries of one token."""
        return self.heads * self.head_dim

    @property
    def context_width(self) -> int:
        """Elements of the attention output of one token, the input of the output projection."""
        return self.heads * self.value_head_dim

    def parameters(self, hidden: int) -> tuple[Parameter, ...]:
        """Parameter tensors for a model of width ``hidden``."""
        weights = self._latent(hidden) if self.latent else self._qkv(hidden)
        weights.append(Parameter("o_proj", (self.context_width, hidden), Split.ROW))
        if self.sinks:
            weights.append(Parameter("sinks", (self.heads,), Split.COLUMN))
        if self.output_bias:
            weights.append(Parameter("o_bias", (hidden,), Split.REPLICATED))
        if self.qk_norm is QKNorm.PER_HEAD:
            weights.append(Parameter("qk_norm", (2, self.head_dim), Split.REPLICATED))
        elif self.qk_norm is QKNorm.FULL:
            weights.append(Parameter("q_norm", (self.query_width,), Split.COLUMN))
            weights.append(Parameter("k_norm", (self.kv_heads * self.head_dim,), Split.KV))
        if self.cross is not None:
            width = self.kv_heads * (self.head_dim + self.value_head_dim)
            weights += [
                Parameter("cross_q_proj", (hidden, self.query_width), Split.COLUMN),
                Parameter("cross_kv_proj", (self.cross.source_hidden, width), Split.KV),
                Parameter("cross_o_proj", (self.context_width, hidden), Split.ROW),
            ]
        return tuple(weights)

    def _qkv(self, hidden: int) -> list[Parameter]:
        key, value = self.kv_heads * self.head_dim, self.kv_heads * self.value_head_dim
        weights = [
            Parameter("q_proj", (hidden, self.query_width), Split.COLUMN),
            Parameter("kv_proj", (hidden, key + value), Split.KV),
        ]
        if self.qkv_bias:
            weights.append(Parameter("q_bias", (self.query_width,), Split.COLUMN))
            weights.append(Parameter("kv_bias", (key + value,), Split.KV))
        return weights

    def _latent(self, hidden: int) -> list[Parameter]:
        latent = self.latent
        assert latent is not None
        key_value = self.heads * (latent.nope_dim + self.value_head_dim)
        weights = [
            Parameter("kv_down", (hidden, latent.kv_rank + latent.rope_dim), Split.REPLICATED),
            Parameter("kv_norm", (latent.kv_rank,), Split.REPLICATED),
            Parameter("kv_up", (latent.kv_rank, key_value), Split.COLUMN),
        ]
        if latent.query_rank is None:
            weights.append(Parameter("q_proj", (hidden, self.query_width), Split.COLUMN))
        else:
            weights += [
                Parameter("q_down", (hidden, latent.query_rank), Split.REPLICATED),
                Parameter("q_norm", (latent.query_rank,), Split.REPLICATED),
                Parameter("q_up", (latent.query_rank, self.query_width), Split.COLUMN),
            ]
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Dense feed-forward of inner width ``ffn_hidden``; gated = SwiGLU-like, three matrices."""

    ffn_hidden: int
    gated: bool
    bias: bool = False

    @property
    def up_width(self) -> int:
        """Output elements of the first projection for one token (gate and up together)."""
        return self.ffn_hidden * (2 if self.gated else 1)

    def parameters(self, hidden: int) -> tuple[Parameter, ...]:
        """Parameter tensors for a model of width ``hidden``."""
        weights = [
            Parameter("up_proj", (hidden, self.up_width), Split.COLUMN),
            Parameter("down_proj", (self.ffn_hidden, hidden), Split.ROW),
        ]
        if self.bias:
            weights.append(Parameter("up_bias", (self.up_width,), Split.COLUMN))
            weights.append(Parameter("down_bias", (hidden,), Split.REPLICATED))
        return tuple(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFeedForward:
    """Mixture of experts: ``top_k`` of ``num_experts`` routed experts, and shared ones.

    ``shared_hidden`` is the inner width of all shared experts together (0 = none);
    ``correction_bias`` is DeepSeek V3's per-expert routing bias.
    """

    num_experts: int
    top_k: int
    expert_hidden: int
    shared_hidden: int = 0
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    shared_gate: bool = False

    @property
    def expert_up_width(self) -> int:
        """Output elements of one expert's first projection for one token."""
        return self.expert_hidden * (2 if self.gated else 1)

    @property
    def shared(self) -> FeedForward | None:
        """The shared experts as one dense feed-forward, or None."""
        if not self.shared_hidden:
            return None
        return FeedForward(ffn_hidden=self.shared_hidden, gated=self.gated, bias=self.bias)

    def parameters(self, hidden: int) -> tuple[Parameter, ...]:
        """Parameter tensors for a model of width ``hidden``."""
        experts, up = self.num_experts, self.expert_up_width
        weights = [
            Parameter("router", (hidden, experts), Split.REPLICATED),
            Parameter("experts_up", (experts, hidden, up), Split.EXPERT),
            Parameter("experts_down", (experts, self.expert_hidden, hidden), Split.EXPERT),
        ]
        if self.router_bias or self.correction_bias:
            weights.append(Parameter("router_bias", (experts,), Split.REPLICATED))
        if self.bias:
            weights.append(Parameter("experts_bias", (experts, up + hidden), Split.EXPERT))
        if self.shared is not None:
            weights += [
                Parameter(f"shared_{weight.name}", weight.shape, weight.split)
                for weight in self.shared.parameters(hidden)
            ]
        if self.shared_gate:
            weights.append(Parameter("shared_gate", (hidden,), Split.REPLICATED))
        return tuple(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A transformer block. ``num_norms`` is 2, 4 with norms after the sublayers too (Gemma 2),
    1 where attention and feed-forward share one (GPT-J); cross-attention adds one. ``parallel``:
    both read one input. ``tokens``: of one sequence, where that is not the training's length (a
    vision tower, an encoder).
    """

    hidden: int
    attention: Attention
    feed_forward: FeedForward | ExpertFeedForward
    norm: Norm
    num_norms: int = 2
    parallel: bool = False
    dropout: bool = False
    tokens: int | None = None

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameter tensors of the block."""
        count = self.num_norms + (self.attention.cross is not None)
        norms = Parameter("norms", (count * self.norm.vectors, self.hidden), Split.REPLICATED)
        return (
            *self.attention.parameters(self.hidden),
            *self.feed_forward.parameters(self.hidden),
            norms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Token embedding, with learned positions (``positions`` rows, 0 = none) and maybe a norm."""

    vocab: int
    hidden: int
    positions: int = 0
    norm: Norm = Norm.NONE
    dropout: bool = False

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameter tensors of the embedding."""
        weights = [Parameter("tokens", (self.vocab, self.hidden), Split.VOCAB)]
        if self.positions:
            weights.append(Parameter("positions", (self.positions, self.hidden), Split.REPLICATED))
        if self.norm is not Norm.NONE:
            shape = (self.norm.vectors, self.hidden)
            weights.append(Parameter("norm", shape, Split.REPLICATED))
        return tuple(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Final norm, projection to the vocabulary and the loss.

    ``tied``: the projection is the embedding's matrix. It is counted once in the model, but a
    pipeline holds it on the first and on the last stage.
    """

    vocab: int
    hidden: int
    norm: Norm
    tied: bool = False
    bias: bool = False

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameter tensors of the head, the tied projection included."""
        weights = [
            Parameter("norm", (self.norm.vectors, self.hidden), Split.REPLICATED),
            Parameter("projection", (self.vocab, self.hidden), Split.VOCAB),
        ]
        if self.bias:
            weights.append(Parameter("bias", (self.vocab,), Split.VOCAB))
        return tuple(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A dense matrix on ``tokens`` rows a sample (None = the sequence length)."""

    in_features: int
    out_features: int
    bias: bool = True
    tokens: int | None = None

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameter tensors of the layer."""
        weight = Parameter("weight", (self.in_features, self.out_features), Split.COLUMN)
        if not self.bias:
            return (weight,)
        return weight, Parameter("bias", (self.out_features,), Split.COLUMN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv2d:
    """A convolution with a square kernel over an image of ``height`` x ``width`` per sample."""

    in_channels: int
    out_channels: int
    kernel: int
    height: int
    width: int
    stride: int = 1
    bias: bool = True

    @property
    def output_pixels(self) -> int:
        """Positions of the output, with padding kernel // 2."""
        pad = self.kernel // 2
        rows = (self.height + 2 * pad - self.kernel) // self.stride + 1
        columns = (self.width + 2 * pad - self.kernel) // self.stride + 1
        return rows * columns

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameter tensors of the layer."""
        shape = (self.out_channels, self.in_channels, self.kernel, self.kernel)
        weight = Parameter("weight", shape, Split.COLUMN)
        if not self.bias:
            return (weight,)
        return weight, Parameter("bias", (self.out_channels,), Split.COLUMN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding table of ``rows`` x ``dim`` with ``lookups`` a sample (recommendation)."""

    rows: int
    dim: int
    lookups: int

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameter tensors of the table."""
        return (Parameter("weight", (self.rows, self.dim), Split.VOCAB),)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLayer:
    """A layer known only by its totals per sample: FLOP and traffic of the forward pass,
    parameters, bytes saved for backward, and bytes of its output. ``splits``: tensor parallelism
    divides its parameters, FLOP and traffic (the output stays whole).
    """

    forward_flop: int
    forward_bytes: int
    num_parameters: int
    saved_bytes: int
    output_bytes: int
    splits: bool = False

    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters as one tensor."""
        split = Split.COLUMN if self.splits else Split.REPLICATED
        return (Parameter("weight", (self.num_parameters,), split),)


type_of_layer = {
    Embedding: "embedding",
    Head: "head",
    Linear: "linear",
    Conv2d: "conv2d",
    Table: "table",
    CustomLayer: "custom",
}
Layer = Embedding | Block | Head | Linear | Conv2d | Table | CustomLayer


def layer_kind(layer: Layer) -> str:
    """Short name of a layer's kind: ``block`` is dense, ``moe-block`` has experts."""
    if isinstance(layer, Block):
        return "moe-block" if isinstance(layer.feed_forward, ExpertFeedForward) else "block"
    return type_of_layer[type(layer)]
