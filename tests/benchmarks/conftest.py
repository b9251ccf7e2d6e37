"""Recorded cases of Hetu-Galvatron, and small problems made up for the solver."""

from __future__ import annotations

from pathlib import Path

import pytest

PEER = Path(__file__).parents[2].parent / "shared" / "peers" / "galvatron"


@pytest.fixture(scope="session")
def peer() -> Path:
    """The folder of the peer's cases, answers and profiles."""
    if not PEER.is_dir():
        pytest.skip("the recorded cases of Hetu-Galvatron are not beside this project")
    return PEER
