"""Consecutive layers of a model as one module: all of it, or what a pipeline stage holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from executor.models.block import NativeBlock
from executor.models.ends import NativeEmbedding, NativeHead
from executor.models.resharding import resharding
from profiles.layers import Block, Embedding, Head

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.layout import Chunk, Strategy
    from executor.models.groups import LayerGroups
    from executor.models.parameters import SplitModule
    from executor.models.resharding import Resharding
    from profiles.model import ModelSpec

__all__ = ["Chain"]


class Chain(nn.Module):
    """The layers of one chunk, keyed by their names in the model, so that parameters are called
    alike whatever the cut.
    """

    def __init__(
        self,
        model: ModelSpec,
        chunk: Chunk,
        groups_of: Callable[[Strategy], LayerGroups],
        *,
        num_tokens: int,
        before: Strategy | None = None,
    ) -> None:
        """On the meta device, whole; ``num_tokens``: of a step; ``before``: the strategy of the
        layer that the chunk follows.
        """
        super().__init__()
        self.layers = nn.ModuleDict()
        self.strategies: dict[str, Strategy] = {}
        self.changes: dict[str, Resharding] = {}  # of what goes into a layer
        for span in chunk.spans:
            groups = groups_of(span.strategy)
            change = before and resharding(before, span.strategy, lambda own: groups_of(own).tensor)
            if change:
                self.changes[model.layer_names[span.first]] = change
            before = span.strategy
            for position in range(span.first, span.stop):
                name, spec = model.layer_names[position], model.layers[position]
                self.strategies[name] = span.strategy
                layer: SplitModule
                if isinstance(spec, Embedding):
                    layer = NativeEmbedding(spec, groups)
                elif isinstance(spec, Head):
                    layer = NativeHead(spec, groups, num_tokens=num_tokens)
                else:
                    assert isinstance(spec, Block)
                    layer = NativeBlock(
                        spec, groups, span.strategy.recompute, num_blocks=model.num_blocks
                    )
                self.layers[name] = layer
        both = "embedding" in self.layers and "head" in self.layers
        self.is_tied = both and model.tied  # with itself; other chunks have copies
        self.tie()

    def tie(self) -> None:
        """Make the tied matrix one, which moving a module to a device undoes."""
        if self.is_tied:
            self.head.tie(self.embedding)

    @property
    def embedding(self) -> NativeEmbedding:
        """The first layer of the model, if it is here."""
        layer = self.layers["embedding"]
        assert isinstance(layer, NativeEmbedding)
        return layer

    @property
    def head(self) -> NativeHead:
        """The last layer of the model, if it is here."""
        layer = self.layers["head"]
        assert isinstance(layer, NativeHead)
        return layer

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens or residual stream -> residual stream, or with the head the loss."""
        for name, layer in self.layers.items():
            if name in self.changes:
                x = self.changes[name](x)
            x = layer(x, targets) if isinstance(layer, NativeHead) else layer(x)
        return x
