"""ModelSpec: a model as the planner sees it, a chain of layers with kinds and shapes.

Equal layers in a row are one run, so a model of 126 equal blocks is one run of 126 and costs no
more to plan than a model of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from profiles.layers import Block, Embedding, ExpertFeedForward, Head, Layer, Split, layer_kind

__all__ = ["LayerRun", "ModelSpec"]


@dataclass(frozen=True, slots=True)
class LayerRun:
    """``count`` equal layers in a row."""

    layer: Layer
    count: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: a chain of runs of equal layers.

    ``family`` is the Hugging Face ``model_type`` (or ``generic``), kept for exporters.
    ``max_seq_len`` is what the model was made for (None = unknown). ``mtp_layers`` are
    multi-token-prediction modules, stated apart and not part of the chain.
    """

    name: str
    family: str
    runs: tuple[LayerRun, ...]
    max_seq_len: int | None = None
    mtp_layers: int = 0

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The chain, one entry a layer."""
        return tuple(run.layer for run in self.runs for _ in range(run.count))

    @property
    def num_layers(self) -> int:
        """Layers of the chain, embedding and head included."""
        return sum(run.count for run in self.runs)

    @cached_property
    def num_blocks(self) -> int:
        """Layers that carry a number: all but embedding and head."""
        return sum(run.count for run in self.runs if not isinstance(run.layer, Embedding | Head))

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """``embedding`` and ``head`` by name, every other layer by its number from 0."""
        names, number = [], 0
        for layer in self.layers:
            if isinstance(layer, Embedding | Head):
                names.append(layer_kind(layer))
            else:
                names.append(str(number))
                number += 1
        return tuple(names)

    def runs_between(self, first: int, stop: int) -> tuple[LayerRun, ...]:
        """The layers at positions ``first`` .. ``stop - 1`` as runs."""
        found, position = [], 0
        for run in self.runs:
            count = min(position + run.count, stop) - max(position, first)
            if count > 0:
                found.append(LayerRun(run.layer, count))
            position += run.count
        return tuple(found)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Number of layers by kind, in the order of first appearance."""
        kinds: dict[str, int] = {}
        for run in self.runs:
            kind = layer_kind(run.layer)
            kinds[kind] = kinds.get(kind, 0) + run.count
        return kinds

    @property
    def hidden(self) -> int | None:
        """Width of the residual stream, None for a model without blocks."""
        return next((run.layer.hidden for run in self.runs if isinstance(run.layer, Block)), None)

    @property
    def tied(self) -> bool:
        """Whether the head's projection is the embedding's matrix."""
        return any(isinstance(run.layer, Head) and run.layer.tied for run in self.runs)

    @property
    def has_experts(self) -> bool:
        """Whether some of its blocks have experts."""
        return "moe-block" in self.kinds

    @cached_property
    def params_total(self) -> int:
        """Parameters, a tied matrix once, multi-token-prediction modules left out."""
        return sum(_stored(run.layer) * run.count for run in self.runs)

    @cached_property
    def params_active(self) -> int:
        """Parameters that one token meets: top_k of the routed experts, all the rest."""
        return sum(_active(run.layer) * run.count for run in self.runs)


def _stored(layer: Layer) -> int:
    total = sum(parameter.count for parameter in layer.parameters())
    if isinstance(layer, Head) and layer.tied:
        total -= layer.vocab * layer.hidden
    return total


def _active(layer: Layer) -> int:
    total = _stored(layer)
    if isinstance(layer, Block) and isinstance(layer.feed_forward, ExpertFeedForward):
        routed = sum(p.count for p in layer.parameters() if p.split is Split.EXPERT)
        experts = layer.feed_forward.num_experts
        total -= routed - routed // experts * layer.feed_forward.top_k
    return total
