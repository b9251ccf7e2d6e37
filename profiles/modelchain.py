"""A model YAML checked layer by layer, joint by joint, and turned into a ModelSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from profiles.fileschema import problem_at, validate
from profiles.layers import (
    Attention,
    Block,
    Conv2d,
    CrossAttention,
    CustomLayer,
    Embedding,
    ExpertFeedForward,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    Linear,
    Table,
)
from profiles.model import LayerRun, ModelSpec
from profiles.modelfile import (
    AttentionFile,
    BlockFile,
    Conv2dFile,
    DenseFile,
    EmbeddingFile,
    ExpertsFile,
    HeadFile,
    LayerFile,
    LinearFile,
    ModelFile,
)
from profiles.sanity import refuse_absurd

if TYPE_CHECKING:
    from profiles.errors import Problem
    from profiles.yamlfile import Document, Mark, Place

__all__ = ["model_of"]


def model_of(document: Document) -> ModelSpec:
    """The model in a ``kind: model`` document. Raises ``InputError`` with every problem."""
    file = validate(document, ModelFile)
    problems: list[tuple[Mark, Problem]] = []
    runs: list[LayerRun] = []
    for position, entry in enumerate(file.layers):
        place = ("layers", position)
        before = file.layers[position - 1] if position else None
        problems += _entry_problems(document, place, entry)
        problems += _joint_problems(document, place, before, entry)
        if not problems:
            runs.append(LayerRun(_layer(entry), entry.count))
    problems += _chain_problems(document, file.layers)
    document.raise_problems(problems)
    model = ModelSpec(
        name=file.name, family="generic", runs=tuple(runs), max_seq_len=file.max_seq_len
    )
    refuse_absurd(model, document, ("layers",))
    return model


def _entry_problems(
    document: Document, place: Place, entry: LayerFile
) -> list[tuple[Mark, Problem]]:
    """What is wrong inside one layer."""
    problems = []
    if isinstance(entry, BlockFile):
        attention, inner = entry.attention, (*place, "attention")
        heads, kv_heads = attention.heads, attention.kv_heads
        if kv_heads is not None and heads % kv_heads:
            message = f"{heads} heads over {kv_heads} key/value heads"
            cure = "kv_heads that divide heads"
            problems.append(problem_at(document, (*inner, "kv_heads"), message, expected=cure))
        if attention.latent is not None:
            size = attention.latent.rope_dim + attention.latent.nope_dim
            if attention.head_dim not in (None, size):
                message = f"head_dim {attention.head_dim} of latent attention"
                cure = f"rope_dim + nope_dim = {size}"
                problems.append(problem_at(document, (*inner, "head_dim"), message, expected=cure))
        elif attention.head_dim is None and entry.hidden % heads:
            message = f"hidden {entry.hidden} over {heads} heads"
            cure = "heads that divide hidden, or head_dim"
            problems.append(problem_at(document, (*inner, "heads"), message, expected=cure))
        experts = entry.feed_forward
        if isinstance(experts, ExpertsFile) and experts.top_k > experts.num_experts:
            message = f"top_k {experts.top_k} of {experts.num_experts} experts"
            where = (*place, "feed_forward", "top_k")
            problems.append(problem_at(document, where, message, expected="at most num_experts"))
    if entry.count > 1 and (ends := _ends(entry)) and ends[0] != ends[1]:
        message = f"{entry.count} layers in a row from {ends[0]} to {ends[1]}"
        expected = "equal input and output, or count 1"
        problems.append(problem_at(document, (*place, "count"), message, expected=expected))
    return problems


def _joint_problems(
    document: Document, place: Place, before: LayerFile | None, entry: LayerFile
) -> list[tuple[Mark, Problem]]:
    """What is wrong between a layer and the one before it."""
    left, right = (_ends(before) if before is not None else None), _ends(entry)
    if before is not None and _tokens(before) != _tokens(entry):
        return []  # another tower begins
    if left is None or right is None or left[1] == right[0]:
        return []
    message = f"the layer takes {right[0]}, and the one before it gives {left[1]}"
    return [problem_at(document, place, message, expected="equal widths between neighbours")]


def _tokens(entry: LayerFile) -> int | None:
    """Tokens of one sequence in a layer, where they are its own."""
    return entry.tokens if isinstance(entry, BlockFile | LinearFile) else None


def _ends(entry: LayerFile) -> tuple[str, str] | None:
    """What a layer takes and gives, None where that is not known."""
    if isinstance(entry, EmbeddingFile | BlockFile | HeadFile):
        return f"width {entry.hidden}", f"width {entry.hidden}"
    if isinstance(entry, LinearFile):
        return f"width {entry.in_features}", f"width {entry.out_features}"
    return _image_ends(entry) if isinstance(entry, Conv2dFile) else None


def _image_ends(entry: Conv2dFile) -> tuple[str, str]:
    pad = 2 * (entry.kernel // 2)
    height = (entry.height + pad - entry.kernel) // entry.stride + 1
    width = (entry.width + pad - entry.kernel) // entry.stride + 1
    taken = f"{entry.in_channels} channels of {entry.height} x {entry.width}"
    return taken, f"{entry.out_channels} channels of {height} x {width}"


def _chain_problems(document: Document, layers: list[LayerFile]) -> list[tuple[Mark, Problem]]:
    """What is wrong with the order of the layers."""
    problems = []
    last = len(layers) - 1
    embedding = layers[0] if isinstance(layers[0], EmbeddingFile) else None
    for position, entry in enumerate(layers):
        place = ("layers", position)
        if isinstance(entry, EmbeddingFile) and position > 0:
            cure = "the embedding as the first layer"
            problems.append(problem_at(document, place, "a later embedding", expected=cure))
        if isinstance(entry, HeadFile):
            if position != last:
                cure = "the head as the last layer"
                problems.append(problem_at(document, place, "an earlier head", expected=cure))
            if entry.tied and (embedding is None or embedding.vocab != entry.vocab):
                cure = "an embedding of the same vocabulary at the start"
                where = (*place, "tied")
                problems.append(problem_at(document, where, "a tied head", expected=cure))
    return problems


def _layer(entry: LayerFile) -> Layer:
    """The value of one entry."""
    if isinstance(entry, BlockFile):
        fields = entry.model_dump(exclude={"kind", "count", "attention", "feed_forward"})
        return Block(
            **fields,
            attention=_attention(entry.attention, entry.hidden),
            feed_forward=(
                FeedForward(**entry.feed_forward.model_dump())
                if isinstance(entry.feed_forward, DenseFile)
                else ExpertFeedForward(**entry.feed_forward.model_dump())
            ),
        )
    value_type = _VALUE_TYPES[entry.kind]
    layer: Layer = value_type(**entry.model_dump(exclude={"kind", "count"}))
    return layer


_VALUE_TYPES: Final[dict[str, Any]] = {
    "embedding": Embedding,
    "head": Head,
    "linear": Linear,
    "conv2d": Conv2d,
    "table": Table,
    "custom": CustomLayer,
}


def _attention(file: AttentionFile, hidden: int) -> Attention:
    latent = None if file.latent is None else LatentAttention(**file.latent.model_dump())
    own_dim = latent.rope_dim + latent.nope_dim if latent else hidden // file.heads
    head_dim = file.head_dim or own_dim
    return Attention(
        **file.model_dump(exclude={"latent", "cross", "kv_heads", "head_dim", "value_head_dim"}),
        kv_heads=file.kv_heads or file.heads,
        head_dim=head_dim,
        value_head_dim=file.value_head_dim or (latent.nope_dim if latent else head_dim),
        latent=latent,
        cross=None if file.cross is None else CrossAttention(**file.cross.model_dump()),
    )
