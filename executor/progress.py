"""What a run tells while it trains: JSON lines in a file, a live line on stderr.

The file goes on where a run does: steps that are done again are written again.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from profiles.outputfile import save_text
from profiles.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from executor.runrecord import StepFacts

__all__ = ["Progress", "logged_steps"]

LINES: Final = 10  # of a run whose stderr is no terminal


class Progress:
    """Rank 0's log. Used as a context."""

    def __init__(
        self, path: Path, *, plan: str, num_steps: int, flop_of_a_step: float, peak: float
    ) -> None:
        """``plan``: under which the steps ran; ``peak``: FLOP/s of all devices together."""
        self.path, self.plan, self.num_steps = path, plan, num_steps
        self.first = 0
        self.mfu_of_a_second = flop_of_a_step / peak
        self.file: TextIO | None = None
        self.is_live = sys.stderr.isatty()

    def __enter__(self) -> Self:
        """Open the log behind the steps before ``first``."""
        lines = [json.dumps(each) + "\n" for each in logged_steps(self.path, self.first)]
        save_text("".join(lines), self.path, force=True)
        self.file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        """Close it, and end the live line."""
        if self.is_live:
            sys.stderr.write("\n")
        if self.file is not None:
            try:
                self.file.close()
            except OSError as error:
                self.say(f"{self.path}: not all steps are written: {error.strerror}")

    def say(self, text: str) -> None:
        """A line about the run."""
        sys.stderr.write(f"\r\x1b[K{text}\n" if self.is_live else f"{text}\n")
        sys.stderr.flush()

    def tell(self, facts: StepFacts, memory_bytes: int) -> None:
        """One step."""
        assert self.file is not None
        mfu = self.mfu_of_a_second / facts.step_s
        line = {**asdict(facts), "mfu": mfu, "memory_bytes": memory_bytes, "plan": self.plan}
        with suppress(OSError):  # a disk that is full for a while: it is written with the next
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        text = (
            f"step {facts.step + 1}/{self.num_steps}  loss {facts.loss:.4f}  "
            f"{facts.tokens_per_s:,.0f} tokens/s  MFU {100 * mfu:.1f} %  "
            f"{memory_bytes / GIB:.2f} GiB"
        )
        every = max(1, (self.num_steps - self.first) // LINES)
        if self.is_live:
            sys.stderr.write(f"\r\x1b[K{text}")
        elif (facts.step + 1) % every == 0 or facts.step + 1 == self.num_steps:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()


def logged_steps(path: Path, before: int) -> list[dict[str, Any]]:
    """What a log says of the steps before one. A line that was cut off is none."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            step = json.loads(line)
        except ValueError:
            continue
        if step["step"] < before:
            found.append(step)
    return found
