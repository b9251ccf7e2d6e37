"""LayerGroups: the ranks with which one layer is computed, by what they share."""

from __future__ import annotations

from dataclasses import dataclass

from executor.models.context import WHOLE, ContextGroup
from executor.models.exchange import ALL_EXPERTS, ExpertGroup
from executor.models.tensorgroup import ALONE, TensorGroup

__all__ = ["LayerGroups"]


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """``tensor`` splits the layer, ``context`` its sequences, ``experts`` its experts."""

    tensor: TensorGroup = ALONE
    context: ContextGroup = WHOLE
    experts: ExpertGroup = ALL_EXPERTS
