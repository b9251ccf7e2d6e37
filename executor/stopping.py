"""Ending a run early: SIGTERM, which Slurm sends before the time limit, ends it after the step at
work, with a checkpoint.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from profiles.errors import ExitCode, ParplanError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["SHUTDOWN_S", "StopRequest", "StoppedError"]

STUCK_S: Final = 20  # torchrun sends SIGTERM to the peers of a dead rank too, which may wait for it
SHUTDOWN_S: Final = 600  # that torchrun gives ranks to end by themselves


class StoppedError(ParplanError):
    """A run that was told to end, and did."""

    exit_code = ExitCode.STOPPED


class StopRequest:
    """Whether this rank has been told to end. Where no step ends in time, since a peer is gone,
    the kernel ends the rank.
    """

    def __init__(self) -> None:
        """Listen to SIGTERM."""
        self.is_made = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_made:
            self.is_made = True
            signal.alarm(STUCK_S)

    def step_done(self, *, stops: bool) -> None:
        """All ranks have ended a step; where it is the last, there is time to save."""
        if stops:
            self.is_made = True  # no alarm any more
            signal.alarm(0)
