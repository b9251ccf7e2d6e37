from __future__ import annotations

import os
import subprocess
import sys

import pytest
from clijobs import ROOT, SMALL


@pytest.fixture
def small():
    """Flags of a job that is planned in no time."""
    return SMALL


@pytest.fixture
def process():
    """Runs ``python ARGUMENTS`` as a process of its own, the project on its path."""

    def run(*arguments: str, **how):
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **how.pop("env", {})},
            capture_output=True,
            text=True,
            check=False,
            **how,
        )

    return run
