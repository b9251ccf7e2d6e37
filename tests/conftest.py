"""What several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

PEER = Path(__file__).parents[1].parent / "shared" / "peers" / "galvatron"


@pytest.fixture
def parplan():
    """Runs a command line in this process: its exit code, stdout and stderr."""
    from cli import main  # noqa: PLC0415 - after the path is set

    def run(*arguments: str):
        return CliRunner().invoke(main, [str(each) for each in arguments])

    return run


@pytest.fixture(scope="session")
def peer() -> Path:
    """The folder of recorded cases, answers and profiles of Hetu-Galvatron."""
    if not PEER.is_dir():
        pytest.skip("the recorded cases of Hetu-Galvatron are not beside this project")
    return PEER
