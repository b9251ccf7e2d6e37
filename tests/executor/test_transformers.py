"""A model of transformers under a plan equals the same model in one process."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers")
import torch  # noqa: E402 - the skip comes first
import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from executor import own_sequences, parallelize  # noqa: E402
from executor.traffic import TrafficLog  # noqa: E402
from planner import ManualLayout, layout_from_degrees, load_inputs, plan_of  # noqa: E402
from profiles.errors import InputError  # noqa: E402
from profiles.huggingface import model_from_config  # noqa: E402
from profiles.yamlfile import Document  # noqa: E402

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
    own = {"sliding_window": None} if family == "mistral" else {}
    return transformers.AutoConfig.for_model(family, **SHAPE | own | FAMILIES[family])


def build(family, dtype, *, device="cpu"):
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=dtype)
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
                type(module).forward = norm
        model.loss_function = loss
    return model


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    traffic: list[dict[str, Any]] = field(default_factory=list)
    held: int = 0
    kinds: set[type] = field(default_factory=set)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def train(model, micro_batches, *, mean_of=float, log=None):
    """The loop that everybody writes."""
    found = Outcome()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    torch.manual_seed(7)
    for step in range(STEPS):
        tokens, total = torch.randint(VOCAB, (BATCH, SEQ)), 0.0
        with log if log and step == 1 else nullcontext():
            for rows in micro_batches:
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


def run_rank(family, plan, dtype):
    model = parallelize(exactly(build(family, dtype), dtype), plan)
    parameters = [*model.parameters()]
    mesh = parameters[0].device_mesh
    axes = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names}
    log = TrafficLog(axes)
    found = train(model, own_sequences(plan), mean_of=mean_over_ranks, log=log)
    found.traffic = log.traffic.document()
    found.held = sum(each.to_local().numel() for each in parameters)
    found.kinds = {type(each.data) for each in parameters}
    return found


CASES = {
    "llama-tp2": ("llama", 2, {"tp": 2}),
    "qwen3-tp2": ("qwen3", 2, {"tp": 2}),
    "qwen2-tp2-sequence-full": (
        "qwen2", 2, {"tp": 2, "sequence_parallel": True, "recompute": "full:1"}
    ),
    "qwen3-tp2-dp2-sequence-zero3-full": (
        "qwen3", 4, {"tp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"}
    ),
    "mistral-tp2-dp2-zero3-full": ("mistral", 4, {"tp": 2, "zero": 3, "recompute": "full"}),
    "llama-tp2-dp2-zero2": ("llama", 4, {"tp": 2, "zero": 2}),
    "qwen2-tp2-dp2-zero0": ("qwen2", 4, {"tp": 2}),
    "llama-dp4-hsdp": ("llama", 4, {"zero": 3, "shard_group": 2}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_plan_equals_one_process(name, dtype):
    family, num_ranks, manual = CASES[name]
    plan, reference = plan_for(family, num_ranks=num_ranks, **manual), alone(family, dtype)
    outcomes = run_ranks(num_ranks, lambda _: run_rank(family, plan, dtype))
    tolerance = TYPES[dtype]
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(reference.losses, rel=tolerance, abs=0)
        assert outcome.norms == pytest.approx(reference.norms, rel=10 * tolerance, abs=0)
        assert outcome.gradients.keys() == reference.gradients.keys()
        floor = 1e-3 * max(float(each.abs().max()) for each in reference.gradients.values())
        for at, gradient in reference.gradients.items():
            scale = max(floor, float(gradient.abs().max()))
            assert float((outcome.gradients[at] - gradient).abs().max()) <= 10 * tolerance * scale
        assert outcome.kinds == {DTensor}
    print(name, [o.held for o in outcomes], outcomes[0].traffic)
