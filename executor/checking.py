"""What of a launcher's arguments would fail or be silently different, before a job is queued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from executor.importing import Asked
from executor.launchers.commandline import Source
from executor.launchers.modelfacts import facts_of_model
from executor.launchers.registry import launcher
from profiles.catalog import load_model
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from executor.launchers.rulebook import Finding

__all__ = ["Checked", "check_arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The rules that do not hold, what fails first; arguments in no table; and how many rules."""

    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    num_rules: int
    num_gpus: int

    @property
    def answer(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "fails": self.fails,
            "num_gpus": self.num_gpus,
            "rules": self.num_rules,
            "findings": [
                {
                    "kind": "fails" if finding.fails else "trap",
                    "rule": finding.rule.name,
                    "where": finding.where,
                    "message": finding.message,
                    "legal": finding.valid,
                    "source": finding.rule.source,
                }
                for finding in self.findings
            ],
            "unknown": list(self.unknown),
            "notes": list(self.notes),
        }

    @property
    def fails(self) -> bool:
        """Whether the job would not run."""
        return any(finding.fails for finding in self.findings)


def check_arguments(given: str, name: str, asked: Asked | None = None) -> Checked:
    """The rules that ``given`` (a file, or arguments) breaks on so many GPUs as were asked for, or
    as its launch line starts. Raises ``InputError`` for what cannot be read.
    """
    asked = asked or Asked()
    found, version = launcher(name, asked.version)
    source = Source(given, values=asked.values, line=asked.line)
    told = found.tell(source, num_gpus=asked.num_gpus, version=version)
    if asked.num_gpus is None and told.started is None:
        message = "no launch line says how many GPUs"
        raise InputError(Problem(where="--num-gpus", message=message, expected="a number"))
    if asked.model is not None:
        told.model_facts = facts_of_model(load_model(asked.model, where="--model"))
    notes = list(told.notes)
    if asked.num_gpus is not None and told.started not in (None, asked.num_gpus):
        processes = f"the launch line starts {told.started} processes"
        notes.append(f"{processes}; checked for {asked.num_gpus}")
    return Checked(
        findings=tuple(found.rulebook.findings(told)),
        unknown=tuple(told.unknown),
        notes=tuple(notes),
        num_rules=len(found.rulebook.rules),
        num_gpus=told.num_gpus,
    )
