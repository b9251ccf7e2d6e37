"""Failures of a job: each rank leaves a note, and one of them is told: the cause.

When a rank dies, its peers fail too, with errors about connections. Those are not the cause.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from profiles.errors import ExitCode, ParplanError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TOLD_HERE", "Failure", "JobError", "cause", "forget", "leave_note"]

FOLDER: Final = "errors"
TOLD_HERE: Final = "PARPLAN_TELLS_ERRORS"  # set where ``parplan launch`` will tell the cause
# What gloo, NCCL and the store say of a peer that is gone.
OF_PEERS: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "NCCL communicator was aborted",
    "remote process exited",
    "failed to recv",
    "Connection was likely closed",
)


class JobError(ParplanError):
    """A job that did not finish."""

    exit_code = ExitCode.NO


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ended a rank. ``exit_code``: that of the job, if this is the cause."""

    rank: int
    message: str
    exit_code: int
    of_peer: bool
    when_s: float


def leave_note(out: Path, rank: int, error: BaseException) -> Failure:
    """Write down why this rank ends. The user's mistakes are told whole, ours with a traceback."""
    is_ours = not isinstance(error, ParplanError)
    code = error.exit_code if isinstance(error, ParplanError) else ExitCode.NO
    message = f"{type(error).__name__}: {error}".strip() if is_ours else str(error)
    text = "".join(traceback.format_exception(error))
    failure = Failure(
        rank=rank,
        message=message,
        exit_code=int(code),
        of_peer=is_ours and any(words in text for words in OF_PEERS),
        when_s=time.time(),
    )
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.txt").write_text(text, encoding="utf-8")
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(failure)), encoding="utf-8")
    return failure


def forget(out: Path) -> None:
    """Remove the notes of an earlier run."""
    for path in (out / FOLDER).glob("rank-*"):
        path.unlink()


def cause(out: Path) -> Failure | None:
    """The first failure that is no consequence of another, or the first of all."""
    notes = (out / FOLDER).glob("rank-*.json")
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in notes]
    return min(found, key=lambda each: (each.of_peer, each.when_s), default=None)
