from __future__ import annotations

from dataclasses import replace

import pytest
from plansamples import RECOMPUTES, sample_inputs, sample_layout, sample_plan

from costmodel.layout import Axis, ContextComm, Mesh
from planner import diff_plans, load_inputs, plan_of
from planner.plan import layer_ranges, layout_choices, stage_layers
from planner.plandocument import compact_ranks
from profiles.errors import InputError

INPUTS = sample_inputs()


def test_layers_are_called_by_name_and_numbers_by_range():
    assert layer_ranges(INPUTS.model, 0, 14) == ["embedding", "0-11", "head"]
    assert layer_ranges(INPUTS.model, 1, 2) == ["0"]
    assert stage_layers(INPUTS.model, sample_layout(), 1) == "7-11,head"


def test_ranks_of_a_stage_are_ranges_and_many_ranges_are_abbreviated():
    by_replica = (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP)
    assert compact_ranks(Mesh(tp=8, dp=4, pp=4), 1) == "32-63"
    assert compact_ranks(Mesh(tp=8, dp=2, pp=4, order=by_replica), 1) == "8-15,40-47"
    assert compact_ranks(Mesh(tp=8, dp=8, pp=16, order=by_replica), 0) == "0-7,128-135,...,896-903"


def test_a_plan_differs_from_itself_in_nothing():
    assert diff_plans(sample_plan(), sample_plan()) == []


def test_the_difference_names_every_decision_that_another_plan_takes():
    other = sample_plan(layout=sample_layout(tp=1, first=6))
    other = replace(other, inputs=other.inputs.with_training(precision="fp16"), launcher="native")
    assert [str(each) for each in diff_plans(sample_plan(), other)] == [
        "precision: bf16 -> fp16",
        "launcher: any -> native",
        "tp: 2 -> 1",
        "dp: 2 -> 4",
        "num_microbatches: 16 -> 8",
        "shard_group: 2 -> 4",
        "sequence_parallel: True -> False",
        "stage_layers: embedding,0-6 | 7-11,head -> embedding,0-5 | 6-11,head",
    ]


def test_how_keys_and_values_travel_is_a_decision():
    own = sample_layout()
    gathered = replace(
        own,
        chunks=tuple(
            replace(
                chunk,
                spans=tuple(
                    replace(span, strategy=replace(span.strategy, cp_comm=ContextComm.GATHER))
                    for span in chunk.spans
                ),
            )
            for chunk in own.chunks
        ),
    )
    found = diff_plans(sample_plan(), sample_plan(layout=gathered))
    assert [str(each) for each in found] == ["cp_comm: ring -> gather"]


def test_what_layers_decide_differently_is_said_by_layer():
    choices = layout_choices(INPUTS.model, sample_layout())
    assert choices["recompute"] == "none: embedding,2-11,head; full: 0-1"
    assert choices["zero"] == 1


def test_unused_gpus_and_a_ragged_batch_are_noted():
    inputs = load_inputs("gpt2", "2x8xh100-80g", overrides={"global_batch": 63, "seq_len": 1024})
    notes = plan_of(inputs, replace(sample_layout(), num_microbatches=16)).notes
    assert notes[-2].startswith("the global batch 63 does not divide by micro-batch 2 x dp 2")
    assert notes[-1] == "8 of 16 GPUs stay unused"


def test_problems_of_all_inputs_are_told_together():
    with pytest.raises(InputError) as caught:
        load_inputs("gtp2", "8xh10", overrides={"precision": "bf61"})
    assert [each.where for each in caught.value.problems] == ["--model", "--cluster", "--precision"]


def test_a_precision_that_the_device_lacks_is_refused_with_those_it_has():
    with pytest.raises(InputError, match="v100-32g has no rate for bf16; expected fp16, fp32"):
        load_inputs("gpt2", "8xv100", overrides={"seq_len": 1024})


def test_a_sequence_longer_than_the_model_was_made_for_is_noted():
    notes = load_inputs("gpt2", "8xh100").notes
    assert "--seq-len 4096 is longer than the 1024 tokens that gpt2 was made for" in notes


def test_the_samples_recompute_in_every_way():
    assert len({option.kind for option in RECOMPUTES}) == 3
