"""Dense feed-forward: all of a block's, or the shared experts of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch.nn import functional

from executor.models.parameters import SplitModule, Traits

if TYPE_CHECKING:
    from torch import Tensor

    from executor.models.tensorgroup import TensorGroup
    from profiles.layers import FeedForward

__all__ = ["STD", "NativeFeedForward"]

STD: Final = 0.02  # of initial weights


class NativeFeedForward(SplitModule):
    """Gated (SiLU) or plain (tanh-GELU) feed-forward."""

    def __init__(self, spec: FeedForward, hidden: int, tp: TensorGroup, out_std: float) -> None:
        """Gate and up are two matrices, so that a split divides both alike."""
        super().__init__(tp)
        self.gated = spec.gated
        for name in ("gate", "up") if spec.gated else ("up",):
            self.add(f"{name}_proj", (spec.ffn_hidden, hidden), Traits(split=0, std=STD))
            if spec.bias:
                self.add(f"{name}_bias", (spec.ffn_hidden,), Traits(split=0))
        self.add("down_proj", (hidden, spec.ffn_hidden), Traits(split=1, std=out_std))
        if spec.bias:
            self.add("down_bias", (hidden,), Traits(partial=tp.sequence))

    def _up(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.part(f"{name}_proj"), self.own(f"{name}_bias"))

    def inner(self, x: Tensor) -> Tensor:
        """Whole sequences -> the activation, before the last projection."""
        up = self._up("up", x)
        if self.gated:
            return functional.silu(self._up("gate", x)) * up
        return functional.gelu(up, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        """Whole sequences -> residual stream."""
        summed = self.tp.leave(functional.linear(self.inner(x), self.part("down_proj")))
        bias = self.own("down_bias")
        return summed if bias is None else summed + bias
