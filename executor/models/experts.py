"""Mixture of experts: a router, routed experts dealt out over ranks, shared experts.

What a ``ModelSpec`` leaves open is decided here: a token goes to the ``top_k`` experts of greatest
probability (softmax over all, in float32), and their probabilities are divided by their sum, as
in Mixtral; with one expert its probability stays, or the router would learn nothing. No token is
dropped, and no loss is added for balance.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from executor.models.exchange import Exchange
from executor.models.feedforward import STD, NativeFeedForward
from executor.models.parameters import SplitModule, Traits
from executor.models.recomputing import computed_again, without_output

if TYPE_CHECKING:
    from torch import Tensor

    from executor.models.exchange import ExpertGroup
    from executor.models.groups import LayerGroups
    from profiles.layers import ExpertFeedForward

__all__ = ["NativeExpertFeedForward", "NativeExperts"]


class NativeExperts(SplitModule):
    """The experts of this rank, or its parts of them. Weights are (inner width, experts, hidden):
    ep splits the second dim, expert_tp and ZeRO the first, which is the longest.
    """

    def __init__(
        self, spec: ExpertFeedForward, hidden: int, groups: LayerGroups, out_std: float
    ) -> None:
        """Gate and up are two tensors, so that a split divides both alike."""
        super().__init__(groups.tensor)
        self.spec, self.group = spec, groups.experts
        shape = (spec.expert_hidden, spec.num_experts, hidden)
        for name in ("gate", "up") if spec.gated else ("up",):
            self.add(f"{name}_proj", shape, Traits(std=STD))
        self.add("down_proj", shape, Traits(std=out_std))

    @property
    def ranks(self) -> ExpertGroup:
        """The ranks over which experts are dealt out and split."""
        return self.group

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, *, spare: bool) -> Tensor:
        """The weighted sum over its experts for each token of ``x``, (tokens, hidden).

        ``chosen``, ``weights``: (tokens, top_k). ``spare``: keep less, see ``_computed``.
        """
        order = chosen.flatten().argsort(stable=True)
        exchange = Exchange(self.group, _row_counts(chosen, self.spec.num_experts))
        rows = exchange.there(x[order // self.spec.top_k])
        weight = exchange.there(weights.flatten()[order][:, None])
        made = exchange.back(self._computed(rows, weight, exchange.loads, spare=spare))
        of_tokens: Tensor = made[order.argsort()].unflatten(0, chosen.shape)
        return of_tokens.sum(1)

    def _computed(self, rows: Tensor, weight: Tensor, loads: list[int], *, spare: bool) -> Tensor:
        """``rows`` through their experts, times ``weight``. Kept are the rows, what their first
        products are, and unless ``spare`` the activation.
        """
        names = ("gate_proj", "up_proj") if self.spec.gated else ("up_proj",)
        inner = [self._products(name, rows, loads) for name in names]

        def activated(*inner: Tensor) -> Tensor:
            return computed_again(partial(_activated, weight=weight), *inner)

        def last(activation: Tensor) -> Tensor:
            parts = zip(activation.split(loads), self._each("down_proj"), strict=True)
            return torch.cat([part @ own for part, own in parts])

        if spare:
            return without_output(lambda up: activated(*inner[:-1], up), inner[-1], last)
        return last(activated(*inner))

    def _products(self, name: str, rows: Tensor, loads: list[int]) -> Tensor:
        """Rows -> (rows, inner width), each by its expert's matrix."""
        parts = zip(rows.split(loads), self._each(name), strict=True)
        return torch.cat([functional.linear(part, own) for part, own in parts])

    def _each(self, name: str) -> tuple[Tensor, ...]:
        """A weight of each expert of this rank, (inner width, hidden)."""
        return self.part(name).unbind(1)


def _row_counts(chosen: Tensor, num_experts: int) -> Tensor:
    """How many of the rows go to each expert."""
    return chosen.flatten().bincount(minlength=num_experts)


def _activated(*inner: Tensor, weight: Tensor) -> Tensor:
    """(Gate and) up -> the activation of an expert, times the token's weight for it."""
    if len(inner) == 1:
        plain = functional.gelu(inner[0], approximate="tanh")
    else:
        plain = functional.silu(inner[0]) * inner[1]
    return (plain * weight).to(plain.dtype)


class NativeExpertFeedForward(SplitModule):
    """Router, routed experts, shared experts and their gate."""

    def __init__(
        self, spec: ExpertFeedForward, hidden: int, groups: LayerGroups, out_std: float
    ) -> None:
        """Router and gate are whole on every rank, which has tokens of its own."""
        tp = groups.tensor
        super().__init__(tp)
        self.spec = spec
        traits = Traits(std=STD, partial=tp.sequence)
        self.add("router", (spec.num_experts, hidden), traits)
        self.experts = NativeExperts(spec, hidden, groups, out_std)
        self.shared = None
        if spec.shared is not None:
            self.shared = NativeFeedForward(spec.shared, hidden, tp, out_std)
        if spec.shared_gate:
            self.add("shared_gate", (1, hidden), traits)

    def routed(self, x: Tensor, *, spare: bool) -> tuple[Tensor, Tensor | None]:
        """Of own tokens (batch, sequence, hidden): the routed experts' sum, and the gate of the
        shared ones.
        """
        gate, tokens = self.own("shared_gate"), x.flatten(0, 1)
        logits = functional.linear(tokens, self.part("router"))
        wide = torch.promote_types(logits.dtype, torch.float32)
        weights, chosen = logits.to(wide).softmax(-1).topk(self.spec.top_k)
        if self.spec.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        summed = self.experts(tokens, chosen, weights, spare=spare).view_as(x)
        return summed, None if gate is None else functional.linear(x, gate).sigmoid()
