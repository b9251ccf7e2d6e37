"""Schemas of the model YAML (``kind: model``) and of the models of the catalogue."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from profiles.fileschema import FileSchema, Name, Version
from profiles.layers import Norm, QKNorm

__all__ = [
    "AttentionFile",
    "BlockFile",
    "CatalogModelFile",
    "Conv2dFile",
    "DenseFile",
    "EmbeddingFile",
    "ExpertsFile",
    "HeadFile",
    "LayerFile",
    "LinearFile",
    "ModelFile",
]

Width = Annotated[int, Field(ge=1, le=10_000_000)]
Heads = Annotated[int, Field(ge=1, le=65_536)]
Rows = Annotated[int, Field(ge=1, le=10**12)]
Amount = Annotated[int, Field(ge=0, le=10**18)]
Count = Annotated[int, Field(ge=1, le=10_000, description="Equal layers in a row.")]
Once = Annotated[int, Field(ge=1, le=1)]
NormKind = Annotated[Norm, Field(strict=False, description="Kind of normalisation.")]


class LatentFile(FileSchema):
    """Multi-head latent attention; its head_dim is rope_dim + nope_dim."""

    query_rank: Width | None = Field(None, description="Rank of the queries; none = direct.")
    kv_rank: Width
    rope_dim: Heads
    nope_dim: Heads


class CrossFile(FileSchema):
    """Attention to the output of another tower, with the heads of the self-attention."""

    source_hidden: Width = Field(description="Width of the other tower.")
    source_tokens: Width = Field(description="Its tokens of one sequence.")


class AttentionFile(FileSchema):
    """Self-attention of a block."""

    heads: Heads
    kv_heads: Heads | None = Field(None, description="Key/value heads; none = heads.")
    head_dim: Width | None = Field(None, description="Size of a head; none = hidden / heads.")
    value_head_dim: Width | None = Field(None, description="none = head_dim.")
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = Field(QKNorm.NONE, strict=False)
    window: Width | None = Field(None, description="Keys that a query sees; none = all.")
    causal: bool = True
    rope: bool = True
    latent: LatentFile | None = None
    cross: CrossFile | None = Field(None, description="Beside self-attention, as in a decoder.")


class DenseFile(FileSchema):
    """Dense feed-forward."""

    ffn_hidden: Width
    gated: bool = Field(default=True, description="SwiGLU-like: three matrices, not two.")
    bias: bool = False


class ExpertsFile(FileSchema):
    """Mixture of experts."""

    num_experts: Heads
    top_k: Heads = Field(description="Experts that a token is sent to.")
    expert_hidden: Width = Field(description="Inner width of one expert.")
    shared_hidden: int = Field(0, ge=0, le=10_000_000, description="All shared experts together.")
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    shared_gate: bool = False


def _feed_forward_tag(value: Any) -> str:
    if isinstance(value, dict) and {"num_experts", "top_k", "expert_hidden"} & value.keys():
        return "ExpertsFile"
    return "DenseFile"


class EmbeddingFile(FileSchema):
    """Token embedding."""

    kind: Literal["embedding"]
    count: Once = 1
    vocab: Rows
    hidden: Width
    positions: int = Field(0, ge=0, le=10**9, description="Rows of learned positions.")
    norm: NormKind = Norm.NONE
    dropout: bool = False


class BlockFile(FileSchema):
    """Transformer block."""

    kind: Literal["block"]
    count: Count = 1
    hidden: Width
    attention: AttentionFile
    feed_forward: Annotated[
        Annotated[DenseFile, Tag("DenseFile")] | Annotated[ExpertsFile, Tag("ExpertsFile")],
        Discriminator(_feed_forward_tag),
    ]
    norm: NormKind = Norm.RMS
    num_norms: int = Field(2, ge=0, le=4)
    parallel: bool = Field(default=False, description="Both sublayers read one input.")
    dropout: bool = False
    tokens: Width | None = Field(None, description="Of one sequence; none = the training's.")


class HeadFile(FileSchema):
    """Final norm, projection to the vocabulary, loss."""

    kind: Literal["head"]
    count: Once = 1
    vocab: Rows
    hidden: Width
    norm: NormKind = Norm.RMS
    tied: bool = Field(default=False, description="The projection is the embedding's matrix.")
    bias: bool = False


class LinearFile(FileSchema):
    """Dense matrix."""

    kind: Literal["linear"]
    count: Count = 1
    in_features: Width
    out_features: Width
    bias: bool = True
    tokens: Width | None = Field(None, description="Rows a sample; none = the sequence length.")


class Conv2dFile(FileSchema):
    """Convolution with a square kernel."""

    kind: Literal["conv2d"]
    count: Count = 1
    in_channels: Width
    out_channels: Width
    kernel: int = Field(ge=1, le=1_000)
    height: int = Field(ge=1, le=1_000_000)
    width: int = Field(ge=1, le=1_000_000)
    stride: int = Field(1, ge=1, le=1_000)
    bias: bool = True


class TableFile(FileSchema):
    """Embedding table of a recommendation model."""

    kind: Literal["table"]
    count: Count = 1
    rows: Rows
    dim: Width
    lookups: Width = Field(description="Rows that one sample looks up.")


class CustomFile(FileSchema):
    """Layer known by its totals for one sample, forward pass."""

    kind: Literal["custom"]
    count: Count = 1
    forward_flop: Amount
    forward_bytes: Amount = Field(description="Bytes read and written.")
    num_parameters: Amount
    saved_bytes: Amount = Field(description="Bytes kept for the backward pass.")
    output_bytes: Amount
    splits: bool = False


LayerFile = Annotated[
    EmbeddingFile | BlockFile | HeadFile | LinearFile | Conv2dFile | TableFile | CustomFile,
    Field(discriminator="kind"),
]


class ModelFile(FileSchema):
    """A model as a chain of layers."""

    schema_version: Version
    kind: Literal["model"]
    name: Name
    max_seq_len: int | None = Field(None, ge=1, le=10**9, description="Tokens; none = unknown.")
    layers: list[LayerFile] = Field(
        min_length=1, max_length=100_000, description="The layers in the order of the chain."
    )


class ExpectFile(FileSchema):
    """Exact published parameter counts, which the reader must reproduce."""

    params_total: int = Field(ge=1)
    params_active: int = Field(ge=1)


class CatalogModelFile(FileSchema):
    """A model of the catalogue: the fields of its config.json."""

    schema_version: Version
    kind: Literal["catalog-model"]
    name: Name
    aliases: list[Name] = Field([], description="Other names of this entry.")
    source: str = Field(min_length=1, description="Where the numbers come from, with the date.")
    config: dict[str, Any] = Field(description="Fields as in a Hugging Face config.json.")
    expect: ExpectFile
