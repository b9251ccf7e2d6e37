"""What layers are made of: parameter tensors and their splits, norms, attention, feed-forward.

Parameter tensors are listed once, with how tensor and expert parallelism split them; counts, memory
and communication are derived from that list and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Attention",
    "CrossAttention",
    "ExpertFeedForward",
    "FeedForward",
    "LatentAttention",
    "Norm",
    "Parameter",
    "QKNorm",
    "Split",
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
