"""Export, then import: the same layout, for random legal plans of every launcher and version."""

from __future__ import annotations

import os

import pytest
from randomplans import inputs_of, layouts

from executor.checking import check_arguments
from executor.exporting import InexpressibleError, export_layout, save_files
from executor.importing import Asked, import_job, import_text
from executor.launchers.registry import NAMES, launcher
from executor.nearest import nearest_layout
from planner import ManualLayout, layout_from_degrees, load_plan, parse_restrictions, plan_training
from planner.expressible import inexpressible

COUNT = int(os.environ.get("PARPLAN_RANDOM_PLANS", "60"))
MAIN = {"deepspeed": "deepspeed.json", "galvatron": "galvatron.json"}
SAYS_NO_BATCH = ("deepspeed", "accelerate", "galvatron")
VERSIONS = [(name, version) for name in NAMES for version in launcher(name)[0].versions]
SMALL = ("llama3-8b", "2x8xh100", 128, 4096)


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_what_is_exported_imports_as_the_same_layout(name, version, tmp_path):
    for number, (inputs, layout) in enumerate(layouts(name, COUNT, seed=11)):
        folder = tmp_path / str(number)
        save_files(export_layout(inputs, layout, name, version=version).files, folder)
        path = str(folder / MAIN.get(name, "launch.sh"))
        run = inputs.training
        sizes = {"seq_len": run.seq_len, "global_batch": run.global_batch}
        model = None if name == "megatron" else inputs.model_ref
        ranks = layout.mesh.num_ranks
        found = import_job(
            path,
            name,
            cluster=inputs.cluster_ref,
            asked=Asked(version=version, num_gpus=ranks, model=model),
            overrides=sizes if name in SAYS_NO_BATCH else None,
        )
        assert found.layout == layout
        assert found.unknown == ()
        if model is None:
            assert found.inputs.model.runs == inputs.model.runs
        asked = Asked(version=version, num_gpus=ranks, model=inputs.model_ref)
        assert not check_arguments(path, name, asked).fails


FIXED = [(name, fix) for name in NAMES for fix in ("", "pp=4", "tp=2")]
FIXED.remove(("accelerate", "pp=4"))  # it has no pipeline


@pytest.mark.parametrize(("name", "fix"), FIXED)
def test_what_plan_finds_for_a_launcher_can_be_exported(name, fix):
    inputs = inputs_of(SMALL)
    restrictions = parse_restrictions([fix] if fix else [])
    planned = plan_training(inputs, launcher=name, restrictions=restrictions)
    for plan in (planned.plan, *planned.runners_up):
        assert inexpressible(name, plan.inputs, plan.layout) == []
        assert export_layout(plan.inputs, plan.layout, name).files


REFUSED = {
    "megatron": ({"schedule": "zbv", "pp": 2, "chunks": 2}, "schedule"),
    "torchtitan": ({"zero": 1}, "zero"),
    "deepspeed": ({"zero": 3, "pp": 4}, "zero"),
    "accelerate": ({"pp": 4}, "pp"),
    "galvatron": ({"recompute": "selective:mlp"}, "recompute"),
    "megatron-bridge": ({"zero": 2, "pp": 2}, "zero"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_a_launcher_cannot_express_is_refused_with_the_nearest_one(name):
    choices, choice = REFUSED[name]
    inputs = inputs_of(SMALL)
    layout = layout_from_degrees(inputs, ManualLayout(**choices))
    inputs = inputs.with_training(micro_batch=layout.micro_batch)
    with pytest.raises(InexpressibleError) as refused:
        export_layout(inputs, layout, name)
    assert choice in [broken.choice for broken in refused.value.broken]
    assert f"--launcher {name}" in str(refused.value)
    near = nearest_layout(name, inputs, layout)
    assert near is not None
    assert near != layout
    assert export_layout(inputs, near, name).files


def test_an_imported_plan_is_a_plan_file(tmp_path):
    inputs, layout = layouts("megatron", 1)[0]
    save_files(export_layout(inputs, layout, "megatron").files, tmp_path)
    asked = Asked(num_gpus=layout.mesh.num_ranks)
    found = import_job(
        str(tmp_path / "launch.sh"), "megatron", cluster=inputs.cluster_ref, asked=asked
    )
    path = tmp_path / "plan.yaml"
    path.write_text(import_text(found, "megatron"))
    assert load_plan(path).layout == layout


def test_the_keys_of_versions_differ():
    inputs, layout = next(pair for pair in layouts("torchtitan", 40) if pair[1].mesh.pp > 1)
    old = export_layout(inputs, layout, "torchtitan", version="0.3.0").files["launch.sh"]
    new = export_layout(inputs, layout, "torchtitan", version="main").files["launch.sh"]
    assert "--training.local_batch_size" in old
    assert "--training.num_tokens_per_microbatch_per_dp_rank" in new
    assert "--training.local_batch_size" not in new
    inputs, layout = layouts("galvatron", 1)[0]
    for version in ("vocab_sdp", "embed_sdp"):
        text = export_layout(inputs, layout, "galvatron", version=version).files["galvatron.json"]
        assert [name for name in ("vocab_sdp", "embed_sdp") if name in text] == [version]
