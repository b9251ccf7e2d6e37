from __future__ import annotations

import csv
import json

import pytest

from profiles.errors import InputError
from profiles.families import FAMILIES
from profiles.huggingface import load_config
from profiles.layers import Block, Embedding, ExpertFeedForward, FeedForward, Head, Norm, QKNorm

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 96,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


@pytest.fixture
def model_of(tmp_path):
    def read(base, **changes):
        (tmp_path / "config.json").write_text(json.dumps(base | changes))
        return load_config(tmp_path)

    return read


@pytest.fixture
def told_of(problems):
    def told(base, *without, **changes):
        config = {key: value for key, value in (base | changes).items() if key not in without}
        return problems(load_config, json.dumps(config, indent=0), "config.json")

    return told


def block(model, index=0):
    return [layer for layer in model.layers if isinstance(layer, Block)][index]


def test_llama3_8b_has_its_published_parameters(model_of):
    assert model_of(LLAMA).params_total == 8_030_261_248


def test_gpt2_has_its_published_parameters_and_every_quirk(model_of):
    model = model_of(GPT2)
    embedding, head = model.layers[0], model.layers[-1]
    assert isinstance(embedding, Embedding)
    assert isinstance(head, Head)
    assert (embedding.positions, embedding.dropout, head.tied) == (1024, True, True)
    first = block(model)
    assert (first.norm, first.dropout, first.attention.rope) == (Norm.LAYER, True, False)
    assert first.attention.qkv_bias
    assert first.attention.output_bias
    assert first.feed_forward == FeedForward(ffn_hidden=3072, gated=False, bias=True)
    assert model.params_total == 124_439_808


def test_null_inner_width_of_gpt2_is_four_times_the_width(model_of):
    assert model_of(GPT2, n_inner=None) == model_of(GPT2)
    assert model_of(GPT2, n_inner=100).params_total < model_of(GPT2).params_total


def test_absent_key_value_heads_are_all_the_heads_in_llama(model_of):
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert block(model_of(config)).attention.kv_heads == 32


def test_absent_key_value_heads_are_the_class_default_in_mistral_and_null_means_heads(model_of):
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    config["model_type"] = "mistral"
    assert block(model_of(config)).attention.kv_heads == 8
    assert block(model_of(config, num_key_value_heads=None)).attention.kv_heads == 32


def test_null_head_size_is_width_over_heads_and_an_explicit_one_wins(model_of):
    assert block(model_of(LLAMA, head_dim=None)).attention.head_dim == 128
    assert block(model_of(LLAMA, head_dim=64)).attention.query_width == 2048


def test_biases_of_llama_have_fields(model_of):
    attention = block(model_of(LLAMA, attention_bias=True)).attention
    assert attention.qkv_bias
    assert attention.output_bias
    assert block(model_of(LLAMA, mlp_bias=True)).feed_forward.bias


def test_qwen2_biases_its_queries_keys_and_values_without_a_field(model_of):
    attention = block(model_of(LLAMA, model_type="qwen2")).attention
    assert attention.qkv_bias
    assert not attention.output_bias


def test_qwen2_has_a_window_only_if_it_uses_it_and_only_above_a_layer(model_of):
    config = LLAMA | {"model_type": "qwen2", "sliding_window": 1024, "max_window_layers": 30}
    assert block(model_of(config), 31).attention.window is None
    used = model_of(config, use_sliding_window=True)
    assert [block(used, index).attention.window for index in (29, 30, 31)] == [None, 1024, 1024]


def test_mistral_has_a_window_unless_it_is_null(model_of):
    config = LLAMA | {"model_type": "mistral"}
    assert block(model_of(config)).attention.window == 4096
    assert block(model_of(config, sliding_window=None)).attention.window is None


def test_layer_types_say_which_layers_have_a_window(model_of):
    kinds = ["full_attention", "sliding_attention"] * 16
    config = LLAMA | {"model_type": "mistral", "layer_types": kinds}
    model = model_of(config)
    assert [block(model, index).attention.window for index in (0, 1)] == [None, 4096]


def test_qwen3_norms_queries_and_keys_per_head(model_of):
    assert block(model_of(LLAMA, model_type="qwen3")).attention.qk_norm is QKNorm.PER_HEAD


def test_sparse_step_and_dense_layers_of_qwen_say_which_layers_have_experts(model_of):
    model = model_of(QWEN3_MOE, decoder_sparse_step=2, mlp_only_layers=[1])
    kinds = [isinstance(block(model, i).feed_forward, ExpertFeedForward) for i in range(6)]
    assert kinds == [False, False, False, True, False, True]


def test_qwen3_moe_needs_no_dense_width_where_no_layer_is_dense(model_of, told_of):
    config = {key: value for key, value in QWEN3_MOE.items() if key != "intermediate_size"}
    assert model_of(config).kinds == {"embedding": 1, "moe-block": 32, "head": 1}
    told = told_of(config, mlp_only_layers=[0])
    assert told == [
        (
            "config.json:1:1: intermediate_size is missing, and some layers are dense; "
            "expected intermediate_size or n_inner or ffn_hidden_size"
        )
    ]


def test_qwen2_moe_has_one_gated_shared_expert(model_of):
    model = model_of(QWEN3_MOE, model_type="qwen2_moe", shared_expert_intermediate_size=5632)
    experts = block(model).feed_forward
    assert isinstance(experts, ExpertFeedForward)
    assert (experts.shared_hidden, experts.shared_gate) == (5632, True)


def test_deepseek_v3_has_latent_attention_dense_first_layers_and_shared_experts(model_of):
    model = model_of(DEEPSEEK, num_nextn_predict_layers=1)
    assert model.kinds == {"embedding": 1, "block": 3, "moe-block": 29, "head": 1}
    attention, experts = block(model, 3).attention, block(model, 3).feed_forward
    assert (attention.kv_heads, attention.head_dim, attention.value_head_dim) == (32, 192, 96)
    assert isinstance(experts, ExpertFeedForward)
    assert experts.correction_bias
    assert experts.shared_hidden == 2048
    assert model.mtp_layers == 1


def test_deepseek_v2_projects_queries_directly_where_their_rank_is_null(model_of):
    model = model_of(DEEPSEEK, model_type="deepseek_v2", q_lora_rank=None)
    assert block(model).attention.latent.query_rank is None
    assert not block(model).feed_forward.correction_bias


def test_keys_with_an_underscore_are_comments(model_of):
    assert model_of(LLAMA, _d_state=16, _note={"a": []}) == model_of(LLAMA)


def test_a_config_is_read_from_its_file_or_its_folder(model_of, tmp_path):
    assert model_of(LLAMA) == load_config(tmp_path / "config.json")
    assert model_of(LLAMA).name == tmp_path.name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ssm_cfg", {"layer": "x"}),
        ("d_state", 16),
        ("block_configs", [{}]),
        ("is_encoder_decoder", True),
        ("mamba_num_heads", 8),
        ("hybrid_override_pattern", "M*"),
        ("linear_num_key_heads", 16),
        ("text_config", {"hidden_size": 1}),
        ("add_cross_attention", True),
        ("index_topk", 2048),
    ],
)
def test_a_known_type_with_foreign_parts_is_refused(told_of, key, value):
    (told,) = told_of(LLAMA, **{key: value})
    assert told.startswith("config.json:9:")
    assert f": {key} says that it has " in told


@pytest.mark.parametrize(("key", "value"), [("is_encoder_decoder", False), ("ssm_cfg", {})])
def test_a_foreign_key_that_says_no_is_harmless(model_of, key, value):
    assert model_of(LLAMA, **{key: value}) == model_of(LLAMA)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": "4096"}, "3:16: hidden_size is '4096'; expected a whole number from 1"),
        ({"hidden_size": True}, "3:16: hidden_size is 'true'; expected a whole number from 1"),
        ({"hidden_size": 4096.0}, "3:16: hidden_size is '4096.0'; expected a whole number"),
        ({"hidden_size": -1}, "3:16: hidden_size is '-1'; expected a whole number from 1"),
        ({"hidden_size": 10**30}, "3:16: hidden_size is '1000000000"),
        ({"hidden_size": None}, "3:16: hidden_size is null; expected a whole number"),
        ({"num_hidden_layers": 0}, "5:22: num_hidden_layers is '0'; expected a whole number"),
        ({"num_attention_heads": 24}, "6:24: hidden size 4096 over 24 heads; expected heads"),
        ({"num_key_value_heads": 7}, "7:24: 32 heads over 7 key/value heads; expected key/value"),
        ({"vocab_size": [1]}, "8:15: vocab_size is a list; expected a whole number"),
        ({"tie_word_embeddings": "no"}, "9:24: tie_word_embeddings is 'no'; expected true or"),
        ({"n_embd": 768}, "9:11: n_embd differs from hidden_size; expected 4096"),
        ({"num_local_experts": 8}, "9:22: num_local_experts in a model of type llama"),
        ({"kv_lora_rank": 512}, "9:17: kv_lora_rank in a model of type llama"),
        ({"layer_types": ["full_attention"]}, "9:16: 1 layer_types for 32 layers"),
        ({"layer_types": ["linear_attention"] * 32}, "9:16: layer_types has linear_attention"),
        ({"layer_types": 7}, "9:16: layer_types is '7'; expected a list of names"),
    ],
)
def test_a_wrong_value_is_told_with_its_place(told_of, changes, told):
    (line,) = told_of(LLAMA, **changes)
    assert line.startswith(f"config.json:{told}")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts_per_tok": 129}, "a token meets 129 of 128 experts; expected at most 128"),
        ({"mlp_only_layers": [32]}, "mlp_only_layers names layer 32; expected layers 0 to 31"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers is a list; expected a list of layer numbers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is '0'; expected a whole number"),
    ],
)
def test_experts_that_do_not_fit_together_are_told(told_of, changes, told):
    (line,) = told_of(QWEN3_MOE, **changes)
    assert told in line


def test_all_problems_of_a_config_are_told_at_once(told_of):
    told = told_of(LLAMA, "vocab_size", hidden_size=-1, num_key_value_heads=3, mlp_bias=1)
    assert [line.split(": ")[1] for line in told] == [
        "vocab_size is missing; expected vocab_size",
        "hidden_size is '-1'; expected a whole number from 1 to 1,000,000",
        "32 heads over 3 key/value heads; expected key/value heads that divide the heads",
        "mlp_bias is '1'; expected true or false",
    ]


def test_a_missing_field_names_every_key_tried_and_what_may_be_misspelt(told_of):
    (told,) = told_of(LLAMA, "num_hidden_layers", num_hiden_layers=32)
    assert told == (
        "config.json:1:1: num_hidden_layers is missing; "
        "expected num_hidden_layers or n_layer or n_layers or num_layers "
        "(is num_hiden_layers misspelt?)"
    )


def test_an_unknown_family_is_named_with_the_known_ones_nearest_first(told_of):
    (told,) = told_of(LLAMA, model_type="mistrall")
    assert told.startswith(
        "config.json:2:15: the family 'mistrall' is not understood; expected one of mistral, "
    )
    assert all(name in told for name in FAMILIES)


def test_an_unknown_family_is_told_what_it_lacks(told_of):
    told = told_of({"model_type": "mamba", "hidden_size": 8, "state_size": 16})
    assert "num_attention_heads/n_head" in told[0]
    assert "state_size says that it has state-space layers" in told[1]


def test_a_config_without_a_family_is_refused(told_of):
    assert "model_type is missing" in told_of(LLAMA, "model_type")[0]
    assert "model_type is '7'" in told_of(LLAMA, model_type=7)[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "config.json:1:1: the file is empty"),
        ("{", "config.json:1:2: not valid JSON: Expecting property name"),
        ("[]", "config.json:1:1: the file holds a list; expected an object"),
        ("3", "config.json:1:1: the file holds a single value; expected an object"),
        ('{"a": NaN}', "config.json: not valid JSON: NaN is not a number of JSON"),
        ("[" * 100_000, "config.json: not valid JSON: nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "config.json: not valid JSON: Exceeds the limit"),
        (b'{"a": "\xff"}', "config.json:1:8: byte 0xff is not UTF-8"),
    ],
)
def test_what_is_not_json_is_told(problems, text, told):
    assert problems(load_config, text, "config.json")[0].startswith(told)


def test_a_field_given_twice_is_told_even_where_places_are_unknown(problems):
    text = json.dumps(LLAMA)[:-1] + ', "vocab_size": 5}'
    assert "the key 'vocab_size' stands twice" in problems(load_config, text, "config.json")[0]
    text = text.replace('"model_type"', '"x": "\\ud800", "model_type"')
    assert "the key 'vocab_size' stands twice" in problems(load_config, text, "config.json")[0]


def test_possible_fields_that_are_absurd_together_are_refused(told_of):
    (told,) = told_of(
        LLAMA, hidden_size=10**6, intermediate_size=10**7, head_dim=128, num_hidden_layers=10_000
    )
    assert "parameters together; expected at most 1,000,000,000,000,000" in told


# The sheet allows it either way.
NOT_YET = ("glm-5.2",)


def test_published_configs_have_their_published_counts_or_are_refused(shared):
    with (shared / "expected.csv").open() as file:
        rows = list(csv.DictReader(file))
    refused = set()
    for row in rows:
        path = shared / "hf" / f"{row['name']}.json"
        if row["expect"].startswith("refuse") or row["name"] in NOT_YET:
            with pytest.raises(InputError, match=r"not understood|says that it has"):
                load_config(path)
            refused.add(row["name"])
            continue
        model = load_config(path)
        total, active = float(row["count_total_b"]), float(row["count_active_b"])
        assert model.params_total / 1e9 == pytest.approx(total, rel=0.005), row["name"]
        assert model.params_active / 1e9 == pytest.approx(active, rel=0.02), row["name"]
    assert len(refused) == 7
    assert len(rows) == 37


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt-neox-20b", 20_554_567_680),
        ("gpt-j-6b", 6_050_882_784),
        ("bloom-176b", 176_247_271_424),
        ("phi-3-mini", 3_821_079_552),
        ("chatglm3-6b", 6_243_584_000),
        ("mpt-7b", 6_649_286_656),
    ],
)
def test_the_counts_of_other_families_are_those_of_their_published_weights(shared, name, count):
    assert load_config(shared / "hf" / f"{name}.json").params_total == count


def test_a_variant_that_the_entry_is_not_true_of_is_refused(told_of):
    config = {
        "model_type": "mpt",
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "vocab_size": 100,
        "no_bias": True,
        "attn_config": {"alibi": False},
    }
    assert any("attn_config.alibi is not true" in told for told in told_of(config))


FALCON = {
    "model_type": "falcon",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def test_the_classes_of_falcon_differ_by_a_key(model_of, told_of):
    old, new = model_of(FALCON), model_of(FALCON, new_decoder_architecture=True, num_kv_heads=4)
    one_norm = model_of(
        FALCON, new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1
    )
    assert [block(each).attention.kv_heads for each in (old, new, one_norm)] == [1, 4, 4]
    assert [block(each).num_norms for each in (old, new, one_norm)] == [1, 2, 1]
    assert block(model_of(FALCON, multi_query=False)).attention.kv_heads == 8
    (told,) = told_of(FALCON, parallel_attn=False)
    assert "parallel_attn is not true: that variant is not understood" in told


def test_a_value_inside_a_mapping_is_told_with_its_place(told_of):
    config = {
        "model_type": "dbrx",
        "d_model": 512,
        "n_heads": 8,
        "n_layers": 2,
        "vocab_size": 1000,
        "attn_config": {"kv_n_heads": 3},
        "ffn_config": {"moe_num_experts": -4, "ffn_hidden_size": 64},
    }
    told = told_of(config)
    assert [line.split(": ", 1)[1] for line in told] == [
        "ffn_config.moe_top_k is missing; expected ffn_config.moe_top_k",
        "8 heads over 3 key/value heads; expected key/value heads that divide the heads",
        "ffn_config.moe_num_experts is '-4'; expected a whole number from 1 to 100,000",
    ]
    assert told[2].startswith("config.json:11:20")


def test_an_embedding_of_another_width_is_refused(told_of):
    config = {
        "model_type": "opt",
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50272,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    }
    told = told_of(config)
    assert any("an embedding of another width than the blocks" in line for line in told)
    assert any("do_layer_norm_before is not true" in line for line in told)


def test_a_vision_tower_is_left_out_only_where_the_language_part_is_understood(model_of, told_of):
    tower = {"depth": 32}
    config = LLAMA | {"model_type": "qwen2_5_vl", "vision_config": tower}
    assert model_of(config).params_total == model_of(LLAMA, model_type="qwen2").params_total
    assert "a vision tower" in told_of(LLAMA, vision_config=tower)[0]


def test_plain_attention_said_layer_by_layer_is_harmless_and_linear_attention_is_not(
    told_of, model_of
):
    assert model_of(LLAMA, attn_type_list=[1] * 32) == model_of(LLAMA)
    assert "linear attention in some layers" in told_of(LLAMA, attn_type_list=[0, 1] * 16)[0]
