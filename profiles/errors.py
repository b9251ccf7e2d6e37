"""The errors of parplan: one small tree, each class with its exit code and what cures it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["ExitCode", "InfeasibleError", "InputError", "ParplanError", "Problem"]


class ExitCode(IntEnum):
    """What the process says to the shell."""

    YES = 0
    NO = 1
    ASKED_WRONGLY = 2
    WE_FAILED = 3
    INTERRUPTED = 130
    STOPPED = 143  # by SIGTERM, as shells have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with an input, and how to put it right.

    ``where`` is ``file:line:column`` for a file, the flag for the command line.
    """

    where: str
    message: str
    expected: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}"
        if self.expected:
            text += f"; expected {self.expected}"
        if self.hint:
            text += f" ({self.hint})"
        return text


class ParplanError(Exception):
    """Base of every error that is not our own bug."""

    exit_code = ExitCode.WE_FAILED


class InputError(ParplanError):
    """The user asked wrongly: carries every problem of the input, not only the first."""

    exit_code = ExitCode.ASKED_WRONGLY

    def __init__(self, problems: Problem | list[Problem]) -> None:
        """Keep the problems in the order in which they stand in the file."""
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InfeasibleError(ParplanError):
    """Nothing fits: says the tightest constraint and the smallest change that helps."""

    exit_code = ExitCode.NO

    def __init__(self, message: str, *, constraint: str, hints: tuple[str, ...] = ()) -> None:
        """``constraint`` is in the user's words, with numbers; ``hints`` are cures."""
        self.constraint = constraint
        self.hints = hints
        lines = [message, f"tightest constraint: {constraint}"]
        lines += [f"would help: {hint}" for hint in hints]
        super().__init__("\n".join(lines))
