"""A model of transformers under a plan equals the same model in one process."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import socket
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers")
import torch  # noqa: E402 - the skip comes first
import torch.distributed as dist  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor  # noqa: E402

from cli import main as command_line  # noqa: E402
from executor import own_sequences, parallelize  # noqa: E402
from executor.traffic import TrafficLog  # noqa: E402
from planner import ManualLayout, layout_from_degrees, load_inputs, plan_of  # noqa: E402
from profiles.errors import InputError  # noqa: E402
from profiles.huggingface import model_from_config  # noqa: E402
from profiles.yamlfile import Document  # noqa: E402

ROOT = Path(__file__).parents[2]
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


CASES = {
    "llama-tp2": ("llama", 2, {"tp": 2}),
    "qwen3-tp2": ("qwen3", 2, {"tp": 2}),
    "llama-tp2-sequence-full-of-one": (
        "llama",
        2,
        {"tp": 2, "sequence_parallel": True, "recompute": "full:1"},
    ),
    "qwen3-tp2-dp2-sequence-zero3-full": (
        "qwen3",
        4,
        {"tp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"},
    ),
    "mistral-tp2-dp2-zero3-full": ("mistral", 4, {"tp": 2, "zero": 3, "recompute": "full"}),
    "llama-tp2-dp2-zero2": ("llama", 4, {"tp": 2, "zero": 2}),
    "qwen2-tp2-dp2-zero1-once": ("qwen2", 4, {"tp": 2, "zero": 1}),
    "qwen2-tp2-dp2-zero0": ("qwen2", 4, {"tp": 2}),
    "mistral-dp2-zero0-once": ("mistral", 2, {}),
    "llama-dp4-hsdp": ("llama", 4, {"zero": 3, "shard_group": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_equals_one_process(name):
    family, num_ranks, manual = CASES[name]
    plan, once = plan_for(family, num_ranks=num_ranks, **manual), name.endswith("-once")

    def rank(_):
        return {dtype: run_rank(family, plan, dtype, once=once) for dtype in TYPES}

    references = {dtype: alone(family, dtype) for dtype in TYPES}
    found = run_ranks(num_ranks, rank)
    for dtype, tolerance in TYPES.items():
        reference, outcomes = references[dtype], [each[dtype] for each in found]
        for outcome in outcomes:
            assert outcome.losses == pytest.approx(reference.losses, rel=tolerance, abs=0)
            assert outcome.norms == pytest.approx(reference.norms, rel=10 * tolerance, abs=0)
            assert_gradients(outcome, reference, 10 * tolerance)
            assert outcome.traffic == expected_traffic(family, plan, once=once)
            assert outcome.kinds == {DTensor}
        assert sum(each.held for each in outcomes) == expected_elements(reference, plan)
    assert len(set(references[torch.float64].losses)) == STEPS


def assert_gradients(outcome, reference, tolerance):
    # Some gradients are zero but for rounding: softmax does not see a bias of the keys.
    floor = 1e-3 * max(float(each.abs().max()) for each in reference.gradients.values())
    assert outcome.gradients.keys() == reference.gradients.keys()
    for at, gradient in reference.gradients.items():
        scale = max(floor, float(gradient.abs().max()))
        assert float((outcome.gradients[at] - gradient).abs().max()) <= tolerance * scale, at


def test_a_model_on_the_meta_device_starts_the_same_under_every_plan():
    plans = [
        plan_for("qwen3", num_ranks=2, tp=2),
        plan_for("qwen3", num_ranks=2, zero=3),
        plan_for("qwen3", num_ranks=2),
    ]
    tokens = torch.arange(SEQ)[None]

    def rank(_):
        found = []
        for plan in plans:
            model = parallelize(build("qwen3", torch.float32, device="meta"), plan, seed=3)
            state = {name: whole(value).detach() for name, value in model.state_dict().items()}
            found.append((state, model(tokens, labels=tokens).loss.detach()))
        return found

    (state, _), *_ = found = run_ranks(2, rank)[1]
    one = build("qwen3", torch.float32)
    one.load_state_dict(state)
    loss = float(one(tokens, labels=tokens).loss.detach())
    for other, own in found:
        assert other.keys() == state.keys()
        assert all(torch.equal(other[name], state[name]) for name in state)
        assert float(own) == pytest.approx(loss, rel=1e-5)
    weight = state["model.layers.1.mlp.up_proj.weight"]
    assert float(weight.std()) == pytest.approx(SHAPE["initializer_range"], rel=0.1)
    assert not torch.equal(weight, state["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("manual", [{"tp": 2}, {"zero": 3}], ids=["tp2", "zero3"])
def test_rank_0_alone_can_have_the_weights(manual):
    plan, tokens = plan_for("qwen3", num_ranks=2, **manual), torch.arange(SEQ)[None]
    one = build("qwen3", torch.float32)

    def rank(number):
        model = parallelize(build("qwen3", torch.float32, device="meta"), plan)
        state = one.state_dict() if number == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        return float(model(tokens, labels=tokens).loss.detach())

    loss = float(one(tokens, labels=tokens).loss.detach())
    assert run_ranks(2, rank) == pytest.approx([loss, loss], rel=1e-5)


def test_the_script_of_the_how_to_learns(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "how-to" / "apply-a-plan-to-a-transformers-model.md").read_text()
    (config,) = re.findall(r"```json config.json\n(.*?)```", page, re.DOTALL)
    (script,) = re.findall(r"```python train.py\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"\$ parplan (plan .*)", page)
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(config)
    done = CliRunner().invoke(command_line, shlex.split(command))
    assert done.exit_code == 0, done.output
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def rank(number):
        dist.destroy_process_group()  # the script makes its own
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(where, RANK=str(number), WORLD_SIZE="4")
        said = io.StringIO()
        with redirect_stdout(said):
            exec(compile(script, "train.py", "exec"), {})  # noqa: S102 - it is ours
        return said.getvalue()

    printed, *others = run_ranks(4, rank)
    losses = [float(each) for each in re.findall(r"loss (\S+),", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1
    assert others == ["", "", ""]


def test_bf16_stays_near_fp32_and_keeps_fp32_masters():
    plan = plan_for("llama", num_ranks=2, tp=2, precision="bf16")

    def rank(_):
        model = parallelize(build("llama", torch.bfloat16), plan)
        kinds = {each.dtype for each in model.parameters()}
        return kinds, train(model, own_sequences(plan), mean_of=mean_over_ranks).losses

    for kinds, losses in run_ranks(2, rank):
        assert kinds == {torch.float32}
        assert losses == pytest.approx(alone("llama", torch.float32).losses, rel=0.02)


@pytest.mark.parametrize(
    ("family", "num_ranks", "manual", "rule"),
    [
        ("llama", 2, {"pp": 2}, "pp 2; expected pp 1"),
        ("llama", 2, {"cp": 2}, "cp 2; expected cp 1"),
        ("llama", 2, {"recompute": "selective"}, "selective(core_attn); expected none or full"),
        ("llama", 2, {}, "there is no process group"),
    ],
)
def test_a_plan_that_cannot_be_applied_is_refused(family, num_ranks, manual, rule):
    model = build(family, torch.float32, device="meta")
    with pytest.raises(InputError, match=re.escape(rule)):
        parallelize(model, plan_for(family, num_ranks=num_ranks, **manual))
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def refused(model, plan):
    before = dict(model.named_parameters())
    with pytest.raises(InputError) as caught:
        parallelize(model, plan)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    return str(caught.value)


def test_a_model_that_does_not_fit_the_plan_is_refused():
    plan = plan_for("llama", num_ranks=2, tp=2)

    def rank(number):
        other = build("llama", torch.float32, device="meta")
        vars(other)["_tp_plan"]["model.layers.*.mlp.up_proj"] = "packed_colwise"
        torch.manual_seed(number)
        unlike = transformers.AutoModelForCausalLM.from_config(config_of("llama"))
        return [
            refused(build("qwen2", torch.float32), plan),
            refused(other, plan),
            refused(unlike, plan),
            refused(torch.nn.Linear(2, 2), plan),
            refused(build("llama", torch.float32), plan_for("llama", num_ranks=4)),
        ]

    for messages in run_ranks(2, rank):
        shapes, style, weights, kind, world = messages
        assert "its layer 0 is Block(" in shapes
        assert "layers.0.mlp.up_proj has the style packed_colwise; expected one of" in style
        assert "embed_tokens.weight (and" in weights
        assert "Linear is no model of transformers" in kind
        assert "for 4 ranks, the process group has 2" in world
