"""What several folders of tests share."""

from __future__ import annotations

import pytest
from click.testing import CliRunner


@pytest.fixture
def parplan():
    """Runs a command line in this process: its exit code, stdout and stderr."""
    from cli import main  # noqa: PLC0415 - after the path is set

    def run(*arguments: str):
        return CliRunner().invoke(main, [str(each) for each in arguments])

    return run
