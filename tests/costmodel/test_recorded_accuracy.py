"""No figure of the accuracy table gets worse than the recorded one by more than its noise.

The full set of published runs is used where it stands beside the project, else the shipped table;
``python -m benchmarks.accuracy --write`` records both.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from published import RUNS

from costmodel.accuracy import TOTAL, summaries
from costmodel.validation import validate
from profiles.runs import published_runs, read_runs

RECORD = Path(__file__).parents[2] / "benchmarks" / "accuracy.json"
FULL = RUNS / "measured_runs.csv"
MOST_CPU_S = 60
WORSE = {  # figure: what it may lose, absolutely
    "median": 0.003,
    "p90": 0.01,
    "mape": 0.005,
    "oom_accuracy": -0.01,
    "coverage": -0.02,
    "memory_median": 0.005,
    "regret_mean": 0.005,
    "tau": -0.02,
}


@pytest.fixture(scope="module")
def now():
    path = FULL if FULL.is_file() else published_runs()
    start = time.process_time()
    judged = validate(read_runs(path).runs)
    assert time.process_time() - start <= MOST_CPU_S
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    return judged, recorded["full" if path == FULL else "shipped table"]


def test_no_figure_is_worse_than_recorded(now):
    judged, recorded = now
    own = summaries(judged)[TOTAL]
    for name, slack in WORSE.items():
        found, before = getattr(own, name), recorded[TOTAL][name]
        if before is not None:
            assert (found - before) * (1 if slack > 0 else -1) <= abs(slack), name


def test_every_source_keeps_its_median(now):
    judged, recorded = now
    for source, own in summaries(judged).items():
        before = recorded[source]["median"]
        if before is not None:
            assert own.median <= before + max(0.005, 0.1 * before), source


def test_runs_that_must_be_predicted_are(now):
    judged, _ = now
    must = [each for each in judged if each.run.always_predicted]
    assert sum(each.skipped is not None for each in must) <= 0.02 * len(must)
