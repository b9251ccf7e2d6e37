"""Plans side by side on the command line."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import yaml

from profiles.units import GIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Plan files of one job, on four and on two GPUs, of another batch, and damaged ones."""
    from click.testing import CliRunner  # noqa: PLC0415

    from cli import main  # noqa: PLC0415 - after the path is set

    path = tmp_path_factory.mktemp("plans")
    job = ["--model", "gpt2", "--cluster", "4xh100-80g", "--seq-len", "512"]
    for name, more in {
        "a": ["--global-batch", "16"],
        "b": ["--global-batch", "16", "--fix", "tp=2"],
        "c": ["--global-batch", "32"],
    }.items():
        asked = ["plan", *job, *more, "-o", str(path / f"{name}.yaml")]
        assert CliRunner().invoke(main, asked).exit_code == 0
    text = (path / "a.yaml").read_text()
    (path / "newer.yaml").write_text(text.replace("schema_version: 1", "schema_version: 9"))
    (path / "truncated.yaml").write_text(text[: len(text) // 2])
    hashed = text.index("sha256: ") + len("sha256: ")
    (path / "changed.yaml").write_text(text[:hashed] + "0" * 64 + text[hashed + 64 :])
    return path


def compare(parplan, folder, *names, **how):
    more = [part for flag, value in how.items() for part in (f"--{flag.replace('_', '-')}", value)]
    return parplan("compare", *(folder / f"{name}.yaml" for name in names), *more)


def test_the_text_says_first_how_they_stand_then_decisions_then_costs(parplan, folder):
    result = compare(parplan, folder, "a", "b")
    assert result.exit_code == 0
    text = result.stdout.replace(str(folder) + "/", "")
    first = text.splitlines()[0]
    assert first.startswith("b.yaml: ")
    assert " slower than a.yaml, within uncertainty" in first
    order = ["Decisions that differ", "Seconds of a step, by cause", "Memory by kind"]
    assert [text.index(title) for title in order] == sorted(text.index(title) for title in order)


def test_the_numbers_are_those_of_estimate_and_add_up(parplan, folder):
    answer = json.loads(compare(parplan, folder, "a", "b", format="json").stdout)
    for each, name in zip(answer["plans"], "ab", strict=True):
        own = json.loads(parplan("estimate", folder / f"{name}.yaml", "--format", "json").stdout)
        assert each == {"name": str(folder / f"{name}.yaml"), **own}
    (other,) = answer["others"]
    first, second = (each["step_s"] for each in answer["plans"])
    assert other["slower"] == pytest.approx(second / first - 1)
    assert sum(other["slower_by_cause_s"].values()) == pytest.approx(second - first)
    peaks = [each["peak_mem_bytes"] for each in answer["plans"]]
    assert sum(other["more_by_kind_bytes"].values()) == peaks[1] - peaks[0]
    assert {"choice": "tp", "first": "1", "this": "2"} in other["differences"]


def test_another_batch_cannot_be_compared_and_is_said_at_once(parplan, folder):
    result = compare(parplan, folder, "a", "c")
    assert result.exit_code == 0
    assert "NOT COMPARABLE" in result.stdout.splitlines()[0]
    assert "other batch" in result.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("names", "share", "code"),
    [
        (("a", "b"), "500%", 0),
        (("a", "b"), "0.1%", 1),
        (("b", "a"), "0%", 0),
        (("a", "a"), "0", 0),
        (("a", "c"), "500%", 1),
    ],
)
def test_fail_above_fails_on_slower_plans_and_on_what_cannot_be_compared(
    parplan, folder, names, share, code
):
    assert compare(parplan, folder, *names, fail_above=share).exit_code == code


@pytest.mark.parametrize("share", ["-1%", "two", "nan", "inf%"])
def test_a_share_that_is_none_is_refused(parplan, folder, share):
    result = compare(parplan, folder, "a", "b", fail_above=share)
    assert result.exit_code == 2
    assert "2%" in result.stderr


@pytest.mark.parametrize(
    ("damaged", "said"),
    [("newer", "newer parplan"), ("truncated", "YAML"), ("changed", "is not what this plan")],
)
def test_a_damaged_file_is_one_line_and_the_sound_ones_are_compared(parplan, folder, damaged, said):
    result = compare(parplan, folder, "a", damaged, "b")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(str(folder / f"{damaged}.yaml"))
    assert said in line
    assert "b.yaml: " in result.stdout.splitlines()[0]
    answer = json.loads(compare(parplan, folder, "a", damaged, "b", format="json").stdout)
    assert len(answer["plans"]) == 2
    assert answer["refused"] == [line]


def test_the_page_is_made_of_the_sound_plans_and_names_the_others(parplan, folder, tmp_path):
    page = tmp_path / "page.html"
    result = compare(parplan, folder, "a", "truncated", html=page)
    assert result.exit_code == 2
    text = page.read_text()
    assert "not read: " in text
    assert "truncated.yaml" in text


def test_the_numbers_of_the_page_are_those_of_the_answer(parplan, folder, tmp_path):
    page = tmp_path / "page.html"
    result = compare(parplan, folder, "a", "b", html=page, format="json")
    answer = json.loads(result.stdout)
    data = re.findall(r'type="application/json">(.*?)</script>', page.read_text())
    own, figures = map(json.loads, data)
    assert own == answer
    for at, plan in enumerate(answer["plans"]):
        drawn = sum(trace["y"][at] for trace in figures["time"]["data"])
        assert drawn == pytest.approx(plan["step_s"])
        held = sum(trace["y"][at] for trace in figures["memory"]["data"])
        assert held == pytest.approx(plan["peak_mem_bytes"] / GIB)


def test_one_plan_is_nothing_to_compare(parplan, folder):
    result = compare(parplan, folder, "a")
    assert (result.exit_code, result.stdout) == (2, "")


def test_without_any_sound_plan_nothing_is_printed_or_written(parplan, folder, tmp_path):
    page = tmp_path / "page.html"
    result = compare(parplan, folder, "newer", "truncated", html=page)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 2
    assert not page.exists()


def test_a_comparison_estimates_each_plan_once(parplan, folder, monkeypatch):
    """So two plans take no more than twice what one takes."""
    import costmodel.estimate as costs  # noqa: PLC0415

    made = []
    original = costs.LayoutCost.__init__
    monkeypatch.setattr(
        costs.LayoutCost,
        "__init__",
        lambda self, *a, **k: (made.append(1), original(self, *a, **k))[1],
    )
    parplan("estimate", folder / "a.yaml")
    alone = len(made)
    compare(parplan, folder, "a", "b")
    assert len(made) - alone <= 2 * alone


def test_a_plan_on_another_cluster_is_compared(parplan, folder, tmp_path):
    shutil.copy(folder / "a.yaml", tmp_path / "a.yaml")
    asked = ["--model", "gpt2", "--cluster", "2xh100-80g", "--seq-len", "512"]
    parplan("plan", *asked, "--global-batch", "16", "-o", tmp_path / "d.yaml")
    result = parplan("compare", tmp_path / "a.yaml", tmp_path / "d.yaml")
    assert "NOT COMPARABLE" not in result.stdout
    assert "cluster" in result.stdout


def test_a_plan_in_json_is_a_plan_and_no_run(parplan, folder, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(yaml.safe_load((folder / "a.yaml").read_text())))
    result = parplan("compare", folder / "a.yaml", path)
    assert result.exit_code == 0, result.stderr
    assert "no slower" in result.stdout
