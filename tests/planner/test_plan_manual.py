from __future__ import annotations

import pytest
from plansamples import sample_inputs

from costmodel.layout import RecomputeKind
from planner import ManualLayout, layout_from_degrees, load_inputs, plan_of
from profiles.errors import InputError

GPT2 = sample_inputs()
LLAMA = load_inputs("llama3-8b", "4x8xh100", overrides={"global_batch": 256, "seq_len": 4096})
MIXTRAL = load_inputs("mixtral-8x7b", "4x8xh100", overrides={"global_batch": 256, "seq_len": 4096})


def told(inputs=LLAMA, **choices):
    with pytest.raises(InputError) as caught:
        layout_from_degrees(inputs, ManualLayout(**choices))
    return [str(problem) for problem in caught.value.problems]


def sizes(layout):
    return [chunk.stop - chunk.first for chunk in layout.chunks]


def test_data_parallelism_fills_the_cluster_but_never_beyond_the_batch():
    assert layout_from_degrees(LLAMA, ManualLayout(tp=2, pp=2)).mesh.dp == 8
    few = LLAMA.with_training(global_batch=4)
    assert layout_from_degrees(few, ManualLayout(tp=2, pp=2)).mesh.dp == 4


def test_states_are_sharded_over_all_replicas_unless_said():
    strategy = layout_from_degrees(LLAMA, ManualLayout(tp=2, cp=2, zero=3)).strategies[0]
    assert (strategy.zero, strategy.shard_group, strategy.sequence_parallel) == (3, 16, True)


def test_experts_take_the_tensor_degree_unless_said():
    assert layout_from_degrees(MIXTRAL, ManualLayout(tp=2, ep=4)).mesh.expert_tp == 2
    assert layout_from_degrees(MIXTRAL, ManualLayout(tp=2, ep=4, expert_tp=1)).mesh.expert_tp == 1
    assert layout_from_degrees(LLAMA, ManualLayout(tp=2)).mesh.expert_tp == 1


def test_a_cut_is_even_and_inner_stages_take_the_rest():
    assert sizes(layout_from_degrees(LLAMA, ManualLayout(pp=4))) == [9, 8, 8, 9]
    assert sizes(layout_from_degrees(GPT2, ManualLayout(pp=5))) == [3, 3, 3, 2, 3]


def test_blocks_of_each_stage_can_be_said():
    layout = layout_from_degrees(LLAMA, ManualLayout(pp=4, stage_layers="7,8,9,8"))
    assert sizes(layout) == [8, 8, 9, 9]


def test_chunks_mean_the_interleaved_schedule():
    layout = layout_from_degrees(LLAMA, ManualLayout(pp=4, chunks=2))
    assert layout.schedule == "interleaved-1f1b"
    assert [(chunk.stage, chunk.chunk) for chunk in layout.chunks[3:5]] == [(3, 0), (0, 1)]


@pytest.mark.parametrize(
    ("text", "kind", "modules"),
    [
        ("full", RecomputeKind.FULL, ()),
        ("selective", RecomputeKind.SELECTIVE, ("core_attn",)),
        ("selective:mlp+layernorm", RecomputeKind.SELECTIVE, ("layernorm", "mlp")),
    ],
)
def test_recomputation_is_of_every_block_and_of_nothing_else(text, kind, modules):
    layout = layout_from_degrees(LLAMA, ManualLayout(recompute=text))
    spans = layout.chunks[0].spans
    assert [(span.first, span.stop) for span in spans] == [(0, 1), (1, 33), (33, 34)]
    assert (spans[1].strategy.recompute.kind, spans[1].strategy.recompute.modules) == (
        kind,
        modules,
    )


def test_full_with_a_number_is_of_the_first_blocks_of_each_chunk():
    layout = layout_from_degrees(LLAMA, ManualLayout(pp=2, recompute="full:3"))
    full = [
        (span.first, span.stop)
        for chunk in layout.chunks
        for span in chunk.spans
        if span.strategy.recompute.kind is RecomputeKind.FULL
    ]
    assert full == [(1, 4), (17, 20)]


def test_the_ragged_batch_is_rounded_up():
    ragged = LLAMA.with_training(global_batch=250)
    layout = layout_from_degrees(ragged, ManualLayout(tp=2, dp=16, micro_batch=3))
    assert layout.num_microbatches == 6
    assert "does not divide" in plan_of(ragged, layout).notes[-1]


ILLEGAL = {
    "heads": {"tp": 3},
    "too many gpus": {"tp": 8, "pp": 4, "dp": 2},
    "sequence": {"cp": 3},
    "more replicas than sequences": {"dp": 512},
    "micro-batch": {"dp": 32, "micro_batch": 9},
    "stages": {"pp": 33, "dp": 1},
    "chunks": {"pp": 4, "chunks": 9},
    "interleaved without chunks": {"pp": 4, "schedule": "interleaved-1f1b"},
    "chunks without interleaving": {"pp": 4, "chunks": 2, "schedule": "1f1b"},
    "interleaved batches": {"pp": 4, "chunks": 2, "dp": 8, "micro_batch": 5},
    "experts of a dense model": {"ep": 2},
    "shard group": {"zero": 3, "shard_group": 5},
    "sequence parallel alone": {"sequence_parallel": True},
    "cut": {"pp": 4, "stage_layers": "9,8,8"},
    "cut in words": {"pp": 2, "stage_layers": "16,many"},
    "recompute": {"recompute": "ful"},
    "modules": {"recompute": "selective:core_atn"},
    "order": {"rank_order": "tp-dp-pp"},
    "schedule": {"schedule": "2f2b"},
}


@pytest.mark.parametrize("choices", ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_layout_is_refused_with_rule_numbers_and_valid_values(choices, snapshot):
    assert told(**choices) == snapshot


MOE = {
    "experts do not divide": {"ep": 3},
    "ranks do not divide": {"tp": 2, "dp": 2, "ep": 8},
    "expert tensor degree": {"tp": 4, "ep": 2, "expert_tp": 2},
    "experts without sequence parallelism": {"tp": 2, "sequence_parallel": False},
}


@pytest.mark.parametrize("choices", MOE.values(), ids=MOE)
def test_experts_have_rules_of_their_own(choices, snapshot):
    assert told(MIXTRAL, **choices) == snapshot


def test_all_broken_rules_are_told_at_once():
    assert [line.split(":")[0] for line in told(tp=3, cp=3, recompute="ful", stage_layers="1")] == [
        "--recompute",
        "--tp",
        "--cp",
        "--stage-layers",
    ]
