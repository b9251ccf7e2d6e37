"""Layer kinds: what models are made of, with shapes and parameter tensors.

A layer is a frozen value; equal layers are equal values. Every layer lists its parameter tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from profiles.sublayers import (
    Attention,
    CrossAttention,
    ExpertFeedForward,
    FeedForward,
    LatentAttention,
    Norm,
    Parameter,
    QKNorm,
    Split,
)

__all__ = [
    "Attention",
    "Block",
    "Conv2d",
    "CrossAttention",
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


_KINDS: Final = {
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
    return _KINDS[type(layer)]
