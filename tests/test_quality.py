"""The tools that hold the house rules: the same here as on a developer's machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = {
    "ruff": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    "import-linter": ["lint-imports"],
    "deptry": ["deptry", "."],
    "codespell": ["codespell"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_tool_finds_nothing(tool):
    command = [str(Path(sys.executable).parent / TOOLS[tool][0]), *TOOLS[tool][1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
