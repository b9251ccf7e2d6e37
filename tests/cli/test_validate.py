from __future__ import annotations

import csv
import json

import pytest

from profiles.runs import published_runs


@pytest.fixture
def some(tmp_path):
    """Writes some lines of the shipped table, those of a source, to a file of its own."""

    def write(source: str, **changes: str):
        with published_runs().open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["file"] == source]
        path = tmp_path / f"{source}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({**row, **changes} for row in rows)
        return path

    return write


def test_the_shipped_table_is_judged_without_other_files(parplan):
    answer = parplan("validate", "--format", "json")
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["runs"] == "the table that comes with parplan"
    assert not any(row["skipped"] for row in found["rows"])
    assert found["summary"]["total"]["n"] > 100


def test_json_rows_hold_estimate_measurement_interval_and_fit(parplan, some):
    found = json.loads(parplan("validate", "--runs", some("simumax"), "--format", "json").stdout)
    row = found["rows"][0]
    low, high = row["interval_s"]
    assert low < row["predicted_step_s"] < high
    assert row["error"] == pytest.approx(row["predicted_step_s"] / row["measured_step_s"] - 1)
    assert row["measured_outcome"] == "ok"
    assert row["predicted_fits"] is True
    assert row["predicted_peak_mem_gib"] == pytest.approx(row["measured_peak_mem_gib"], rel=0.1)


def test_text_lists_rows_and_the_table_by_source(parplan, some):
    text = parplan("validate", "--runs", some("korthikanti_tab5")).stdout
    assert "korthikanti-tab5-01" in text
    assert "total" in text


def test_a_median_error_beyond_the_tolerance_exits_with_1(parplan, some):
    slow = some("korthikanti_tab5", step_time_s="500")
    assert parplan("validate", "--runs", slow, "--tolerance", "0.5").exit_code == 1
    right = some("korthikanti_tab5")
    assert parplan("validate", "--runs", right, "--tolerance", "0.2").exit_code == 0


def test_skipped_runs_are_listed_with_their_reason(parplan, some):
    answer = parplan("validate", "--runs", some("korthikanti_tab5", pp="7"))
    assert answer.exit_code == 1
    assert answer.stdout.count("skipped: korthikanti-tab5-0") == 8
    assert "are not 8 GPUs" in answer.stdout


def test_a_calibration_is_taken_by_name_or_file(parplan, some):
    runs = some("korthikanti_tab5")
    one = parplan("validate", "--runs", runs, "--calibration", "datasheet", "--format", "json")
    assert {row["calibration"] for row in json.loads(one.stdout)["rows"]} == {"datasheet"}
    wrong = parplan("validate", "--runs", runs, "--calibration", "datashet")
    assert wrong.exit_code == 2
    assert "did you mean datasheet?" in wrong.stderr


def test_calibrating_writes_a_file_that_validates_better(parplan, some, tmp_path):
    runs, made = some("korthikanti_tab5", step_time_s=""), tmp_path / "mine.yaml"
    with runs.open(newline="") as file:
        rows = list(csv.DictReader(file))
    answer = json.loads(
        parplan("validate", "--runs", runs, "--calibration", "datasheet", "--format", "json").stdout
    )
    for row, judged in zip(rows, answer["rows"], strict=True):
        row["step_time_s"] = str(1.3 * judged["predicted_step_s"])
    with runs.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    fitted = parplan("calibrate", "--runs", runs, "-o", made)
    assert fitted.exit_code == 0
    assert "is not determined by these runs: as in the prior" in fitted.stderr
    own = parplan("validate", "--runs", runs, "--calibration", made, "--tolerance", "0.05")
    assert own.exit_code == 0


def test_calibrating_does_not_overwrite(parplan, some, tmp_path):
    made = tmp_path / "mine.yaml"
    made.write_text("mine")
    answer = parplan("calibrate", "--runs", some("korthikanti_tab5"), "-o", made)
    assert answer.exit_code == 2
    assert "the file exists" in answer.stderr
    assert made.read_text() == "mine"


def test_a_runs_file_that_is_wrong_is_told_by_row_and_column(parplan, some):
    answer = parplan("validate", "--runs", some("korthikanti_tab5", tp="eight"))
    assert answer.exit_code == 2
    assert "korthikanti_tab5.csv:2:tp: is 'eight'; expected a whole number above 0" in answer.stderr


def test_a_stack_without_a_calibration_is_noted(parplan, some):
    answer = parplan("validate", "--runs", some("korthikanti_tab5", stack="MyTrainer 3"))
    assert (
        answer.stderr.count("note: no calibration of MyTrainer 3 on a100-80g: that of other") == 1
    )
