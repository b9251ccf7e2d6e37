"""What stands in a page: the numbers of ``--format json``, in the answer and in every figure."""

from __future__ import annotations

import json
import re
import sys

import pytest

from profiles.units import GIB
from reports.words import CAUSES, KINDS, gib, seconds

PIPELINE = ["--fix", "pp=2", "--fix", "schedule=1f1b"]


def embedded(text, name):
    (found,) = re.findall(rf'<script id="{name}" type="application/json">(.*?)</script>', text)
    return json.loads(found)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Page and answer of a plan with two stages."""
    from click.testing import CliRunner  # noqa: PLC0415

    from cli import main  # noqa: PLC0415 - after the path is set

    page = tmp_path_factory.mktemp("page") / "plan.html"
    job = ["--model", "gpt2", "--cluster", "4xh100-80g", "--global-batch", "16", "--seq-len", "512"]
    asked = ["plan", *job, *PIPELINE, "--html", str(page), "--format", "json"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.stderr
    return page.read_text(), json.loads(result.stdout)


def test_the_page_carries_the_answer_that_is_printed(written):
    text, answer = written
    own = embedded(text, "answer")
    assert {key: own[key] for key in answer} == answer
    assert own.keys() - answer.keys() == {"sensitivity"}


def test_the_tiles_say_the_numbers_in_words(written):
    text, answer = written
    for words in (
        seconds(answer["step_s"]),
        gib(answer["peak_mem_bytes"]),
        f"{answer['tokens_per_s_per_gpu']:,.0f}",
    ):
        assert f'<dd class="value">{words}</dd>' in text


def test_memory_is_stacked_by_kind_up_to_the_device_total(written):
    text, answer = written
    figure = embedded(text, "figures")["memory"]
    words = {name: kind for kind, name in KINDS.items()}
    for trace in figure["data"]:
        held = [stage["memory"][words[trace["name"]]] / GIB for stage in answer["stages"]]
        assert trace["y"] == held
    totals = [sum(trace["y"][at] for trace in figure["data"]) for at in range(2)]
    assert totals == pytest.approx([stage["device_bytes"] / GIB for stage in answer["stages"]])
    (limit,) = figure["layout"]["shapes"]
    assert limit["y0"] == limit["y1"] == answer["usable_bytes"] / GIB


def test_time_is_stacked_by_cause_up_to_the_step(written):
    text, answer = written
    figure = embedded(text, "figures")["time"]
    words = {name: cause for cause, name in CAUSES.items()}
    for trace in figure["data"]:
        assert trace["y"] == [stage["split"][words[trace["name"]]] for stage in answer["stages"]]
    for at in range(2):
        assert sum(trace["y"][at] for trace in figure["data"]) == pytest.approx(answer["step_s"])


def test_the_front_shows_every_simulated_layout_and_marks_the_chosen_one(written):
    text, answer = written
    traces = {trace["name"]: trace for trace in embedded(text, "figures")["front"]["data"]}
    assert traces["simulated"]["x"] == [each["step_s"] for each in answer["tried"]]
    assert traces["chosen"]["x"] == [answer["step_s"]]
    assert traces["chosen"]["y"] == [answer["peak_mem_bytes"] / GIB]
    assert traces["next best"]["x"] == [each["step_s"] for each in answer["runners_up"]]
    points = list(zip(traces["front"]["x"], traces["front"]["y"], strict=True))
    for x, y in zip(traces["simulated"]["x"], traces["simulated"]["y"], strict=True):
        assert any(fx <= x and fy <= y for fx, fy in points)


def test_the_timeline_has_every_pass_of_the_step(written):
    text, answer = written
    traces = {trace["name"]: trace for trace in embedded(text, "figures")["timeline"]["data"]}
    count = (
        answer["plan"]["pipeline"]["num_microbatches"] * answer["plan"]["pipeline"]["num_chunks"]
    )
    for name in ("forward", "backward"):
        assert sorted(set(traces[name]["y"])) == [0, 1]
        assert len(traces[name]["y"]) == 2 * count
    ends = [b + x for t in traces.values() for b, x in zip(t["base"], t["x"], strict=True)]
    split = answer["split"]
    assert answer["step_s"] - split["overhead_s"] <= max(ends) * (1 + 1e-5)
    assert max(ends) < answer["step_s"]


def test_the_layout_shows_each_stage_with_its_layers_and_all_its_ranks(written):
    text, answer = written
    for stage in answer["stages"]:
        assert f"stage {stage['stage']}</div>" in text
    shown = [
        int(rank)
        for first, last in re.findall(r'<span class="ranks">(\d+)(?:-(\d+))?</span>', text)
        for rank in range(int(first), int(last or first) + 1)
    ]
    assert sorted(shown) == list(range(answer["layout"]["used_gpus"]))
    for name, own in answer["plan"]["strategies"].items():
        assert f"{name}</dt><dd>tp {own['tp']}, cp {own['cp']}, dp {own['dp']}" in text


def test_sensitivity_is_that_of_explain(parplan, small, tmp_path):
    path, page = tmp_path / "plan.yaml", tmp_path / "page.html"
    parplan("plan", *small, "-o", path, "--html", page)
    explained = json.loads(parplan("explain", path, "--format", "json").stdout)
    own = embedded(page.read_text(), "answer")["sensitivity"]
    assert [each["step_s"][0] for each in own] == [
        each["step_s"][0] for each in explained["sensitivity"]
    ]
    step = {(each["what"], round(each["factor"], 1)): each["step_s"][0] for each in own}
    chosen = explained["step_s"]
    assert step["efficiency", 1.1] < chosen < step["efficiency", 0.9]
    assert step["bandwidth", 1.1] <= chosen <= step["bandwidth", 0.9]
    assert step["memory", 1.1] == chosen == step["memory", 0.9]


def test_the_same_plan_makes_the_same_page(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    parplan("plan", *small, "-o", path)
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    for page in pages:
        assert parplan("estimate", path, "--html", page).exit_code == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_names_cannot_break_out_of_the_page(parplan, small, tmp_path):
    evil = tmp_path / "<img src=x onerror=alert(1)>.yaml"
    parplan("plan", *small, "-o", evil)
    page = tmp_path / "page.html"
    assert parplan("compare", evil, evil, "--html", page).exit_code == 0
    assert "<img" not in page.read_text().split("plotly.js v")[0]
    assert embedded(page.read_text(), "answer")["plans"][0]["name"] == str(evil)


def test_a_page_that_cannot_be_written_is_told_before_the_search(
    parplan, small, tmp_path, monkeypatch
):
    page = tmp_path / "page.html"
    page.write_text("mine")
    monkeypatch.setattr("planner.planning.search", None)
    result = parplan("plan", *small, "--html", page)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--force overwrites it" in result.stderr
    assert page.read_text() == "mine"


@pytest.mark.parametrize("name", ["plotly", "jinja2"])
def test_without_the_extra_the_message_says_what_to_install(
    parplan, small, monkeypatch, name, tmp_path
):
    monkeypatch.setitem(sys.modules, name, None)
    result = parplan("plan", *small, "--html", tmp_path / "page.html")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{name} is not installed" in result.stderr
    assert "pip install 'parplan[report]'" in result.stderr


def test_the_page_of_a_long_pipeline_is_small_and_its_timeline_capped(parplan, tmp_path):
    page = tmp_path / "page.html"
    parplan(
        "estimate", "--model", "llama3.1-405b", "--cluster", "128x8xh100-80g", "--pp", "63",
        "--tp", "4", "--dp", "4", "--global-batch", "2048", "--html", page,
    )  # fmt: skip
    text = page.read_text()
    assert len(text) <= 8e6
    figures = embedded(text, "figures")
    assert sum(len(trace["x"]) for trace in figures["timeline"]["data"]) <= 6_000
    assert "played with" in text
    assert len(figures["memory"]["data"][0]["x"]) == 63
