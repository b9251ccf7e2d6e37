from __future__ import annotations

import pytest

from planner import load_inputs, parse_restrictions
from planner.feasibility import tightest_constraint
from planner.space import SearchSpace
from profiles.errors import InputError


def told(*arguments, **keywords):
    with pytest.raises(InputError) as caught:
        parse_restrictions(*arguments, **keywords)
    return [str(problem) for problem in caught.value.problems]


def test_a_choice_may_be_fixed_to_several_values():
    own = parse_restrictions(["zero=1,2", "tp=08"], ["pp=4"], ["recompute=full"])
    assert [own.allows("zero", zero) for zero in range(4)] == [False, True, True, False]
    assert (own.allows("tp", 8), own.allows("tp", 4)) == (True, False)
    assert (own.allows("pp", 4), own.allows("pp", 5)) == (True, False)
    assert not own.allows("recompute", "full")


@pytest.mark.parametrize(("fixed", "way"), [("ring", "ring"), ("gather", "gather"), (None, "ring")])
def test_keys_and_values_get_around_as_the_user_says(fixed, way):
    inputs = load_inputs("llama3-8b", "8xh100", overrides={"global_batch": 8, "seq_len": 8192})
    restrictions = parse_restrictions(["cp=2", *([f"cp_comm={fixed}"] if fixed else [])])
    space = SearchSpace(inputs.model, inputs.cluster, inputs.training, restrictions=restrictions)
    assert {degrees.cp_comm.value for degrees in space.degrees()} == {way}


@pytest.mark.parametrize(
    ("launcher", "wanted", "words"),
    [
        ("torchtitan", "ring", "torchtitan has no cp_comm ring, which native, megatron, "),
        ("galvatron", "gather", "galvatron has no cp_comm gather, which native, megatron, "),
    ],
)
def test_a_way_that_a_launcher_lacks_is_told_with_those_that_have_it(launcher, wanted, words):
    inputs = load_inputs("llama3-8b", "8xh100", overrides={"global_batch": 8, "seq_len": 8192})
    restrictions = parse_restrictions(["cp=2", f"cp_comm={wanted}"])
    own = {"launcher": launcher, "restrictions": restrictions}
    space = SearchSpace(inputs.model, inputs.cluster, inputs.training, **own)
    told = tightest_constraint(inputs.context, space, min_fit=0.9)
    assert told.startswith(words)
    assert told.endswith(f"; legal is {'gather' if wanted == 'ring' else 'ring'}")


def test_dashes_are_as_good_as_underscores():
    own = parse_restrictions(["sequence-parallel=true"])
    assert own.allows("sequence_parallel", True)
    assert not own.allows("sequence_parallel", False)


def test_every_unknown_name_and_value_is_told_with_the_nearest(snapshot):
    fixed = ["tq=8", "tp", "tp=eight", "schedule=1f2b", "zero=4", "cp=0"]
    assert told(fixed, ["schedule=3", "tp=2,4"], ["recompute=fulls"]) == snapshot


def test_fixing_and_excluding_the_same_leaves_nothing():
    assert told(["tp=8"], (), ["tp=8"]) == ["--exclude: tp leaves nothing of what --fix allows"]
