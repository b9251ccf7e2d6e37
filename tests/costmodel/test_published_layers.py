"""Published times of layers and memory of ranks: no figure gets worse than the recorded one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from published import RUNS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import layer_times, memory  # noqa: E402 - they lie beside the tests

NOISE = 0.005


def recorded(path: Path) -> dict[str, dict[str, float]]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.skipif(
    not (RUNS / "layer_times.csv").is_file(), reason="layer_times.csv is not beside this project"
)
def test_layers_are_predicted_by_other_layers_and_splits_of_their_session():
    found, left_out = layer_times.measure(RUNS / "layer_times.csv")
    before = recorded(layer_times.RECORD)["total"]
    assert found["total"].n >= before["n"]
    assert found["total"].median <= min(0.12, before["median"] + NOISE)
    reasons = {reason.split(":")[0] for reason in left_out}
    assert reasons <= {"lines", "passes"}


@pytest.mark.skipif(
    not (RUNS / "memory_galvatron.csv").is_file(),
    reason="memory_galvatron.csv is not beside this project",
)
def test_memory_of_ranks_is_that_of_the_account():
    found = memory.measure(RUNS / "memory_galvatron.csv")
    before = recorded(memory.RECORD)
    assert found["total"].n == 3 * 750
    assert found["total"].median <= 0.07
    for name, own in found.items():
        assert own.median <= before[name]["median"] + NOISE, name
