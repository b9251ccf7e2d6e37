from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansamples import sample_inputs, sample_layout, sample_plan, sound_layouts

from planner import json_schema, load_plan, plan_document, plan_of, plan_text, save_plan
from planner.fingerprint import fingerprint
from planner.planreader import plan_in
from profiles import yamlfile
from profiles.errors import InputError

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
    assert plan_text(sample_plan()) == snapshot


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
    assert set(plan_document(sample_plan())) == set(schema["properties"])
    assert set(schema["required"]) == set(schema["properties"]) - {"estimate", "search"}


def test_the_bytes_do_not_depend_on_the_hash_seed():
    script = (
        "import sys; sys.path.insert(0, 'tests/planner'); from planner import *; import planner; "
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


TAMPERED = [
    (
        [("tp: 2, cp: 1", "tp: 4, cp: 1")],
        [
            "plan.yaml:5:75: used_gpus is 8; expected tp 4 x cp 1 x dp 2 x 2 stages = 16",
            "plan.yaml:11:31: ranks of stage 0 are 0-3; expected 0-7, by rank_order and degrees",
            "plan.yaml:12:31: ranks of stage 1 are 4-7; expected 8-15, by rank_order and degrees",
            "plan.yaml:14:6: tp 4 x cp 1 x pp 2 x dp 2 = 16 GPUs, the cluster has 8; "
            "expected dp at most 1",
            "plan.yaml:15:11: tp is 2; expected 4, as strategy A has it",
        ],
    ),
    (
        [("layers: 2-6,", "layers: 3-6,")],
        ["plan.yaml:11:120: layers 3-6; expected 2 to come next, each layer once"],
    ),
    (
        [("layers: 2-6,", "layers: 2-7,")],
        ["plan.yaml:12:45: layers 7-11; expected 8 to come next, each layer once"],
    ),
    (
        [(", {layers: head, strategy: A}", "")],
        ["plan.yaml:10:1: no chunk has the layers head; expected each layer once"],
    ),
    (
        [("layers: embedding,", "layers: embeding,")],
        [
            "plan.yaml:11:45: layers is 'embeding'; expected embedding, head or numbers up to 11 "
            "(did you mean embedding?)",
        ],
    ),
    (
        [("strategy: B", "strategy: Bb")],
        [
            "plan.yaml:11:97: there is no strategy 'Bb'; expected one of A, B (did you mean B?)",
            "plan.yaml:15:6: no layer has the strategy B; expected a strategy in use",
        ],
    ),
    (
        [("ranks: 4-7", "ranks: 0-3")],
        ["plan.yaml:12:31: ranks of stage 1 are 0-3; expected 4-7, by rank_order and degrees"],
    ),
    (
        [("stage: 1, chunk: 0", "stage: 0, chunk: 0")],
        ["plan.yaml:12:5: stage 0, chunk 0; expected stage 1, chunk 0 here, in model order"],
    ),
    (
        [("schedule: 1f1b", "schedule: 1f2b")],
        [
            "plan.yaml:9:43: there is no schedule '1f2b'; expected one of gpipe, 1f1b, "
            "interleaved-1f1b (did you mean 1f1b?)",
        ],
    ),
    (
        [("num_microbatches: 16", "num_microbatches: 15")],
        [
            "plan.yaml:9:67: num_microbatches is 15; expected 16: global_batch 64 / (dp 2 x "
            "micro_batch 2)",
        ],
    ),
    (
        [("rank_order: [tp, cp", "rank_order: [tp, tp")],
        ["plan.yaml:8:13: an axis stands twice; expected tp, cp, ep, dp and pp once each"],
    ),
    (
        [("launcher: any", "launcher: megatorn")],
        [
            "plan.yaml:7:11: launcher is 'megatorn'; expected one of any, native, megatron, "
            "megatron-bridge, torchtitan, deepspeed, accelerate, galvatron (did you mean megatron?)",
        ],
    ),
    (
        [("name: gpt2, ref: gpt2", "name: gpt2, ref: gpt2-xl")],
        [
            "plan.yaml:3:32: layers is 12; expected 48",
            "plan.yaml:3:44: model gpt2-xl is not what this plan was made for; expected sha256 ",
        ],
    ),
    (
        [("precision: bf16", "precision: bf61"), ("zero: 1", "zeros: 1")],
        [
            "plan.yaml:6:68: training.precision is 'bf61'; expected bf16, fp16, fp32 or "
            "fp8-tensorwise (did you mean bf16?)",
            "plan.yaml:14:6: strategies.A.zero is missing; expected zeRO stage (is it zeros, "
            "misspelt?)",
            "plan.yaml:14:49: unknown key strategies.A.zeros; expected one of cp, dp, ",
        ],
    ),
    (
        [("schema_version: 1", "schema_version: 2"), ("launcher: any", "speed: ludicrous")],
        [
            "plan.yaml:1:17: schema_version is 2; expected at most 1 (a newer parplan wrote this "
            "file)",
        ],
    ),
    (
        [("kind: parallel-plan", "kind: cluster")],
        ["plan.yaml:2:7: kind is 'cluster'; expected parallel-plan"],
    ),
    (
        [("recompute: {kind: full}", "recompute: {kind: full, modules: [mlp]}")],
        [
            "plan.yaml:15:127: modules with kind full; expected modules only with kind selective",
        ],
    ),
    (
        [("shard_group: 2", "shard_group: 3")],
        [
            "plan.yaml:14:71: shard_group 3 does not divide dp 2 x cp 1 = 2 ranks; expected one "
            "of 1, 2",
        ],
    ),
]


@pytest.mark.parametrize(("changes", "told"), TAMPERED)
def test_a_tampered_file_is_told_by_line_and_column(written, changes, told):
    got = told_after(written, *changes)
    assert [line[: len(want)] for line, want in zip(got, told, strict=True)] == told


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
    from planner import load_inputs  # noqa: PLC0415

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
    with pytest.raises(InputError, match="the file exists .--force overwrites it."):
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
