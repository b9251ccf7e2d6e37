"""FLOP of every layer kind against torch's own counter on the same layer on the meta device.

torch counts GEMMs, convolutions and its fused attention operators. It does not know embeddings,
norms or activations, and neither does a Gemm or an AttentionCore, so the totals must be equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from costmodel.layers import layer_operators
from costmodel.layout import Strategy
from costmodel.work import AttentionCore, Gemm
from profiles.layers import (
    Attention,
    Block,
    Conv2d,
    Embedding,
    ExpertFeedForward,
    FeedForward,
    Head,
    LatentAttention,
    Linear,
    Norm,
)
from profiles.training import AttentionKernel, TrainingSpec

torch = pytest.importorskip("torch")
counter = pytest.importorskip("torch.utils.flop_counter")
functional = torch.nn.functional

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, SEQ, HIDDEN = 2, 96, 256
FLASH = TrainingSpec(global_batch=8, seq_len=SEQ, attention=AttentionKernel.FLASH2)
UNFUSED = replace(FLASH, attention=AttentionKernel.UNFUSED)

PLAIN = Attention(heads=8, kv_heads=8, head_dim=32, value_head_dim=32, qkv_bias=True, rope=False)
GROUPED = Attention(heads=8, kv_heads=4, head_dim=64, value_head_dim=64)
RANKS = LatentAttention(query_rank=96, kv_rank=64, rope_dim=16, nope_dim=32)
LATENT = Attention(heads=8, kv_heads=8, head_dim=48, value_head_dim=32, latent=RANKS)
DIRECT = replace(LATENT, latent=replace(RANKS, query_rank=None))
GELU = FeedForward(ffn_hidden=4 * HIDDEN, gated=False, bias=True)
SWIGLU = FeedForward(ffn_hidden=704, gated=True)
EXPERTS = ExpertFeedForward(num_experts=8, top_k=2, expert_hidden=160, shared_hidden=320)


def block(attention: Attention, feed_forward: FeedForward | ExpertFeedForward) -> Block:
    return Block(hidden=HIDDEN, attention=attention, feed_forward=feed_forward, norm=Norm.LAYER)


def ours(layer, training: TrainingSpec, strategy: Strategy | None = None) -> tuple[int, int]:
    """FLOP of one rank's forward, and of forward and backward, for one micro-batch."""
    operators = layer_operators(layer, strategy or Strategy(), training, BATCH)

    def flop(*phases: str) -> int:
        works = [work for o in operators for phase in phases for work in getattr(o, phase)]
        return sum(work.flop for work in works if isinstance(work, Gemm | AttentionCore))

    return flop("forward"), flop("forward", "backward_input", "backward_weight")


def theirs(module: Callable, shape: tuple[int, ...]) -> tuple[int, int]:
    """What torch counts for the same, the input's gradient included."""
    inputs = torch.empty(shape, device="meta", requires_grad=True)
    with counter.FlopCounterMode(display=False) as counted:
        output = module(inputs)
        forward = counted.get_total_flops()
        output.sum().backward()
    return forward, counted.get_total_flops()


def linear(width: int, out: int, *, bias: bool = False):
    return torch.nn.Linear(width, out, bias=bias, device="meta")


def bmm_attention(query, key, value):
    """Scores and context as two batched products, the scores stored."""
    scores = torch.matmul(query, key.transpose(-1, -2)).softmax(-1)
    return torch.matmul(scores, value)


def flash_attention(query, key, value):
    """The operator that a GPU runs; on the meta device the public function falls back to bmm,
    and its backward does not compute the scores again.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 - no public name
    return operator(query, key, value, 0.0, True)[0]


class TorchAttention(torch.nn.Module):
    """Plain or grouped attention with one projection for queries, keys and values."""

    def __init__(self, spec: Attention, core: Callable) -> None:
        super().__init__()
        self.spec, self.core = spec, core
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv = linear(HIDDEN, width, bias=spec.qkv_bias)
        self.out = linear(spec.context_width, HIDDEN, bias=spec.output_bias)

    def forward(self, x):
        spec = self.spec
        sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        heads = self.qkv(x).unflatten(-1, (sum(sizes), spec.head_dim)).transpose(1, 2)
        query, key, value = heads.split(sizes, dim=1)
        repeats = spec.heads // spec.kv_heads
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        return self.out(self.core(query, key, value).transpose(1, 2).flatten(2))


class TorchLatent(torch.nn.Module):
    """Multi-head latent attention as DeepSeek V2 and V3 train it (nothing absorbed)."""

    def __init__(self, spec: Attention, core: Callable) -> None:
        super().__init__()
        self.spec, self.core, latent = spec, core, spec.latent
        self.q_down = linear(HIDDEN, latent.query_rank) if latent.query_rank else None
        self.q_up = linear(latent.query_rank or HIDDEN, spec.query_width)
        self.kv_down = linear(HIDDEN, latent.kv_rank + latent.rope_dim)
        self.kv_up = linear(latent.kv_rank, spec.heads * (latent.nope_dim + spec.value_head_dim))
        self.out = linear(spec.context_width, HIDDEN)

    def forward(self, x):
        spec, latent = self.spec, self.spec.latent
        query = self.q_up(self.q_down(x) if self.q_down else x)
        query = query.unflatten(-1, (spec.heads, spec.head_dim)).transpose(1, 2)
        low, rope = self.kv_down(x).split([latent.kv_rank, latent.rope_dim], dim=-1)
        wide = self.kv_up(low).unflatten(-1, (spec.heads, -1)).transpose(1, 2)
        key, value = wide.split([latent.nope_dim, spec.value_head_dim], dim=-1)
        rope = rope.unsqueeze(1).expand(-1, spec.heads, -1, -1)
        key = torch.cat([key, rope], dim=-1)
        return self.out(self.core(query, key, value).transpose(1, 2).flatten(2))


class TorchFeedForward(torch.nn.Module):
    """GELU with two matrices or SwiGLU with three."""

    def __init__(self, inner: int, *, gated: bool, bias: bool = False) -> None:
        super().__init__()
        self.gated = gated
        self.up = linear(HIDDEN, inner * (2 if gated else 1), bias=bias)
        self.down = linear(inner, HIDDEN, bias=bias)

    def forward(self, x):
        up = self.up(x)
        if not self.gated:
            return self.down(functional.gelu(up))
        gate, value = up.chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class TorchExperts(torch.nn.Module):
    """Top-k experts in a loop, every one with the same number of tokens, and shared ones."""

    def __init__(self, spec: ExpertFeedForward) -> None:
        super().__init__()
        self.spec = spec
        self.router = linear(HIDDEN, spec.num_experts)
        self.experts = torch.nn.ModuleList(
            TorchFeedForward(spec.expert_hidden, gated=spec.gated) for _ in range(spec.num_experts)
        )
        self.shared = TorchFeedForward(spec.shared_hidden, gated=spec.gated)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight = self.router(tokens).softmax(-1).sum(-1, keepdim=True)
        routed = tokens.repeat_interleave(self.spec.top_k, dim=0)
        parts = routed.chunk(self.spec.num_experts)
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        mixed = done.unflatten(0, (-1, self.spec.top_k)).sum(1) * weight
        return (mixed + self.shared(tokens)).view_as(x)


class TorchBlock(torch.nn.Module):
    """Two sublayers with norms before them and residuals around them."""

    def __init__(self, attention: torch.nn.Module, feed_forward: torch.nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.norms = torch.nn.ModuleList(
            torch.nn.LayerNorm(HIDDEN, device="meta") for _ in range(2)
        )

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


def test_a_gpt_block_with_stored_scores_counts_as_in_torch():
    module = TorchBlock(
        TorchAttention(PLAIN, bmm_attention),
        TorchFeedForward(GELU.ffn_hidden, gated=False, bias=True),
    )
    assert ours(block(PLAIN, GELU), UNFUSED) == theirs(module, (BATCH, SEQ, HIDDEN))


def test_a_llama_block_with_flash_attention_counts_as_in_torch():
    module = TorchBlock(
        TorchAttention(GROUPED, flash_attention),
        TorchFeedForward(SWIGLU.ffn_hidden, gated=True),
    )
    assert ours(block(GROUPED, SWIGLU), FLASH) == theirs(module, (BATCH, SEQ, HIDDEN))


@pytest.mark.parametrize("attention", [LATENT, DIRECT], ids=["low rank queries", "direct queries"])
def test_a_block_with_latent_attention_counts_as_in_torch(attention):
    module = TorchBlock(
        TorchLatent(attention, bmm_attention), TorchFeedForward(SWIGLU.ffn_hidden, gated=True)
    )
    assert ours(block(attention, SWIGLU), UNFUSED) == theirs(module, (BATCH, SEQ, HIDDEN))


def test_a_block_of_experts_counts_as_in_torch_under_equal_routing():
    module = TorchBlock(TorchAttention(GROUPED, flash_attention), TorchExperts(EXPERTS))
    assert ours(block(GROUPED, EXPERTS), FLASH) == theirs(module, (BATCH, SEQ, HIDDEN))


@pytest.mark.parametrize("kernel", [k for k in AttentionKernel if not k.stores_scores])
@pytest.mark.parametrize("attention", [PLAIN, GROUPED, LATENT], ids=["plain", "grouped", "latent"])
def test_every_fused_kernel_counts_by_the_formulas_that_torch_registers(attention, kernel):
    """By formula, since the meta kernel wants equal head sizes of keys and values."""
    training = replace(FLASH, attention=kernel)
    operators = layer_operators(block(attention, SWIGLU), Strategy(), training, BATCH)
    core = next(operator for operator in operators if operator.name == "core_attn")
    query = (BATCH, attention.heads, SEQ, attention.head_dim)
    value = (BATCH, attention.heads, SEQ, attention.value_head_dim)
    forward = counter.sdpa_flop_count(query, query, value)
    backward = counter.sdpa_backward_flop_count(value, query, query, value)
    assert [w.flop for w in core.forward if isinstance(w, AttentionCore)] == [forward]
    assert [w.flop for w in core.backward_input if isinstance(w, AttentionCore)] == [backward]


def test_the_head_counts_as_in_torch():
    layer = Head(vocab=1024, hidden=HIDDEN, norm=Norm.RMS)
    norm = torch.nn.RMSNorm(HIDDEN, device="meta")
    module = torch.nn.Sequential(norm, linear(HIDDEN, 1024), torch.nn.LogSoftmax(-1))
    assert ours(layer, FLASH) == theirs(module, (BATCH, SEQ, HIDDEN))


def test_an_embedding_counts_no_flop_here_nor_in_torch():
    layer = Embedding(vocab=1024, hidden=HIDDEN, positions=SEQ)
    table = torch.nn.Embedding(1024, HIDDEN, device="meta")
    with counter.FlopCounterMode(display=False) as counted:
        table(torch.empty((BATCH, SEQ), dtype=torch.int64, device="meta")).sum().backward()
    assert ours(layer, FLASH) == (0, 0) == (counted.get_total_flops(), 0)


def test_a_generic_linear_layer_counts_as_in_torch():
    layer = Linear(in_features=HIDDEN, out_features=640, tokens=50)
    assert ours(layer, FLASH) == theirs(linear(HIDDEN, 640, bias=True), (BATCH, 50, HIDDEN))


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1), (5, 2)])
def test_a_convolution_counts_as_in_torch(kernel, stride):
    layer = Conv2d(
        in_channels=16, out_channels=32, kernel=kernel, height=28, width=20, stride=stride
    )
    module = torch.nn.Conv2d(16, 32, kernel, stride, kernel // 2, device="meta")
    assert ours(layer, FLASH) == theirs(module, (BATCH, 16, 28, 20))


DENSE = {
    "gpt": (block(PLAIN, GELU), UNFUSED),
    "llama": (block(GROUPED, SWIGLU), FLASH),
    "head": (Head(vocab=2048, hidden=HIDDEN, norm=Norm.RMS), FLASH),
    "linear": (Linear(in_features=HIDDEN, out_features=640), FLASH),
    "conv": (Conv2d(in_channels=16, out_channels=32, kernel=3, height=28, width=20), FLASH),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", DENSE)
def test_tensor_parallel_ranks_together_do_the_work_of_one(name, tp, sequence_parallel):
    layer, training = DENSE[name]
    strategy = Strategy(tp=tp, sequence_parallel=sequence_parallel)
    part, whole = ours(layer, training, strategy), ours(layer, training)
    assert tuple(tp * each for each in part) == whole


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_split_experts_and_tokens_together_do_the_work_of_one(tp):
    """With sequence parallelism the router's tokens are divided as well, and each rank has its
    own experts.
    """
    layer = block(GROUPED, replace(EXPERTS, num_experts=8, top_k=2))
    strategy = Strategy(tp=tp, ep=tp, sequence_parallel=True)
    part, whole = ours(layer, FLASH, strategy), ours(layer, FLASH)
    assert tuple(tp * each for each in part) == whole


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", ["gpt", "llama", "head"])
def test_context_parallel_ranks_together_do_the_work_of_one(name, cp):
    layer, training = DENSE[name]
    part, whole = ours(layer, training, Strategy(cp=cp)), ours(layer, training)
    assert tuple(cp * each for each in part) == whole


@pytest.mark.parametrize("tp", [2, 4])
def test_replicated_latent_projections_are_the_only_work_done_more_than_once(tp):
    """Without sequence parallelism every tp rank runs the down projections on all tokens."""
    layer = block(LATENT, SWIGLU)
    down = RANKS.query_rank + RANKS.kv_rank + RANKS.rope_dim
    twice = 2 * BATCH * SEQ * HIDDEN * down * (tp - 1)
    part, whole = ours(layer, FLASH, Strategy(tp=tp)), ours(layer, FLASH)
    assert tuple(tp * each for each in part) == (whole[0] + twice, whole[1] + 3 * twice)
    split = ours(layer, FLASH, Strategy(tp=tp, sequence_parallel=True))
    assert tuple(tp * each for each in split) == whole
