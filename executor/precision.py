"""Numbers: the types of weights, of what is computed, and of gradients that are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from profiles.training import GradDtype, Precision

if TYPE_CHECKING:
    from profiles.training import TrainingSpec

__all__ = ["Numbers", "numbers_of"]


@dataclass(frozen=True, slots=True)
class Numbers:
    """``compute`` and ``reduce`` None: as ``master``, in which the optimizer has the weights."""

    master: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether weights are computed with in another type than they are kept in."""
        return self.compute is not None

    @property
    def activations(self) -> torch.dtype:
        """Type of the residual stream."""
        return self.compute or self.master


def numbers_of(training: TrainingSpec) -> Numbers:
    """fp32, or bf16 with fp32 masters, gradients summed in the type that is asked for."""
    if training.precision is Precision.FP32:
        return Numbers()
    assert training.precision is Precision.BF16
    reduce = torch.float32 if training.grad_dtype is GradDtype.FP32 else torch.bfloat16
    return Numbers(torch.float32, torch.bfloat16, reduce)
