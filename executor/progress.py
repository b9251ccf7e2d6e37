"""What a run tells while it trains: JSON lines in a file, a live line on stderr."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, Self, TextIO

if TYPE_CHECKING:
    from pathlib import Path

    from executor.runrecord import StepFacts

__all__ = ["Progress"]

GIB: Final = 2**30
LINES: Final = 10  # of a run whose stderr is no terminal


class Progress:
    """Rank 0's log. Used as a context."""

    def __init__(self, path: Path, *, num_steps: int, flop_of_a_step: float, peak: float) -> None:
        """``peak``: FLOP/s of all devices together."""
        self.path, self.num_steps = path, num_steps
        self.mfu_of_a_second = flop_of_a_step / peak
        self.file: TextIO | None = None
        self.is_live = sys.stderr.isatty()

    def __enter__(self) -> Self:
        """Open the log."""
        self.file = self.path.open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        """Close it, and end the live line."""
        if self.is_live:
            sys.stderr.write("\n")
        if self.file is not None:
            self.file.close()

    def tell(self, facts: StepFacts, memory_bytes: int) -> None:
        """One step."""
        assert self.file is not None
        mfu = self.mfu_of_a_second / facts.step_s
        line = {**asdict(facts), "mfu": mfu, "memory_bytes": memory_bytes}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        text = (
            f"step {facts.step + 1}/{self.num_steps}  loss {facts.loss:.4f}  "
            f"{facts.tokens_per_s:,.0f} tokens/s  MFU {100 * mfu:.1f} %  "
            f"{memory_bytes / GIB:.2f} GiB"
        )
        every = max(1, self.num_steps // LINES)
        if self.is_live:
            sys.stderr.write(f"\r\x1b[K{text}")
        elif (facts.step + 1) % every == 0 or facts.step + 1 == self.num_steps:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()
