"""Calibrations of several stacks: what is left out stays unseen; few runs of it bring it near."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from test_fitting import made_by, other

from costmodel.library import Leaf, Library
from costmodel.validation import judge_unseen
from profiles.calibrations import datasheet


def of_source(name, calibration):
    """Runs of a stack and a source of that name."""
    return [
        replace(each, run=replace(each.run, id=f"{name}{i}", file=name, stack=name))
        for i, each in enumerate(made_by(calibration))
    ]


@pytest.fixture(scope="module")
def replays():
    made = {"one": other(gemm=0.9), "two": other(gemm=0.8), "slow": other(gemm=0.5)}
    return [each for name, calibration in made.items() for each in of_source(name, calibration)]


@pytest.fixture(scope="module")
def library(replays):
    return Library(replays, datasheet())


def test_a_stack_left_out_with_its_source_is_met_by_what_the_device_usually_does(library):
    seen, place = library.find(Leaf("a100-80g", "slow"))
    assert place == ("a100-80g", "slow")
    assert seen.efficiencies.gemm == pytest.approx(0.5, abs=0.05)
    unseen, place = library.find(Leaf("a100-80g", "slow"), "slow")
    assert place == ("a100-80g", "any")
    assert unseen.efficiencies.gemm > 0.7


def test_five_runs_of_a_stack_never_seen_bring_the_estimate_near(library, replays):
    def error(few):
        judged = [e for e in judge_unseen(library, replays, few=few) if e.run.file == "slow"]
        return len(judged), statistics.median(abs(each.error) for each in judged)

    count, unseen = error(0)
    fewer, refined = error(5)
    assert fewer == count - 5
    assert unseen > 0.15
    assert refined < 0.05


def test_the_interval_of_a_stack_never_seen_is_wider(library):
    seen = library.find(Leaf("a100-80g", "one"))[0].efficiencies.step_time_90
    unseen = library.find(Leaf("a100-80g", "one"), "one")[0].efficiencies.step_time_90
    assert unseen[1] / unseen[0] > 1.2 * seen[1] / seen[0]
