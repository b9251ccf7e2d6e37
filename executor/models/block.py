"""A transformer block: norms, grouped-query attention, feed-forward, residual stream.

Activations are (batch, sequence, width). A ``ModelSpec`` says shapes and kinds only; what it
leaves open is what most models have: rotary base 10,000, norm epsilon 1e-5, SiLU in gated and
tanh-GELU in plain feed-forwards, no dropout.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

from executor.models.context import attend, forget_masks
from executor.models.experts import NativeExpertFeedForward
from executor.models.feedforward import STD, NativeFeedForward
from executor.models.parameters import SplitModule, Traits
from executor.models.recomputing import computed_again, without_output
from executor.models.ring import attend_in_ring
from profiles.layers import ExpertFeedForward, Norm, QKNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from costmodel.layout import Recompute
    from executor.models.context import ContextGroup
    from executor.models.groups import LayerGroups
    from executor.models.tensorgroup import TensorGroup
    from profiles.layers import Attention, Block

__all__ = ["NativeBlock", "NativeNorm", "forget_tables", "is_one_kernel"]

EPSILON: Final = 1e-5
ROTARY_BASE: Final = 10_000.0
ALL_FOUR: Final = 4  # norms: before and after both sublayers


def is_one_kernel(x: Tensor) -> bool:
    """Whether PyTorch's RMSNorm of ``x`` is."""
    return x.device.type != "cpu"


class NativeNorm(SplitModule):
    """RMSNorm or LayerNorm over the last dim. ``partial``: ranks see different positions or
    heads, so that their gradients add up. ``split``: over all heads, of which each rank has some.
    """

    def __init__(
        self, kind: Norm, width: int, tp: TensorGroup, *, partial: bool, split: bool = False
    ) -> None:
        """``width``: of the whole vector."""
        super().__init__(tp)
        self.kind, self.width, self.split = kind, width, split
        dim = 0 if split else None
        if kind.vectors:
            traits = Traits(split=dim, constant=1.0, partial=partial and not split)
            self.add("weight", (width,), traits)
        if kind is Norm.LAYER:
            self.add("bias", (width,), Traits(split=dim, partial=partial and not split))

    def sparing(self, x: Tensor) -> Tensor:
        """The same, of which only ``x`` is kept. Made of several kernels, RMSNorm would keep what
        they hand on.
        """
        if self.kind is Norm.RMS and not is_one_kernel(x):
            return computed_again(self, x)
        y: Tensor = self(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        """``x`` normalised."""
        weight, bias = self.own("weight"), self.own("bias")
        if self.kind is Norm.NONE:
            return x
        if self.kind is not Norm.RMS:
            return functional.layer_norm(x, (self.width,), weight, bias, EPSILON)
        if not self.split or self.tp.size == 1:
            return functional.rms_norm(x, (self.width,), weight, EPSILON)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.tp.total(wide.square().sum(-1, keepdim=True))
        normed = x * torch.rsqrt(squares / self.width + EPSILON).to(x.dtype)
        return normed if weight is None else normed * weight


class NativeAttention(SplitModule):
    """Causal or full self-attention with grouped key/value heads."""

    def __init__(self, spec: Attention, hidden: int, groups: LayerGroups, out_std: float) -> None:
        """The projections, biases and norms that ``spec`` has."""
        tp = groups.tensor
        super().__init__(tp)
        self.spec, self.context = spec, groups.context
        widths = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
        for name, heads in widths.items():
            width = heads * spec.head_dim
            self.add(f"{name}_proj", (width, hidden), Traits(split=0, std=STD))
            if spec.qkv_bias:
                self.add(f"{name}_bias", (width,), Traits(split=0))
        self.add("o_proj", (hidden, spec.context_width), Traits(split=1, std=out_std))
        if spec.output_bias:
            self.add("o_bias", (hidden,), Traits(partial=tp.sequence))
        self.norms = torch.nn.ModuleDict()
        for name in ("q", "k") if spec.qk_norm is not QKNorm.NONE else ():
            full = spec.qk_norm is QKNorm.FULL
            width = widths[name] * spec.head_dim if full else spec.head_dim
            self.norms[name] = NativeNorm(Norm.RMS, width, tp, partial=True, split=full)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values: (batch, heads, sequence, head_dim)."""
        q, k, v = (self._heads(name, x) for name in ("q", "k", "v"))
        if self.spec.rope:
            q, k = _rotated(q, self.context), _rotated(k, self.context)
        # attention answers in the layout of the queries: so its context is whole without a copy
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        projected = functional.linear(x, self.part(f"{name}_proj"), self.own(f"{name}_bias"))
        if name in self.norms and self.spec.qk_norm is QKNorm.FULL:
            projected = self.norms[name](projected)
        heads: Tensor = projected.unflatten(-1, (-1, self.spec.head_dim))
        if name in self.norms and self.spec.qk_norm is QKNorm.PER_HEAD:
            heads = self.norms[name](heads)
        return heads

    def core(self, q: Tensor, k: Tensor, v: Tensor, *, again: bool) -> Tensor:
        """Scores to context: (batch, sequence, own heads x head_dim). ``again``: all of it is
        computed again anyway; otherwise what a rank gathers of others is not kept.
        """
        if self.context.size == 1:
            return self._attend_to(q, k, v)
        both = torch.stack((k, v))
        if self.context.ring:
            attended = attend_in_ring(q, both, self.context, causal=self.spec.causal)
            return attended.transpose(1, 2).flatten(2)
        if again:
            return self._attend_to(q, *self.context.gather(both).unbind())
        return without_output(
            self.context.gather, both, lambda whole: self._attend_to(q, *whole.unbind())
        )

    def _attend_to(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Own queries to the keys and values of whole sequences."""
        pieces = zip(q.chunk(len(self.context.pieces), 2), self.context.pieces, strict=True)
        parts = [attend(self.spec, own, k, v, number * own.shape[2]) for own, number in pieces]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return whole.transpose(1, 2).flatten(2)

    def output(self, context: Tensor) -> Tensor:
        """Context -> residual stream."""
        summed = self.tp.leave(functional.linear(context, self.part("o_proj")))
        bias = self.own("o_bias")
        return summed if bias is None else summed + bias


class NativeBlock(SplitModule):
    """A block under a strategy: its group and what it recomputes."""

    def __init__(
        self, spec: Block, groups: LayerGroups, recompute: Recompute, *, num_blocks: int
    ) -> None:
        """Output projections start smaller the deeper the model is (Radford et al. 2019)."""
        tp = groups.tensor
        super().__init__(tp)
        out_std = STD / math.sqrt(2 * num_blocks)
        self.spec, self.recompute = spec, recompute
        self.attention = NativeAttention(spec.attention, spec.hidden, groups, out_std)
        self.feed_forward: NativeFeedForward | NativeExpertFeedForward
        if isinstance(spec.feed_forward, ExpertFeedForward):
            own = spec.feed_forward
            self.feed_forward = NativeExpertFeedForward(own, spec.hidden, groups, out_std)
        else:
            self.feed_forward = NativeFeedForward(spec.feed_forward, spec.hidden, tp, out_std)
        self.norms = torch.nn.ModuleList(
            NativeNorm(spec.norm, spec.hidden, tp, partial=tp.sequence)
            for _ in range(spec.num_norms)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Residual stream -> residual stream."""
        if self.recompute.kind == "full":
            return computed_again(self._plain, x)
        return self._body(x, frozenset(self.recompute.modules), again=False)

    def _plain(self, x: Tensor) -> Tensor:
        return self._body(x, frozenset(), again=True)

    def _body(self, x: Tensor, modules: frozenset[str], *, again: bool) -> Tensor:
        """``again``: all of it is computed again anyway, so nothing of it need be spared."""
        first, second = self.norms[0], self.norms[1 if len(self.norms) > 1 else 0]
        assert isinstance(first, NativeNorm)
        assert isinstance(second, NativeNorm)
        attended = self._attend(first, x, modules, again=again)
        if self.spec.parallel:
            return x + attended + self._feed(second, x, modules, again=again)
        if self.spec.num_norms == ALL_FOUR:
            x = x + self.norms[2](attended)
            fed: Tensor = self.norms[3](self._feed(second, x, modules, again=again))
            return x + fed
        x = x + attended
        return x + self._feed(second, x, modules, again=again)

    def _attend(
        self, norm: NativeNorm, x: Tensor, modules: frozenset[str], *, again: bool
    ) -> Tensor:
        own = self.attention
        core = partial(own.core, again=again)
        if "core_attn" in modules:
            core = partial(computed_again, partial(own.core, again=True))

        def rest(entered: Tensor) -> Tensor:
            return own.output(core(*own.project(entered)))

        return self._entered(norm, x, rest, modules, again=again)

    def _feed(self, norm: NativeNorm, x: Tensor, modules: frozenset[str], *, again: bool) -> Tensor:
        own = self.feed_forward
        if isinstance(own, NativeFeedForward):
            return self._dense(own, norm, x, modules, again=again)
        routed = partial(own.routed, spare="moe_act" in modules)
        before: Callable[[Tensor], Tensor] = norm
        if "layernorm" in modules:
            summed, gate = without_output(norm.sparing, x, routed)
        else:
            before, x = torch.nn.Identity(), norm(x)
            summed, gate = routed(x)
        if own.shared is None:
            return summed
        shared = self._dense(own.shared, before, x, modules, again=again)
        return summed + (shared if gate is None else gate * shared)

    def _dense(
        self,
        own: NativeFeedForward,
        norm: Callable[[Tensor], Tensor],
        x: Tensor,
        modules: frozenset[str],
        *,
        again: bool,
    ) -> Tensor:
        if "mlp" not in modules:
            return self._entered(norm, x, own, modules, again=again)
        if "layernorm" in modules:
            return computed_again(lambda y: own(self.tp.enter(norm(y))), x)
        return computed_again(lambda y: own(self.tp.enter(y)), norm(x))

    def _entered(
        self,
        norm: Callable[[Tensor], Tensor],
        x: Tensor,
        then: Callable[[Tensor], Tensor],
        modules: frozenset[str],
        *,
        again: bool,
    ) -> Tensor:
        """``then`` of the normalised input. What a rank gathers of others is not kept: backward
        gathers it again.
        """
        if again:
            return then(self.tp.enter(norm(x)))
        if "layernorm" in modules:
            spare = norm.sparing if isinstance(norm, NativeNorm) else norm
            return without_output(lambda y: self.tp.enter(spare(y)), x, then)
        if self.tp.sequence:
            return without_output(self.tp.enter, norm(x), then)
        return then(self.tp.enter(norm(x)))


@lru_cache(maxsize=8)
def _rotary(
    pieces: tuple[range, ...], size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each position and pair: (positions, size / 2)."""
    wide = torch.float64 if device.type == "cpu" else torch.float32
    rates = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=wide, device=device) / size)
    positions = [torch.arange(p.start, p.stop, dtype=wide, device=device) for p in pieces]
    angles = torch.cat(positions)[:, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def forget_tables() -> None:
    """Forget tables that blocks share: they are real or fake as whoever made them was."""
    _rotary.cache_clear()
    forget_masks()


def _rotated(x: Tensor, context: ContextGroup) -> Tensor:
    """Rotary position embedding, halves rotated against one another (Su et al. 2021).

    ``x``: (batch, sequence, heads, head_dim).
    """
    length = x.shape[1] // len(context.pieces)
    pieces = tuple(range(n * length, (n + 1) * length) for n in context.pieces)
    cos, sin = (table[:, None] for table in _rotary(pieces, x.shape[3], x.dtype, x.device))
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
