from __future__ import annotations

import pytest

from profiles import load_model
from profiles.layers import Block, CustomLayer, ExpertFeedForward, Linear

HEAD = "schema_version: 1\nkind: model\nname: tiny\nlayers:\n"
GOOD = (
    HEAD
    + """\
  - {kind: embedding, vocab: 32000, hidden: 4096}
  - kind: block
    count: 32
    hidden: 4096
    attention: {heads: 32}
    feed_forward: {ffn_hidden: 11008}
  - {kind: head, vocab: 32000, hidden: 4096}
"""
)


def load(tmp_path, text):
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return load_model(str(path))


def test_the_defaults_are_those_of_llama_so_its_shapes_give_its_count(tmp_path):
    model = load(tmp_path, GOOD)
    assert model.params_total == 6_738_415_616
    assert (model.family, model.max_seq_len) == ("generic", None)
    assert model.kinds == {"embedding": 1, "block": 32, "head": 1}


def test_experts_and_latent_attention(tmp_path):
    text = GOOD.replace("{ffn_hidden: 11008}", "{num_experts: 8, top_k: 2, expert_hidden: 64}")
    latent = "{heads: 32, latent: {query_rank: null, kv_rank: 512, rope_dim: 64, nope_dim: 128}}"
    block = load(tmp_path, text.replace("{heads: 32}", latent)).layers[1]
    assert isinstance(block, Block)
    assert isinstance(block.feed_forward, ExpertFeedForward)
    assert (block.attention.head_dim, block.attention.value_head_dim) == (192, 128)


def test_layers_that_are_no_transformer(tmp_path):
    model = load(
        tmp_path,
        HEAD
        + "  - {kind: table, rows: 1000, dim: 16, lookups: 4}\n"
        + "  - {kind: linear, in_features: 64, out_features: 10, bias: false}\n"
        + "  - {kind: custom, forward_flop: 100, forward_bytes: 10, num_parameters: 7,\n"
        + "     saved_bytes: 0, output_bytes: 4}\n",
    )
    assert model.params_total == 16_000 + 640 + 7
    assert isinstance(model.layers[1], Linear)
    assert isinstance(model.layers[2], CustomLayer)


def test_convolutions_whose_images_fit(tmp_path):
    text = HEAD + (
        "  - {kind: conv2d, in_channels: 3, out_channels: 8, kernel: 3, height: 32, width: 32,\n"
        "     stride: 2}\n"
        "  - {kind: conv2d, in_channels: 8, out_channels: 8, kernel: 3, height: 16, width: 16,\n"
        "     count: 2}\n"
    )
    assert load(tmp_path, text).num_layers == 3


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("heads: 32}", "heads: 24}", "9:24: hidden 4096 over 24 heads; expected heads that divide"),
        ("heads: 32}", "heads: 32, kv_heads: 7}", "9:38: 32 heads over 7 key/value heads"),
        ("heads: 32}", "head: 32}", "9:5: layers[1].attention.heads is missing"),
        ("heads: 32}", "heads: 32, qk_norm: per_head}", "9:37: layers[1].attention.qk_norm is 'pe"),
        ("heads: 32}", "heads: 32, causal: 1}", "9:36: layers[1].attention.causal is '1'; exp"),
        ("11008", "-11008", "10:32: layers[1].feed_forward.ffn_hidden is '-11008'; expected at"),
        ("11008", "1.0e+30", "10:32: layers[1].feed_forward.ffn_hidden is '1.0e+30'; expected a"),
        ("{ffn_hidden: 11008}", "{}", "10:5: layers[1].feed_forward.ffn_hidden is missing"),
        ("{ffn_hidden: 11008}", "7", "10:19: layers[1].feed_forward is '7'; expected a mapping"),
        (
            "{ffn_hidden: 11008}",
            "{num_experts: 8, top_k: 9, expert_hidden: 64}",
            "10:43: top_k 9 of 8 experts; expected at most num_experts",
        ),
        ("kind: block", "kind: blok", "6:11: layers[1].kind is 'blok'; expected one of embedding"),
        ("  - kind: block\n    count", "  - count", "6:5: layers[1].kind is missing"),
        ("    hidden: 4096\n", "    hidden: 2048\n", "6:5: the layer takes width 2048, and the"),
        ("32000, hidden: 4096}\n  - kind", "32000, hidden: 5}\n  - kind", "6:5: the layer takes"),
        ("count: 32", "count: 100000", "7:12: layers[1].count is '100000'; expected at most 10,0"),
        ("name: tiny", "name: [a]", "3:7: name is a list; expected text"),
        ("name: tiny", "name: 7", "3:7: name is '7'; expected text (quote it: \"7\")"),
        ("{kind: head,", "{kind: head, tied: true, norm: rmsnorm,", "11:36: layers[2].norm is 'rm"),
        ("{kind: head, vocab: 32000", "{kind: head, tied: true, vocab: 8", "11:24: a tied head; "),
        ("{kind: head,", "{kind: head, count: 2,", "11:25: layers[2].count is '2'; expected at"),
        ("{kind: head,", "{kind: head, count: true,", "11:25: layers[2].count is 'true'; exp"),
        ("  - {kind: embedding", "  - 5\n  - {kind: embedding", "5:5: layers[0] is '5'; expected"),
    ],
)
def test_a_wrong_layer_is_told_with_its_place(problems, old, new, told):
    assert old in GOOD
    assert problems(load_model, GOOD.replace(old, new))[0].startswith(f"file.yaml:{told}")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{kind: embedding, vocab: 9, hidden: 4096}", "12:5: a later embedding; expected the emb"),
        ("{kind: head, vocab: 9, hidden: 4096}", "11:5: an earlier head; expected the head as the"),
    ],
)
def test_embeddings_come_first_and_heads_last(problems, line, told):
    assert f"file.yaml:{told}" in "\n".join(problems(load_model, GOOD + f"  - {line}\n"))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            "  - {kind: linear, in_features: 3, out_features: 5, count: 2}\n",
            "5:60: 2 layers in a row from width 3 to width 5; expected equal input and output",
        ),
        (
            (
                "  - {kind: linear, in_features: 3, out_features: 5}\n"
                "  - {kind: linear, in_features: 4, out_features: 5}\n"
            ),
            "6:5: the layer takes width 4, and the one before it gives width 5",
        ),
        (
            (
                "  - {kind: conv2d, in_channels: 3, out_channels: 3, kernel: 3, height: 8,"
                " width: 8, stride: 2, count: 2}\n"
            ),
            "5:103: 2 layers in a row from 3 channels of 8 x 8 to 3 channels of 4 x 4",
        ),
        (
            (
                "  - {kind: custom, forward_flop: -1, forward_bytes: 0, num_parameters: 0,\n"
                "     saved_bytes: 0, output_bytes: 0}\n"
            ),
            "5:34: layers[0].forward_flop is '-1'; expected at least 0",
        ),
    ],
)
def test_other_layers_that_do_not_fit_are_told(problems, lines, told):
    assert problems(load_model, HEAD + lines)[0].startswith(f"file.yaml:{told}")
