"""Argument sets of public scripts import whole: nothing unknown, and the layout that they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from executor.importing import Asked, import_job
from planner.plan import layout_choices

SETS = yaml.safe_load(Path(__file__).with_name("realworld.yaml").read_text())["sets"]


def given(own, folder):
    """The arguments, or a file of the launcher's own kind."""
    if "arguments" in own:
        return own["arguments"]
    if own["launcher"] == "torchtitan":
        path = folder / "config.toml"
        sections = [
            "\n".join(
                [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in part.items())]
            )
            for name, part in own["config"].items()
        ]
        path.write_text("\n".join(sections))
        return str(path)
    path = folder / ("config.yaml" if own["launcher"] == "accelerate" else "config.json")
    dump = yaml.safe_dump if path.suffix == ".yaml" else json.dumps
    path.write_text(dump(own["config"]))
    return str(path)


def test_there_are_at_least_twenty_of_all_launchers():
    assert len(SETS) >= 20
    assert len({own["launcher"] for own in SETS}) == 6


@pytest.mark.parametrize("own", SETS, ids=lambda own: own["name"])
def test_the_set_imports_whole(own, tmp_path):
    asked = Asked(model=own.get("model"), vocab=own.get("vocab"), num_gpus=own.get("num_gpus"))
    found = import_job(
        given(own, tmp_path),
        own["launcher"],
        cluster=own["cluster"],
        asked=asked,
        overrides=own.get("overrides"),
    )
    assert found.unknown == ()
    choices = layout_choices(found.inputs.model, found.layout)
    choices["parameters"] = found.inputs.model.params_total
    assert {name: choices[name] for name in own["expect"]} == own["expect"]
