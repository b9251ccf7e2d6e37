"""The README and the error budget show the recorded figures, not older ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy import markdown, unseen_markdown  # noqa: E402 - beside the tests
from benchmarks.figures import Figures, table  # noqa: E402 - as above


@pytest.mark.parametrize(
    ("page", "part"),
    [("README.md", "cross-validated"), ("docs/explanation/error-budget.md", "full")],
)
def test_the_page_shows_the_recorded_table(page, part):
    recorded = json.loads((ROOT / "benchmarks" / "accuracy.json").read_text(encoding="utf-8"))
    assert markdown(recorded[part]) in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("first", "record"),
    [("device", "collectives"), ("session", "layer_times"), ("quantity", "memory")],
)
def test_the_error_budget_shows_the_recorded_figures(first, record):
    recorded = json.loads((ROOT / "benchmarks" / f"{record}.json").read_text(encoding="utf-8"))
    found = {name: Figures(**own) for name, own in recorded.items()}
    page = (ROOT / "docs" / "explanation" / "error-budget.md").read_text(encoding="utf-8")
    assert table(first, found) in page


def test_the_error_budget_shows_the_recorded_table_of_stacks_never_seen():
    recorded = json.loads((ROOT / "benchmarks" / "accuracy.json").read_text(encoding="utf-8"))
    table = unseen_markdown(recorded["unseen stack"], recorded["after 5 runs"])
    page = ROOT / "docs" / "explanation" / "error-budget.md"
    assert table in page.read_text(encoding="utf-8")
