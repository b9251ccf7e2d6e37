"""Native layers: their parameters are the ModelSpec's, their function that of plain operators."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from cases import BATCH, HIDDEN, LLAMA, MODELS, SEQ, VOCAB, batch, with_experts
from ranks import run_ranks
from torch.nn import functional

from costmodel.layout import Chunk, LayerSpan, Strategy
from executor.models.chain import Chain
from executor.models.context import ContextGroup
from executor.models.groups import LayerGroups
from executor.models.parameters import initialise
from executor.models.recomputing import without_output
from executor.models.ring import attend_in_ring
from profiles.catalog import load_model

TOP_K = 3
SPARSE = with_experts(
    LLAMA, num_dense=1, num_experts=6, top_k=TOP_K, expert_hidden=24, shared_hidden=16,
    shared_gate=True,
)  # fmt: skip


def chain_of(spec, *, device="meta"):
    chunk = Chunk(0, 0, (LayerSpan(0, spec.num_layers, Strategy()),))
    chain = Chain(spec, chunk, lambda _: LayerGroups(), num_tokens=BATCH * SEQ)
    if device != "meta":
        chain.to(torch.float64).to_empty(device=device)
        chain.tie()
        initialise(chain, seed=1)
    return chain


@pytest.mark.parametrize(
    "spec",
    [*MODELS.values()]
    + [
        load_model(name, where="")
        for name in (
            "llama3-8b",
            "gpt2",
            "qwen3-0.6b",
            "gemma2-9b",
            "mixtral-8x7b",
            "qwen1.5-moe-a2.7b",
        )
    ],
    ids=lambda spec: spec.name,
)
def test_native_models_have_the_parameters_of_their_spec(spec):
    assert sum(p.numel() for p in chain_of(spec).parameters()) == spec.params_total


def test_a_model_is_built_without_memory():
    assert all(p.is_meta for p in chain_of(load_model("llama3-70b", where="")).parameters())


def norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x):
    """Pairs as complex numbers, each turned by its angle: another way to write it."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(
        torch.ones(x.shape[-2], half, dtype=torch.float64),
        torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates,
    )
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def swiglu(y, matrices):
    gate, up, down = matrices
    inner = y @ gate.T
    return (inner * torch.sigmoid(inner) * (y @ up.T)) @ down.T


def plain_experts(y, own):
    """Every expert sees every token; a token takes three of them."""
    scores = (y @ own["feed_forward.router"].T).exp()
    least = scores.sort(-1).values[..., -TOP_K, None]
    weights = torch.where(scores >= least, scores, 0)
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up, down = (own[f"feed_forward.experts.{name}_proj"] for name in ("gate", "up", "down"))
    made = [
        swiglu(y, (gate[:, each], up[:, each], down[:, each].T)) for each in range(gate.shape[1])
    ]
    shared = swiglu(y, [own[f"feed_forward.shared.{name}_proj"] for name in ("gate", "up", "down")])
    opened = torch.sigmoid(y @ own["feed_forward.shared_gate"].T)
    return (torch.stack(made, -1) * weights[..., None, :]).sum(-1) + opened * shared


def plain_loss(weights, rows):
    """A llama of four blocks in plain operators, without a fused kernel."""
    tokens, targets = rows[:, :-1], rows[:, 1:]
    x = weights["layers.embedding.tokens"][tokens]
    causal = torch.full((SEQ, SEQ), -math.inf, dtype=torch.float64).triu(1)
    for number in range(4):
        own = {
            name.removeprefix(f"layers.{number}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        y = norm(x, own["norms.0.weight"])
        q, k, v = (
            (y @ own[f"attention.{name}_proj"].T).view(BATCH, SEQ, -1, 8).transpose(1, 2)
            for name in "qkv"
        )
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        scores = rotated(q) @ rotated(k).transpose(-1, -2) / math.sqrt(8) + causal
        context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(BATCH, SEQ, HIDDEN)
        x = x + context @ own["attention.o_proj"].T
        y = norm(x, own["norms.1.weight"])
        if "feed_forward.router" in own:
            x = x + plain_experts(y, own)
        else:
            x = x + swiglu(y, [own[f"feed_forward.{name}_proj"] for name in ("gate", "up", "down")])
    logits = norm(x, weights["layers.head.norm.weight"]) @ weights["layers.head.projection"].T
    return functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("spec", [LLAMA, SPARSE], ids=["dense", "experts"])
def test_a_native_model_computes_what_plain_operators_do(spec):
    chain, rows = chain_of(spec, device="cpu"), batch(0)
    loss = chain(rows[:, :-1], rows[:, 1:])
    expected = plain_loss(dict(chain.named_parameters()), rows)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    ours = torch.autograd.grad(loss, list(chain.parameters()))
    theirs = torch.autograd.grad(expected, list(chain.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)


def test_a_model_begins_with_the_loss_of_chance():
    chain, rows = chain_of(LLAMA, device="cpu"), batch(0)
    assert chain(rows[:, :-1], rows[:, 1:]).item() == pytest.approx(math.log(VOCAB), rel=0.02)


def test_initial_values_are_normal_and_independent():
    weight = chain_of(LLAMA, device="cpu").layers["0"].feed_forward.up_proj.detach() / 0.02
    assert float(weight.mean()) == pytest.approx(0, abs=0.1)
    assert float(weight.std()) == pytest.approx(1, abs=0.05)
    assert abs(float((weight[0] @ weight[1]) / weight.shape[1])) < 0.6


def ring_of(causal, inputs):
    """What one rank of a ring gives of the whole, and its gradients."""

    def rank(_):
        own = ContextGroup(dist.group.WORLD, ring=True)
        q, k, v = (own.own(each, 2).clone().requires_grad_() for each in inputs)
        out = attend_in_ring(q, torch.stack((k, v)), own, causal=causal)
        out.square().sum().backward()
        return [own.pieces, *(each.detach() for each in (out, q.grad, k.grad, v.grad))]

    return rank


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_in_a_ring_is_attention_to_all(causal, dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8))
    inputs = [torch.randn(*s, dtype=dtype, generator=generator) for s in shapes]
    exact = [each.double().clone().requires_grad_() for each in inputs]
    out = functional.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
    out.square().sum().backward()
    whole = [out.detach(), *(each.grad for each in exact)]
    for pieces, *found in run_ranks(3, ring_of(causal, inputs)):
        for one, expected in zip(found, whole, strict=True):
            own = torch.cat([expected.chunk(6, 2)[number] for number in pieces], 2)
            assert float((one - own).abs().max()) <= tolerance * float(expected.abs().max())


def test_an_output_that_is_not_kept_is_computed_again():
    calls, x = [], torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    first, second = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)

    def cheap(y):
        calls.append(y.shape)
        return y.square()

    z = without_output(cheap, x, lambda y: (y @ first) * (y @ second))
    assert len(calls) == 1
    found = torch.autograd.grad(z.sum(), (x, first, second))
    assert len(calls) == 2
    wanted = torch.autograd.grad(((x * x @ first) * (x * x @ second)).sum(), (x, first, second))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
