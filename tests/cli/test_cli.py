from __future__ import annotations

import json
import math

import pytest
import yaml

TOTALS = {
    "step_s",
    "interval_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_mem_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "peak_mem_interval_bytes",
    "fits",
    "fit_probability",
    "split",
    "stages",
    "knowledge",
}
SEARCH = {"objective", "space", "candidates", "pruned", "bound_s", "gap", "proven", "cpu_s"}


def strictly(text):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


# --- plan ------------------------------------------------------------------------------------


def test_a_plan_for_native_says_what_its_own_kernels_cost(parplan, small, tmp_path):
    path = str(tmp_path / "plan.yaml")
    said = parplan("plan", *small, "--launcher", "native", "-o", path).stderr
    own = strictly(parplan("estimate", path, "--launcher", "native", "--format", "json").stdout)
    assert f"{own['peak_mem_bytes'] / 2**30:.1f} GiB of" in said
    assert f"probability {own['fit_probability']:.2f}" in said
    assert "parplan launch" not in parplan("plan", *small).stderr


def test_plan_answers_with_the_stated_keys_at_the_top(parplan, small):
    result = parplan("plan", *small, "--format", "json")
    answer = strictly(result.stdout)
    assert result.exit_code == 0
    assert answer.keys() >= TOTALS | {"layout", "search", "runners_up"}
    assert answer["search"].keys() >= SEARCH
    assert answer["fits"] is True
    assert len(answer["runners_up"]) == 3


def test_the_split_adds_up_to_the_step_on_every_stage(parplan, small):
    answer = strictly(parplan("plan", *small, "--fix", "pp=2", "--format", "json").stdout)
    assert sum(answer["split"].values()) == pytest.approx(answer["step_s"])
    assert [stage["stage"] for stage in answer["stages"]] == [0, 1]
    for stage in answer["stages"]:
        assert sum(stage["split"].values()) == pytest.approx(answer["step_s"])
        assert sum(stage["memory"].values()) == stage["device_bytes"]
        assert stage["allocated_bytes"] < stage["reserved_bytes"] < stage["device_bytes"]


def test_the_plan_file_on_stdout_is_the_one_that_is_written(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    written = parplan("plan", *small, "-o", path)
    assert written.exit_code == 0
    assert f"written: {path}" in written.stderr
    assert parplan("plan", *small, "-o", "-").stdout == path.read_text()
    assert parplan("plan", *small, "--format", "yaml").stdout == path.read_text()
    assert "cpu_s" not in path.read_text()


def test_a_file_in_the_way_is_refused_before_the_search(parplan, small, tmp_path, monkeypatch):
    path = tmp_path / "plan.yaml"
    path.write_text("mine")
    monkeypatch.setattr("planner.planning.search", None)
    result = parplan("plan", *small, "-o", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--force overwrites it" in result.stderr
    assert path.read_text() == "mine"


def test_force_overwrites(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("mine")
    assert parplan("plan", *small, "-o", path, "--force").exit_code == 0
    assert path.read_text().startswith("schema_version: 1\n")


def test_restrictions_hold_and_are_recorded(parplan, small):
    result = parplan(
        "plan", *small, "--fix", "tp=2", "--max", "pp=2", "--exclude", "zero=2,3",
        "--launcher", "megatron", "--micro-batch", "2", "--min-fit", "0.8", "--top", "1",
        "--format", "json",
    )  # fmt: skip
    answer = strictly(result.stdout)
    assert answer["layout"]["tp"] == 2
    assert answer["layout"]["micro_batch"] == 2
    assert len(answer["runners_up"]) <= 1
    assert answer["search"]["space"] == {
        "launcher": "megatron",
        "fix": {"micro_batch": [2], "tp": [2]},
        "max": {"pp": 2},
        "exclude": {"zero": [2, 3]},
        "tp_across_nodes": False,
        "min_fit": 0.8,
    }


def test_every_wrong_flag_is_told_at_once_and_nothing_is_written(parplan, tmp_path):
    path = tmp_path / "plan.yaml"
    result = parplan(
        "plan", "--model", "gtp2", "--cluster", "8xh10", "--precision", "bf61",
        "--fix", "tq=1", "--global-batch", "0", "-o", path,
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "--model", "--cluster", "--global-batch", "--precision", "--fix",
    ]  # fmt: skip
    assert "did you mean gpt2" in lines[0]
    assert not path.exists()


def test_a_launcher_that_is_not_known_has_a_nearest_one(parplan, small):
    result = parplan("plan", *small, "--launcher", "megatorn")
    assert result.exit_code == 2
    assert "did you mean megatron" in result.stderr


def test_a_missing_model_and_cluster_are_asked_for(parplan):
    result = parplan("plan")
    assert (result.exit_code, result.stderr) == (
        2,
        "--model: is missing\n--cluster: is missing\n",
    )


def test_what_cannot_fit_is_a_no_with_the_tightest_constraint(parplan):
    result = parplan("plan", "--model", "llama3-70b", "--cluster", "1xh100")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "tightest constraint" in result.stderr


def test_a_sequence_too_long_for_the_model_is_said_on_stderr(parplan):
    result = parplan("plan", "--model", "gpt2", "--cluster", "1xh100", "--global-batch", "4")
    assert "4096 is longer than the 1024 tokens" in result.stderr


# --- estimate --------------------------------------------------------------------------------


def test_a_written_plan_is_estimated_as_it_was_planned(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    planned = strictly(parplan("plan", *small, "-o", path, "--format", "json").stdout)
    result = parplan("estimate", path, "--format", "json")
    estimated = strictly(result.stdout)
    assert result.exit_code == 0
    assert estimated.keys() >= TOTALS
    assert all(estimated[key] == planned[key] for key in TOTALS)
    assert estimated["layout"] == planned["layout"]


def test_a_layout_by_flags_is_estimated(parplan, small):
    result = parplan(
        "estimate", *small, "--tp", "2", "--pp", "2", "--stage-layers", "5,7", "--zero", "1",
        "--recompute", "selective:layernorm+mlp", "--micro-batch", "2", "--format", "json",
    )  # fmt: skip
    answer = strictly(result.stdout)
    assert result.exit_code == 0
    assert answer["layout"]["stage_layers"] == "embedding,0-4 | 5-11,head"
    assert answer["layout"]["recompute"].endswith("selective(layernorm+mlp): 0-11")
    assert answer["layout"]["num_microbatches"] == 8


def test_what_does_not_fit_is_a_no_with_the_whole_answer(parplan):
    result = parplan("estimate", "--model", "llama3-70b", "--cluster", "8xh100", "--format", "json")
    answer = strictly(result.stdout)
    assert result.exit_code == 1
    assert answer["fits"] is False
    assert answer.keys() >= TOTALS


def test_a_ragged_batch_is_estimated_with_a_note(parplan, small):
    result = parplan("estimate", *small, "--dp", "4", "--micro-batch", "3", "--format", "json")
    answer = strictly(result.stdout)
    assert answer["layout"]["num_microbatches"] == 2
    assert any("does not divide" in note for note in answer["notes"])


def test_an_estimate_can_be_kept_as_a_plan_file(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(parplan("estimate", *small, "--tp", "2", "--format", "yaml").stdout)
    assert "search" not in yaml.safe_load(path.read_text())
    assert parplan("estimate", path).exit_code == 0


def test_flags_that_a_plan_file_answers_are_refused_beside_it(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    parplan("plan", *small, "-o", path)
    result = parplan("estimate", path, "--tp", "2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("--tp: ")
    assert parplan("estimate", path, "--min-fit", "0.5").exit_code == 0


def test_a_plan_file_that_is_not_there_is_told(parplan):
    result = parplan("estimate", "nowhere.yaml")
    assert (result.exit_code, result.stderr) == (
        2,
        "nowhere.yaml: cannot be read: No such file or directory\n",
    )


# --- explain, describe, catalog, schema ------------------------------------------------------


def test_explain_says_what_binds_and_why_others_lost(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    parplan("plan", *small, "-o", path)
    from_file = strictly(parplan("explain", path, "--format", "json").stdout)
    from_flags = strictly(parplan("explain", *small, "--format", "json").stdout)
    assert from_file["binds"] == from_flags["binds"]
    assert from_file["binds"]["time"].keys() == {"cause", "seconds", "part"}
    assert from_file["runners_up"] == from_flags["runners_up"]
    for rival in from_file["runners_up"]:
        assert math.isclose(
            sum(rival["slower_by_cause_s"].values()), rival["slower_s"], abs_tol=1e-9
        )
        assert rival["differences"]


def test_a_model_is_described_by_what_was_understood(parplan):
    facts = strictly(parplan("describe", "deepseek-v3", "--format", "json").stdout)
    assert facts["params_total"] == 671_026_419_200
    assert facts["layers"] == {"embedding": 1, "block": 3, "moe-block": 58, "head": 1}
    assert facts["experts"]["top_k"] == 8
    assert facts["mtp_layers"] == 1


def test_a_cluster_is_described_by_its_nodes_and_links(parplan):
    facts = strictly(parplan("describe", "16x8xh100-80g", "--format", "json").stdout)
    assert (facts["num_nodes"], facts["num_gpus"]) == (16, 128)
    assert facts["nodes"][0]["nic_bytes_per_s"] == 50e9
    assert facts["devices"][0]["peak_flop_per_s"]["bf16"] == pytest.approx(989.4e12)


def test_what_is_neither_model_nor_cluster_is_told_by_both_readers(parplan):
    result = parplan("describe", "lama3-8b")
    assert result.exit_code == 2
    model, cluster = result.stderr.splitlines()
    assert "did you mean llama3-8b" in model
    assert "GPUSxDEVICE" in cluster


def test_a_plan_is_not_described_but_explained(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    parplan("plan", *small, "-o", path)
    result = parplan("describe", path)
    assert result.exit_code == 2
    assert "parplan explain reads plans" in result.stderr


@pytest.mark.parametrize("shelf", ["models", "devices", "nodes"])
def test_the_catalogue_lists_every_entry(parplan, shelf):
    entries = strictly(parplan("catalog", shelf, "--format", "json").stdout)
    table = parplan("catalog", shelf).stdout
    assert entries
    assert all(entry["name"] in table for entry in entries)


def test_schemas_are_listed_and_printed(parplan):
    kinds = parplan("schema").stdout.split()
    assert {"plan", "model", "cluster", "training", "calibration"} <= set(kinds)
    for kind in kinds:
        assert strictly(parplan("schema", kind).stdout)["type"] == "object"
    assert "did you mean plan" in parplan("schema", "plann").stderr


# --- the process as a whole ------------------------------------------------------------------


def test_a_command_that_is_not_known_has_a_nearest_one(parplan):
    result = parplan("plann")
    assert result.exit_code == 2
    assert "did you mean plan" in result.stderr


def test_an_error_of_ours_says_so_with_the_trace(parplan, small, monkeypatch):
    def broken(*_arguments, **_keywords):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("planner.planning.search", broken)
    result = parplan("plan", *small)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "ZeroDivisionError: oops" in result.stderr
    assert "please report" in result.stderr.splitlines()[-1]


def test_every_training_flag_states_its_default(parplan):
    text = " ".join(parplan("plan", "--help").output.split())
    for stated in ("(1024)", "(4096)", "(bf16)", "(adamw)", "(fp32)", "(flash2)", "(any)", "(0.9)"):
        assert f"[default: {stated}" in text
