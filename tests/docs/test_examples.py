"""Every example's plan, written anew, is the one that is shown."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = yaml.safe_load((EXAMPLES / "commands.yaml").read_text())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_plan_of_the_example_is_written_byte_for_byte(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder)
    shown = (folder / "plan.yaml").read_bytes()
    (folder / "plan.yaml").unlink()
    subprocess.run(
        [sys.executable, "-m", "cli", *shlex.split(COMMANDS[name])],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    assert (folder / "plan.yaml").read_bytes() == shown


def test_every_example_has_its_command():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == set(COMMANDS)
