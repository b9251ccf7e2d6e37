from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansamples import sample_inputs, sample_layout, sample_plan, sound_layouts

from planner import (
    json_schema,
    load_inputs,
    load_plan,
    plan_document,
    plan_of,
    plan_text,
    save_plan,
)
from planner.planreader import plan_in
from profiles import yamlfile
from profiles.errors import InputError
from profiles.fingerprint import fingerprint

ROOT = Path(__file__).parents[2]
INPUTS = sample_inputs()


@pytest.fixture
def written(tmp_path):
    """The text of a plan whose stored costs are those of today, and where it stands."""
    path = tmp_path / "plan.yaml"
    save_plan(plan_of(INPUTS, sample_layout()), path)
    return path


def told_after(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_plan(path)
    return [str(each).replace(f"{path.parent}/", "") for each in caught.value.problems]


def test_the_file_reads_as_a_person_would_write_it(snapshot):
    assert re.sub(r"[0-9a-f]{64}", "...", plan_text(sample_plan())) == snapshot


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_layout_comes_back_from_its_file(data):
    layout = data.draw(sound_layouts(INPUTS))
    plan = plan_of(INPUTS, layout)
    text = plan_text(plan)
    again = plan_in(yamlfile.parse(text, "plan.yaml"))
    assert again.layout == layout
    assert again.estimate == plan.estimate
    assert again.remarks == ()
    assert plan_text(again) == text


def test_what_the_search_found_comes_back_too():
    plan = sample_plan()
    again = plan_in(yamlfile.parse(plan_text(plan), "plan.yaml"))
    assert again.search == replace(plan.search, bound_s=7.77778)
    assert (again.launcher, again.min_fit) == (plan.launcher, plan.min_fit)


def test_stored_costs_that_are_not_those_of_today_are_remarked():
    again = plan_in(yamlfile.parse(plan_text(sample_plan()), "plan.yaml"))
    assert [remark.split(" is ")[0] for remark in again.remarks] == ["step_s", "peak_mem_bytes"]


def test_the_plan_file_is_valid_under_its_own_schema():
    schema = json_schema("plan")
    assert {*plan_document(sample_plan()), "profile"} == set(schema["properties"])
    assert set(schema["required"]) == set(schema["properties"]) - {"estimate", "profile", "search"}


def test_the_bytes_do_not_depend_on_the_hash_seed():
    script = (
        "import sys, planner; "
        "i = planner.load_inputs('gpt2', '4xh100', overrides={'global_batch': 8, 'seq_len': 512}); "
        "r = planner.parse_restrictions(['micro_batch=1,2', 'zero=1,2,3'], exclude=['tp=4']); "
        "sys.stdout.write(planner.plan_text(planner.plan_training(i, restrictions=r).plan))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(texts) == 1
    assert "fix: {micro_batch: [1, 2], zero: [1, 2, 3]}" in texts.pop()


def test_a_fingerprint_is_of_the_facts_and_not_of_the_name():
    model = INPUTS.model
    assert fingerprint(replace(model, name="other")) == fingerprint(model)
    assert fingerprint(replace(model, max_seq_len=7)) != fingerprint(model)


TAMPERED = {
    "another degree in one strategy": [("tp: 2, cp: 1", "tp: 4, cp: 1")],
    "a layer left out": [("layers: 2-6,", "layers: 3-6,")],
    "a layer twice": [("layers: 2-6,", "layers: 2-7,")],
    "no head": [(", {layers: head, strategy: A}", "")],
    "a layer that is not there": [("layers: embedding,", "layers: embedder,")],
    "a strategy that is not there": [("strategy: B", "strategy: Bb")],
    "ranks of another stage": [("ranks: 4-7", "ranks: 0-3")],
    "a chunk of another stage": [("stage: 1, chunk: 0", "stage: 0, chunk: 0")],
    "an unknown schedule": [("schedule: 1f1b", "schedule: 1f2b")],
    "micro-batches that do not add up": [("num_microbatches: 16", "num_microbatches: 15")],
    "an axis twice": [("rank_order: [tp, cp", "rank_order: [tp, tp")],
    "an unknown launcher": [("launcher: any", "launcher: megatorn")],
    "another model": [("name: gpt2, ref: gpt2", "name: gpt2, ref: gpt2-xl")],
    "two misspelt words": [("precision: bf16", "precision: bf61"), ("zero: 1", "zeros: 1")],
    "a newer version": [("schema_version: 1", "schema_version: 2"), ("launcher: any", "speed: 7")],
    "another kind of file": [("kind: parallel-plan", "kind: cluster")],
    "modules without need": [("{kind: full}", "{kind: full, modules: [mlp]}")],
    "a shard group that does not divide": [("shard_group: 2", "shard_group: 3")],
    "a cluster that grew": [("num_gpus: 8", "num_gpus: 16")],
    "no such model": [("ref: gpt2", "ref: gtp2")],
    "an unknown key": [("estimate:", "estimates:")],
}


@pytest.mark.parametrize("changes", TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_file_is_told_by_line_and_column(written, changes, snapshot):
    told = told_after(written, *changes)
    assert all(re.match(r"plan\.yaml:\d+:\d+: ", line) for line in told)
    assert [re.sub(r"[0-9a-f]{12}[.]{3}", "...", line) for line in told] == snapshot


def test_what_a_search_was_restricted_to_is_checked_like_flags(tmp_path):
    path = tmp_path / "plan.yaml"
    save_plan(sample_plan(), path)
    told = told_after(path, ("fix: {zero: [1, 2]}", "fix: {zerro: [1, 7]}"))
    assert [line.split("; ")[0] for line in told] == ["plan.yaml:19:16: there is no choice 'zerro'"]


def test_a_reference_to_a_file_is_kept_relative_to_the_plan(tmp_path, monkeypatch):
    (tmp_path / "models" / "own").mkdir(parents=True)
    (tmp_path / "plans").mkdir()
    config = {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 12,
        "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1000,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "models/own/config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    inputs = load_inputs(
        "models/own", "2x4xh100-80g", overrides={"global_batch": 64, "seq_len": 1024}
    )
    save_plan(plan_of(inputs, sample_layout()), "plans/plan.yaml")
    text = Path("plans/plan.yaml").read_text()
    assert "ref: ../models/own," in text
    assert str(tmp_path) not in text
    monkeypatch.chdir(tmp_path / "models")
    assert load_plan("../plans/plan.yaml").inputs.model == inputs.model
    config["hidden_size"] = 512
    (tmp_path / "models/own/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"model \.\./models/own is not what this plan was made"):
        load_plan("../plans/plan.yaml")


def test_an_existing_file_is_not_overwritten_without_force(written):
    before = written.read_text()
    with pytest.raises(InputError, match=r"the file exists .--force overwrites it."):
        save_plan(sample_plan(), written)
    assert written.read_text() == before
    save_plan(sample_plan(), written, force=True)
    assert written.read_text() != before


def test_a_folder_that_is_not_there_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"there is no folder .*missing"):
        save_plan(sample_plan(), tmp_path / "missing" / "plan.yaml")
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_the_plan_is_left_in_its_folder(written):
    assert [each.name for each in written.parent.iterdir()] == ["plan.yaml"]
