from __future__ import annotations

import pytest

from planner import parse_restrictions
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


def test_dashes_are_as_good_as_underscores():
    own = parse_restrictions(["sequence-parallel=true"])
    assert own.allows("sequence_parallel", True)
    assert not own.allows("sequence_parallel", False)


def test_every_unknown_name_and_value_is_told_with_the_nearest(snapshot):
    fixed = ["tq=8", "tp", "tp=eight", "schedule=1f2b", "zero=4", "cp=0"]
    assert told(fixed, ["schedule=3", "tp=2,4"], ["recompute=fulls"]) == snapshot


def test_fixing_and_excluding_the_same_leaves_nothing():
    assert told(["tp=8"], (), ["tp=8"]) == ["--exclude: tp leaves nothing of what --fix allows"]
