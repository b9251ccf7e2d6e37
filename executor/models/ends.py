"""The ends of the chain: token embedding, and head with loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.distributed.tensor import Shard
from torch.nn import functional

from costmodel.sharding import is_gathered_twice
from executor.models.block import NativeNorm
from executor.models.feedforward import STD
from executor.models.parameters import SplitModule, Traits, local_part
from executor.models.recomputing import without_output
from executor.models.tensorgroup import vocabulary_loss

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from executor.models.groups import LayerGroups
    from executor.models.tensorgroup import TensorGroup
    from profiles.layers import Embedding, Head

__all__ = ["NativeEmbedding", "NativeHead", "are_gathered_twice"]

TIED_TO: Final = "layers.embedding.tokens"  # as a ``Chain`` calls it


class NativeEmbedding(SplitModule):
    """Tokens (batch, sequence) -> residual stream. Its vocabulary is split over the group."""

    def __init__(self, spec: Embedding, groups: LayerGroups) -> None:
        """The matrix, learned positions and the norm that ``spec`` has."""
        tp = groups.tensor
        super().__init__(tp)
        self.spec, self.context = spec, groups.context
        self.add("tokens", (spec.vocab, spec.hidden), Traits(split=0, std=STD))
        if spec.positions:
            shape = (spec.positions, spec.hidden)
            self.add("positions", shape, Traits(std=STD, partial=tp.sequence))
        self.norm = NativeNorm(spec.norm, spec.hidden, tp, partial=tp.sequence)

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of the tokens; a rank adds nothing for those it does not hold."""
        weight, positions = self.part("tokens"), self.own("positions")
        if self.tp.size == 1:
            x = functional.embedding(tokens, weight)
        else:
            row = tokens - _first_row(self.spec.vocab, self.tp)
            inside = (row >= 0) & (row < weight.shape[0])
            rows = functional.embedding(row.clamp(0, weight.shape[0] - 1), weight)
            x = self.tp.leave(rows * inside[..., None])
        if positions is not None:
            length = tokens.shape[1]
            own = self.context.own(positions[: length * self.context.size], 0)
            x = x + own[self.tp.share(length)]
        normed: Tensor = self.norm(x)
        return normed


class NativeHead(SplitModule):
    """Final norm, projection to the vocabulary, loss. Logits stay split over the group.

    The loss is the sum over tokens divided by ``num_tokens``, those of the whole step, so that
    gradients of micro-batches and replicas only have to be added.
    """

    def __init__(self, spec: Head, groups: LayerGroups, *, num_tokens: int) -> None:
        """The projection, and the norm and bias that ``spec`` has."""
        tp = groups.tensor
        super().__init__(tp)
        self.spec, self.num_tokens = spec, num_tokens
        self.norm = NativeNorm(spec.norm, spec.hidden, tp, partial=tp.sequence)
        like = TIED_TO if spec.tied else ""
        self.add("projection", (spec.vocab, spec.hidden), Traits(split=0, std=STD, like=like))
        if spec.bias:
            self.add("bias", (spec.vocab,), Traits(split=0))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Residual stream and targets (batch, sequence) -> loss, a scalar."""
        weight = self.part("projection")

        def logits(entered: Tensor) -> Tensor:
            return functional.linear(entered, weight, self.own("bias"))

        normed = self.norm(x)
        if self.tp.sequence:
            own = without_output(self.tp.enter, normed, logits)
        else:
            own = logits(self.tp.enter(normed))
        if own.dtype in (torch.bfloat16, torch.float16):
            own = own.float()
        first = _first_row(self.spec.vocab, self.tp)
        loss = vocabulary_loss(own.flatten(0, 1), targets.flatten(), first, self.tp)
        return loss / self.num_tokens

    def tie(self, embedding: NativeEmbedding) -> None:
        """Project with the embedding's matrix."""
        self.register_parameter("projection", embedding.get_parameter("tokens"))


def are_gathered_twice(layers: Iterable[nn.Module]) -> bool:
    """Whether ZeRO-3 gathers a unit of these layers for its backward pass as well."""
    ends = (each.spec for each in layers if isinstance(each, NativeEmbedding | NativeHead))
    return all(is_gathered_twice(spec) for spec in ends)


def _first_row(vocab: int, tp: TensorGroup) -> int:
    """The first token whose row this rank holds."""
    if tp.mesh is None:
        return 0
    _, offset = local_part((vocab,), tp.mesh, [Shard(0)])
    return offset[0]
