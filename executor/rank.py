"""One rank under torchrun: it does its work, or leaves a note of why it could not."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from executor.failures import TOLD_HERE, leave_note
from profiles.errors import ExitCode, ParplanError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["run_rank"]

DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


def run_rank(work: Callable[[], None], out: Path) -> None:
    """Do this rank's work; where it fails, leave a note in ``out`` and end."""
    _die_with_the_launcher()
    rank = int(os.environ["RANK"])
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher tells it
        failure = leave_note(out, rank, error)
        is_mistake = isinstance(error, ParplanError)  # which all ranks make alike
        if TOLD_HERE not in os.environ and not failure.of_peer and (rank == 0 or not is_mistake):
            sys.stderr.write(f"rank {rank}: {failure.message}\n")
            sys.stderr.flush()
        os._exit(failure.exit_code or int(ExitCode.NO))  # peers may hold threads of ours


def _die_with_the_launcher() -> None:
    """No rank outlives its launcher, however that ends. Only Linux can promise it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
