"""Encoder-decoders and vision towers, given as a chain of layers with tokens of their own."""

from __future__ import annotations

import pytest

from costmodel.layers import layer_operators
from costmodel.layout import Strategy
from costmodel.work import AttentionCore, Gemm
from planner import load_inputs, plan_training
from profiles import load_model
from profiles.errors import InputError
from profiles.training import TrainingSpec

T5_LARGE = """\
schema_version: 1
kind: model
name: t5-large
layers:
  - {kind: embedding, vocab: 32128, hidden: 1024}
  - kind: block
    count: 24
    hidden: 1024
    tokens: 512
    attention: {heads: 16, causal: false, rope: false}
    feed_forward: {ffn_hidden: 4096, gated: false}
  - kind: block
    count: 24
    hidden: 1024
    attention: {heads: 16, rope: false, cross: {source_hidden: 1024, source_tokens: 512}}
    feed_forward: {ffn_hidden: 4096, gated: false}
  - {kind: head, vocab: 32128, hidden: 1024, tied: true}
"""
WITH_VISION_TOWER = """\
schema_version: 1
kind: model
name: sees
layers:
  - {kind: embedding, vocab: 32000, hidden: 4096}
  - {kind: linear, in_features: 588, out_features: 1024, tokens: 576}
  - kind: block
    count: 24
    hidden: 1024
    tokens: 576
    norm: layer
    attention: {heads: 16, causal: false, rope: false, qkv_bias: true, output_bias: true}
    feed_forward: {ffn_hidden: 4096, gated: false, bias: true}
  - {kind: linear, in_features: 1024, out_features: 4096, tokens: 576}
  - kind: block
    count: 32
    hidden: 4096
    attention: {heads: 32}
    feed_forward: {ffn_hidden: 11008}
  - {kind: head, vocab: 32000, hidden: 4096}
"""


@pytest.fixture
def path_of(tmp_path):
    def write(text):
        path = tmp_path / "model.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_t5_large_has_its_published_parameters(path_of):
    # 737,668,096 with the encoder's last norm (1,024) and two tables of relative positions (512)
    assert load_model(path_of(T5_LARGE)).params_total == 737_668_096 - 1024 - 2 * 512


def flop_of(block, training):
    """Forward FLOP of the GEMMs and of attention, masked scores included."""
    found = {"gemm": 0, "attention": 0}
    for operator in layer_operators(block, Strategy(), training, 1):
        for work in operator.forward:
            if isinstance(work, Gemm):
                found["gemm"] += work.flop
            elif isinstance(work, AttentionCore):
                found["attention"] += work.flop
    return found


def test_an_encoder_works_on_its_own_tokens_and_a_decoder_attends_to_both(path_of):
    model = load_model(path_of(T5_LARGE))
    encoder, decoder = (run.layer for run in model.runs[1:3])
    training = TrainingSpec(global_batch=1, seq_len=128)
    h, ffn, target, source = 1024, 4096, 128, 512
    own = flop_of(encoder, training)
    assert own["gemm"] == 2 * source * (4 * h * h + 2 * h * ffn)
    assert own["attention"] == 4 * source * source * h
    both = flop_of(decoder, training)
    crossing = 2 * (2 * target * h * h + 2 * source * h * h)
    assert both["gemm"] == 2 * target * (4 * h * h + 2 * h * ffn) + crossing
    assert both["attention"] == 4 * target * target * h + 4 * target * source * h


@pytest.mark.parametrize("text", [T5_LARGE, WITH_VISION_TOWER])
def test_towers_are_planned_and_estimated_alike(path_of, text):
    inputs = load_inputs(
        path_of(text), "8xa100-40g", overrides={"global_batch": 64, "seq_len": 512}
    )
    plan = plan_training(inputs).plan
    assert plan.estimate.fits
    assert plan.search is not None
    assert plan.search.bound_s <= plan.estimate.step_s


def test_towers_of_different_width_need_a_layer_between_them_only_where_tokens_meet(path_of):
    model = load_model(path_of(WITH_VISION_TOWER))
    assert model.kinds == {"embedding": 1, "linear": 2, "block": 56, "head": 1}
    narrow = WITH_VISION_TOWER.replace("out_features: 1024", "out_features: 512")
    with pytest.raises(InputError, match="takes width 1024, and the one before it gives width 512"):
        load_model(path_of(narrow))
