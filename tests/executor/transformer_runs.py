"""Small models of transformers, plans of them, and the training loop that everybody writes."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from executor import own_sequences, parallelize
from executor.traffic import TrafficLog
from planner import ManualLayout, layout_from_degrees, load_inputs, plan_of
from profiles.huggingface import model_from_config
from profiles.yamlfile import Document

BATCH, SEQ, STEPS, VOCAB = 8, 16, 5, 71
TYPES = {torch.float64: 1e-9, torch.float32: 1e-5}  # and how far losses may differ, relatively
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
FAMILIES = {
    "llama": {"attention_bias": True},  # a bias behind a split sum
    "mistral": {"sliding_window": 8},
    "qwen2": {},  # biases of columns
    "qwen3": {"tie_word_embeddings": True},  # norms of heads; tied ends
}


def config_of(family):
    return AutoConfig.for_model(family, **SHAPE | FAMILIES[family])


def build(family, dtype, *, device="cpu", seed=1):
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=dtype)
    return model.train()


@cache
def inputs_of(family, num_ranks, precision):
    config = json.loads(config_of(family).to_json_string(use_diff=False))
    model = model_from_config(Document(path="config.json", data=config), name=family)
    sizes = {"global_batch": BATCH, "seq_len": SEQ, "precision": precision}
    return load_inputs(model, f"{num_ranks}xcpu", overrides=sizes)


def plan_for(family, *, num_ranks, precision="fp32", **manual):
    usual = {"sequence_parallel": False, "micro_batch": 2}
    inputs = inputs_of(family, num_ranks, precision)
    return plan_of(inputs, layout_from_degrees(inputs, ManualLayout(**usual | manual)))


def exactly(model, dtype):
    """Let a model compute in ``dtype`` where its class rounds to fp32, to tell errors apart."""

    def norm(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * scale)

    def loss(logits, labels, vocab_size, **_):
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten()
        )

    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(norm, module)
        model.loss_function = loss
    return model


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    traffic: dict[tuple[str, str], int] = field(default_factory=dict)
    held: int = 0
    kinds: set[type] = field(default_factory=set)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(model, micro_batches, *, mean_of=float, log=None, once=False):
    """The loop that everybody writes; ``once``: gradients are reduced once a step."""
    found = Outcome()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    torch.manual_seed(7)
    for step in range(STEPS):
        tokens, total = torch.randint(VOCAB, (BATCH, SEQ)), 0.0
        with log if log and step == 1 else nullcontext():
            for rows in micro_batches:
                if once:
                    model.set_requires_gradient_sync(rows == micro_batches[-1])
                own = tokens[rows.start : rows.stop]
                loss = model(own, labels=own).loss / len(micro_batches)
                loss.backward()
                total += float(loss.detach())
        if step == 0:
            named = model.named_parameters()
            found.gradients = {name: whole(parameter.grad) for name, parameter in named}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.losses.append(mean_of(total))
        found.norms.append(float(whole(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@cache
def alone(family, dtype):
    return train(exactly(build(family, dtype), dtype), [range(BATCH)])


def mean_over_ranks(value):
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def run_rank(family, plan, dtype, *, once):
    model = parallelize(exactly(build(family, dtype), dtype), plan)
    parameters = [*model.parameters()]
    mesh = parameters[0].device_mesh
    log = TrafficLog({mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names})
    found = train(model, own_sequences(plan), mean_of=mean_over_ranks, log=log, once=once)
    found.traffic = dict(log.traffic.counts)
    found.held = sum(each.to_local().numel() for each in parameters)
    found.kinds = {type(each.data) for each in parameters}
    return found


def expected_elements(reference, plan):
    """Held by all ranks together: norms and biases of sums are whole on every rank of tp."""
    strategy = plan.layout.strategies[0]
    copies = strategy.dp // (strategy.shard_group if strategy.zero else 1)
    is_whole = {at: "norm" in at or at.endswith("o_proj.bias") for at in reference.gradients}
    return copies * sum(
        each.numel() * (strategy.tp if is_whole[at] else 1)
        for at, each in reference.gradients.items()
    )


def expected_traffic(family, plan, *, once):
    """Collectives of a step, by kind and axis."""
    strategies = [span.strategy for span in plan.layout.chunks[0].spans]
    own, passes, blocks = strategies[0], plan.layout.num_microbatches, SHAPE["num_hidden_layers"]
    again = sum(
        span.stop - span.first
        for span in plan.layout.chunks[0].spans
        if span.strategy.recompute.kind == "full" and 0 < span.first <= blocks
    )
    units = blocks + (1 if family == "qwen3" else 2)  # tied ends are one
    counts = Counter()
    if own.tp > 1:
        head_norms = 2 * blocks if family == "qwen3" else 0
        if own.sequence_parallel:
            counts["all-gather", "tp"] = passes * (4 * blocks + 1 + 1 + 1 + 2 * again)
            counts["reduce-scatter", "tp"] = passes * (4 * blocks + 1 + again)
            biases = blocks if family == "llama" else 0
            counts["all-reduce", "tp"] = passes * (1 + 2 * blocks + 1 + biases + head_norms)
        else:
            counts["all-gather", "tp"] = passes  # logits
            counts["all-reduce", "tp"] = passes * (1 + 4 * blocks + 1 + again + head_norms)
    if own.dp > 1:
        reductions = units * (1 if once else passes)
        if own.zero:
            gathers = 2 if own.zero == 3 else 1
            counts["all-gather", "dp_shard"] = units * gathers * passes
            counts["reduce-scatter", "dp_shard"] = reductions
        if not own.zero or own.shard_group < own.dp:
            counts["all-reduce", "dp_replicate"] = reductions
    return counts
