"""Damaged files and odd command lines: no traceback, a place for every mistake."""

from __future__ import annotations

import random

import pytest

from benchmarks.mutations import run
from planner.flags import INPUT_FLAGS, LAYOUT_FLAGS, SEARCH_FLAGS, Kind

ODD = (
    *("", " ", "-1", "0", "1", "2", "3", "1e30", "nan", "inf", "-inf", "1.5", "true", "null"),
    *("a" * 5000, "9" * 400, "\x00", "é", "tp=2", "tp=", "=2", "tp=1e9", "zero=9", "tp=2,2,x"),
    *("8xh100", "0xh100", "2x2xh100", "gpt2", "..", "/dev/null", "bf16", "fp8", "full:3", "none"),
    *("selective:mlp", "tp-cp-ep-dp-pp", "interleaved-1f1b", "6,6", "pp=2", "gpus=3", "native"),
)


def test_a_thousand_damaged_files():
    outcome = run(1_000)
    assert outcome.failures == []
    assert outcome.refused.total() > 700
    assert outcome.accepted.total() > 50


def test_odd_command_lines_are_answered_or_refused(parplan):
    rng = random.Random(20261130)
    codes = set()
    flags = {flag.name: flag for flag in (*INPUT_FLAGS, *LAYOUT_FLAGS, *SEARCH_FLAGS)}
    for _ in range(400):
        command = rng.choice(("estimate", "plan", "explain"))
        own = LAYOUT_FLAGS if command == "estimate" else SEARCH_FLAGS
        given = {"model": "gpt2", "cluster": "4xh100", "global-batch": "8", "seq-len": "64"}
        for flag in rng.sample((*INPUT_FLAGS, *own), rng.randint(1, 3)):
            given[flag.name] = rng.choice(ODD)
        arguments = [command]
        for name, value in given.items():
            bare = flags[name].kind in (Kind.SWITCH, Kind.EITHER)
            arguments.append(f"--{name}" if bare else f"--{name}={value}")
        result = parplan(*arguments)
        assert result.exit_code in (0, 1, 2), (arguments, result.output[-2000:])
        assert result.exit_code == 0 or result.stderr.strip(), arguments
        codes.add(result.exit_code)
    assert codes >= {0, 2}


@pytest.mark.parametrize("command", ["plan", "estimate", "explain"])
def test_not_a_number_is_no_probability(parplan, command):
    job = f"{command} --model gpt2 --cluster 4xh100 --min-fit nan"
    result = parplan(*job.split())
    assert result.exit_code == 2
    assert "nan" in result.stderr
