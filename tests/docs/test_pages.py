"""The tutorial, the README and some how-tos run: each console block, in order, in one folder.

A block holds one command after ``$`` and what it prints. Lines that end in ``...`` match by their
beginning; a line ``...`` alone stands for any number of lines.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {  # and their commands, at least
    "README.md": 1,
    "docs/tutorial/first-plan.md": 7,
    "docs/how-to/describe-your-cluster.md": 3,
    "docs/how-to/read-a-topology.md": 4,
    "docs/how-to/export-to-megatron.md": 6,
    "docs/how-to/export-to-megatron-bridge.md": 5,
    "docs/how-to/export-to-torchtitan.md": 6,
    "docs/how-to/export-to-deepspeed.md": 7,
    "docs/how-to/export-to-accelerate.md": 7,
    "docs/how-to/export-to-galvatron.md": 5,
    "docs/how-to/compare-plans.md": 3,
    "docs/how-to/ask-what-if.md": 3,
    "docs/how-to/plan-for-cost-or-a-target.md": 2,
    "docs/how-to/share-a-report.md": 1,
    "docs/how-to/move-a-run-to-another-plan.md": 4,
    "docs/how-to/apply-a-plan-to-a-transformers-model.md": 1,
    "docs/how-to/profile-your-machine.md": 6,
}
BLOCK = re.compile(r"```(console|json|yaml|text) ?([\w.-]*)\n(.*?)```", re.DOTALL)


def run(command: str, folder: Path) -> str:
    arguments = shlex.split(command)
    assert arguments[0] == "parplan"
    done = subprocess.run(
        [sys.executable, "-m", "cli", *arguments[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "COLUMNS": "100", "NO_COLOR": "1"},
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr


def assert_shows(printed: str, shown: str) -> None:
    """Each shown line is printed, in order."""
    lines = iter(line.rstrip() for line in printed.splitlines())
    for wanted in shown.strip().splitlines():
        text = wanted.rstrip()
        if text == "...":
            continue
        assert any(
            line.startswith(text[:-3]) if text.endswith("...") else line == text for line in lines
        ), f"not printed: {text!r}\n{printed}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_is_true(page, tmp_path):
    blocks = BLOCK.findall((ROOT / page).read_text())
    commands = 0
    for kind, name, body in blocks:
        if kind != "console":
            (tmp_path / name).write_text(body)
            continue
        command, _, shown = body.partition("\n")
        assert_shows(run(command.removeprefix("$ "), tmp_path), shown)
        commands += 1
        for made in re.findall(r"^written: (.*)", shown, re.MULTILINE):
            assert (tmp_path / made).stat().st_size > 0
    assert commands >= PAGES[page]


def test_the_python_of_the_how_to_runs(tmp_path):
    page = (ROOT / "docs" / "how-to" / "plan-in-python.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.yaml").exists()


def test_the_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
