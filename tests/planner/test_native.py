"""What the native executor cannot do is refused: by the search, and before a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.layout import Axis, ContextComm, LayerSpan, Recompute, RecomputeKind
from planner import ManualLayout, layout_from_degrees, load_inputs, plan_of, plan_training
from planner.native import executed, layout_problems, model_problems, training_problems
from planner.restrictions import parse_restrictions
from planner.space import SearchSpace
from profiles.errors import InputError
from profiles.training import Optimizer, Precision

CHOICES = {"global_batch": 32, "seq_len": 2048}


def inputs_of(model="llama3-8b", cluster="8xh100", **training):
    return load_inputs(model, cluster, overrides=CHOICES | training)


def with_strategy(layout, changes):
    """The chunks with other strategies."""

    def changed(span):
        return replace(span, strategy=replace(span.strategy, **changes))

    return tuple(replace(c, spans=tuple(map(changed, c.spans))) for c in layout.chunks)


def problems_of(inputs, strategy=None, **degrees):
    layout = layout_from_degrees(inputs, ManualLayout(**degrees))
    layout = replace(layout, chunks=with_strategy(layout, strategy or {}))
    return layout_problems(inputs.model, inputs.training, layout)


@pytest.mark.parametrize(
    ("degrees", "strategy", "words"),
    [
        ({"tp": 2, "dp": 4, "zero": 3}, None, None),
        ({"cp": 2}, None, None),
        ({"cp": 2, "tp": 2, "zero": 3}, None, None),
        ({"cp": 2, "cp_comm": "gather"}, None, None),
        ({"cp": 2}, {"zero": 1, "shard_group": 3}, "shard group 3 does not divide dp 4 x cp 2"),
        ({"pp": 2, "schedule": "zb-h1"}, None, "schedule zb-h1; expected one of gpipe"),
        ({"pp": 8, "micro_batch": 8}, None, "4 micro-batches for 8 stages"),
        ({"pp": 2, "chunks": 2, "schedule": "zbv", "zero": 1}, None, None),
        ({"pp": 2, "chunks": 2, "schedule": "zbv", "zero": 2}, None, "ZeRO-2 with zbv"),
        ({"pp": 2, "chunks": 2, "schedule": "interleaved-zb", "zero": 3}, None, "ZeRO-3 with"),
        (
            {"pp": 2, "chunks": 2, "schedule": "zbv"},
            {"recompute": Recompute(RecomputeKind.FULL)},
            "recompute with zbv",
        ),
        (
            {"dp": 8},
            {"recompute": Recompute(RecomputeKind.SELECTIVE, ("operators",))},
            "recomputation of operators",
        ),
        ({"tp": 2, "dp": 4}, {"tp": 4, "dp": 2}, None),
        ({"tp": 2, "dp": 4}, {"tp": 4, "dp": 4}, "tp 4 x dp 4 of a strategy are not the mesh's"),
        ({"tp": 2, "dp": 4}, {"tp": 1, "dp": 8}, "the 4 sequences of a micro-batch do not divide"),
    ],
)
def test_a_layout_is_refused_with_its_rule(degrees, strategy, words):
    found = problems_of(inputs_of(), strategy, **degrees)
    assert found == [] if words is None else any(words in problem for problem in found)


def test_a_tied_matrix_lies_alike_at_both_ends():
    inputs = inputs_of("gpt2", seq_len=1024)
    layout = layout_from_degrees(inputs, ManualLayout(dp=8, zero=3))
    (chunk,) = layout.chunks
    (span,) = chunk.spans
    own = replace(span.strategy, zero=2)
    for at, refused in ((span.stop - 1, True), (12, False)):  # the head apart, and a block
        spans = [
            LayerSpan(each, each + 1, own if each == at else span.strategy)
            for each in range(span.first, span.stop)
        ]
        mixed = replace(layout, chunks=(replace(chunk, spans=tuple(spans)),))
        found = layout_problems(inputs.model, inputs.training, mixed)
        assert any("tied embedding and head" in problem for problem in found) is refused


def test_tensor_parallel_degrees_nest_and_their_ranks_are_neighbours():
    inputs = inputs_of(cluster="4x8xh100")
    layout = layout_from_degrees(inputs, ManualLayout(tp=2, pp=2, zero=1))
    between = (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP)
    chunks = (layout.chunks[0], with_strategy(layout, {"tp": 4, "dp": 4, "shard_group": 4})[1])
    mixed = replace(layout, chunks=chunks)
    assert layout_problems(inputs.model, inputs.training, mixed) == []
    mixed = replace(mixed, mesh=replace(layout.mesh, order=between))
    found = layout_problems(inputs.model, inputs.training, mixed)
    assert found == [
        "tp 4 of a strategy beside tp 2, in a rank order in which dp does not follow tp"
    ]


def test_key_value_heads_and_sequences_must_divide_by_tp():
    wide = inputs_of(cluster="2x8xh100", seq_len=2047)
    layout = layout_from_degrees(wide, ManualLayout(tp=8, sequence_parallel=False))
    strategies = {"tp": 16, "dp": 1, "sequence_parallel": True}
    chunks = with_strategy(layout, strategies)
    changed = replace(layout, chunks=chunks, mesh=replace(layout.mesh, tp=16, dp=1))
    found = layout_problems(wide.model, wide.training, changed)
    assert "8 key/value heads do not divide by tp 16" in found
    assert "sequences of 2047 tokens do not divide by tp 16" in found


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama3-8b", None),
        ("gpt2", None),
        ("gemma2-9b", None),
        ("mixtral-8x7b", None),
        ("qwen1.5-moe-a2.7b", None),
        ("glm-4.5", "no native bias of a router"),
        ("deepseek-v3", "no native latent attention"),
        ("gpt-oss-20b", "no native attention sinks"),
        ("bloom-176b", "positions are neither rotary nor learned"),
    ],
)
def test_a_model_without_native_layers_is_refused(model, words):
    inputs = inputs_of(model, "64xh100" if words else "8xh100", seq_len=1024)
    found = model_problems(inputs.model, inputs.training)
    assert found == [] if words is None else words in found
    if words is not None:
        with pytest.raises(InputError, match="launcher native"):
            plan_training(inputs, launcher="native")


@pytest.mark.parametrize(
    ("degrees", "strategy", "words"),
    [
        ({"ep": 8}, None, None),
        ({"ep": 4, "tp": 2, "zero": 3}, None, None),
        ({"ep": 2, "tp": 2, "expert_tp": 2, "cp": 2}, None, None),
        ({"ep": 2}, {"ep": 3}, "8 experts do not divide by ep 3"),
        ({"tp": 2}, {"sequence_parallel": False}, "experts with tp 2 need sequence parallelism"),
        (
            {"tp": 2},
            {"expert_tp": 3},
            "14336 inner features of experts do not divide by expert_tp 3",
        ),
        ({"dp": 8}, {"zero": 1, "shard_group": 1}, "ZeRO-1 in shard groups of one rank"),
    ],
)
def test_layouts_of_experts_are_refused_with_their_rule(degrees, strategy, words):
    found = problems_of(inputs_of("mixtral-8x7b"), strategy, **degrees)
    assert found == [] if words is None else any(words in problem for problem in found)


def test_sequences_must_divide_into_two_pieces_a_rank():
    inputs = inputs_of()
    layout = layout_from_degrees(inputs, ManualLayout(cp=2))
    odd = replace(inputs.training, seq_len=2050)
    words = "sequences of 2050 tokens do not divide by 2 x cp 2"
    assert words in layout_problems(inputs.model, odd, layout)


def test_windows_do_not_go_round_a_ring():
    inputs = inputs_of("gemma2-9b", seq_len=8192)
    layout = layout_from_degrees(inputs, ManualLayout(cp=2))
    assert {each.cp_comm for each in layout.strategies} == {ContextComm.GATHER}
    assert layout_problems(inputs.model, inputs.training, layout) == []
    ring = replace(layout, chunks=with_strategy(layout, {"cp_comm": ContextComm.RING}))
    words = "cp_comm ring with attention in windows of 4096; expected gather"
    assert words in layout_problems(inputs.model, inputs.training, ring)
    within = inputs_of("gemma2-9b", seq_len=4096)
    assert layout_problems(within.model, within.training, ring) == []
    with pytest.raises(InputError, match="in windows does not go round a ring"):
        layout_from_degrees(inputs, ManualLayout(cp=2, cp_comm="ring"))


def test_longer_sequences_than_learned_positions_are_refused():
    inputs = inputs_of("gpt2", seq_len=2048)
    assert "1024 learned positions" in model_problems(inputs.model, inputs.training)[0]


def test_precisions_and_optimizers_that_are_not_native_are_refused():
    training = inputs_of(precision=Precision.FP16, optimizer=Optimizer.LION).training
    found = training_problems(training)
    assert found[0].startswith("precision fp16")
    assert found[1].startswith("optimizer lion")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "gpipe", "interleaved-1f1b"])
def test_what_the_search_proposes_for_native_is_native(schedule):
    inputs = inputs_of(cluster="4x8xh100")
    restrictions = parse_restrictions([f"schedule={schedule}", "pp=4"], [], [])
    planned = plan_training(inputs, launcher="native", restrictions=restrictions)
    for plan in (planned.plan, *planned.runners_up):
        assert layout_problems(inputs.model, plan.inputs.training, plan.layout) == []


def test_the_space_of_native_leaves_no_pipeline_unfilled():
    inputs = inputs_of(cluster="4x8xh100", global_batch=8)
    space = SearchSpace(inputs.model, inputs.cluster, inputs.training, launcher="native")
    found = [each for each in space.degrees() if each.schedule == "1f1b"]
    assert all(8 // (each.dp * each.micro_batch) >= each.pp for each in found)
    assert space.refused["fewer micro-batches than stages"] > 0


def test_a_plan_as_it_is_executed_has_the_costs_of_its_kernels_and_says_so():
    inputs = load_inputs("llama3-8b", "8xh100", overrides={"global_batch": 16})
    layout = layout_from_degrees(inputs, ManualLayout(dp=8, zero=3, micro_batch=1))
    plan = plan_of(inputs, layout)
    found = executed(plan)
    assert found.layout == plan.layout
    assert found.estimate.step_s > plan.estimate.step_s
    assert found.estimate.allocated_bytes != plan.estimate.allocated_bytes
    assert "parplan launch" in found.notes[-1]


def test_what_the_executor_refuses_has_no_costs_of_it():
    inputs = load_inputs("llama3-8b", "8xh100", overrides={"global_batch": 16})
    layout = layout_from_degrees(inputs, ManualLayout(dp=8, zero=3, micro_batch=1))
    refused = plan_of(inputs, replace(layout, num_microbatches=3))
    with pytest.raises(InputError, match="native cannot run it"):
        executed(refused)
