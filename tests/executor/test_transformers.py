"""A model of transformers under a plan equals the same model in one process."""

from __future__ import annotations

import io
import os
import re
import shlex
import socket
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from cli import main as command_line
from executor import own_sequences, parallelize
from profiles.errors import InputError

pytest.importorskip("transformers", reason="needs the extra [transformers]")

from transformer_runs import (
    SEQ,
    SHAPE,
    STEPS,
    TYPES,
    alone,
    build,
    expected_elements,
    expected_traffic,
    mean_over_ranks,
    plan_for,
    run_rank,
    train,
    whole,
)

ROOT = Path(__file__).parents[2]
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
        unlike = build("llama", torch.float32, seed=number)
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
