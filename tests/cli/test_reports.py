"""Texts that a person reads, with numbers by hand so that only the words are under test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plansamples import sample_estimate, sample_layout, sample_plan

from planner import explain_plan, load_inputs
from planner.manual import ManualLayout, layout_from_degrees
from planner.plan import plan_of
from planner.planning import Planned
from planner.sensitivity import Lever, Shift, Stated
from profiles import catalog_names, load_cluster, load_model
from reports import (
    catalog_report,
    estimate_report,
    explain_report,
    facts_of,
    facts_report,
    plan_report,
    print_report,
)
from reports.words import seconds


@pytest.fixture
def printed(capsys):
    def text(report):
        print_report(report)
        return "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())

    return text


@pytest.fixture
def rival():
    return sample_plan(
        layout=sample_layout(tp=1, first=6),
        estimate=sample_estimate(tp_s=0.0, compute_s=8.25, gib=7),
        search=False,
    )


def test_the_text_of_a_plan(printed, rival, snapshot):
    assert printed(plan_report(Planned(plan=sample_plan(), runners_up=(rival,)))) == snapshot


def test_the_text_of_an_estimate_that_does_not_fit(printed, snapshot):
    own = replace(sample_estimate(gib=9), fits=False, fit_probability=0.01)
    assert printed(estimate_report(sample_plan(estimate=own, search=False))) == snapshot


def test_stages_with_the_same_figures_share_a_line(printed):
    inputs = load_inputs("llama3-8b", "8xh100", overrides={"global_batch": 64, "seq_len": 2048})
    manual = ManualLayout(pp=8, schedule="gpipe", micro_batch=1)
    plan = plan_of(inputs, layout_from_degrees(inputs, manual))
    lines = printed(estimate_report(plan)).splitlines()
    first = next(n for n, line in enumerate(lines) if line.split()[:1] == ["stage"])
    rows = [line.split() for line in lines[first + 2 : lines.index("", first)]]
    assert [row[0] for row in rows] == ["0", "1", "7"]
    assert " ".join(rows[1]).startswith("1 to 6 1 to 6 4-7 to 24-27 none")


def test_the_text_of_an_explanation(printed, rival, snapshot):
    levers = (
        Lever(change="10 % faster GEMMs and attention", faster=0.081, relayout=False),
        Lever(change="10 % more memory a device", faster=0.012, relayout=True),
    )
    shifts = tuple(
        Shift(
            what=what,
            factor=0.9,
            step_s=(8.0, 8.1),
            fits=(best == 0, True),
            relayout=(False, best == 1),
            best=best,
        )
        for what, best in ((Stated.BANDWIDTH, 0), (Stated.MEMORY, 1))
    )
    explained = replace(explain_plan(sample_plan(), (rival,)), levers=levers, shifts=shifts)
    assert printed(explain_report(explained)) == snapshot


def test_the_text_of_an_interrupted_search(printed):
    plan = sample_plan()
    plan = replace(plan, search=replace(plan.search, complete=False))
    assert "STOPPED EARLY: the best plan so far" in printed(
        plan_report(Planned(plan=plan, runners_up=()))
    )


def test_the_text_of_a_model(printed, snapshot):
    assert printed(facts_report(facts_of(load_model("mixtral-8x7b")))) == snapshot


def test_the_text_of_a_cluster(printed, snapshot):
    assert printed(facts_report(facts_of(load_cluster("12xh100-80g")))) == snapshot


def test_the_text_of_the_catalogue_keeps_to_the_width(printed):
    for shelf in ("models", "devices", "nodes"):
        lines = printed(catalog_report(catalog_names(shelf))).splitlines()
        assert max(map(len, lines)) <= 120


def test_times_are_said_in_human_units():
    assert [seconds(value) for value in (0.0, 4.2e-4, 0.85, 58.44, 1204.4)] == [
        "0 s",
        "0.42 ms",
        "850 ms",
        "58.4 s",
        "1,204 s",
    ]
