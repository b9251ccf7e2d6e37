"""What of a launcher's arguments would fail or be silently different, before a job is queued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from executor.launchers.commandline import Source
from executor.launchers.modelfacts import facts_of_model
from executor.launchers.registry import launcher
from profiles.catalog import load_model
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def check_arguments(
    given: str,
    name: str,
    *,
    version: str | None = None,
    num_gpus: int | None = None,
    model: str | None = None,
    values: Mapping[str, str] | None = None,
    line: int | None = None,
) -> Checked:
    """The rules that ``given`` (a file, or arguments) breaks on ``num_gpus`` GPUs, by default as
    many as its launch line starts. ``model`` names it where the arguments do not say it. Raises
    ``InputError`` for what cannot be read.
    """
    found, own_version = launcher(name, version)
    told = found.tell(
        Source(given, values=values, line=line), num_gpus=num_gpus, version=own_version
    )
    if num_gpus is None and told.started is None:
        message = "no launch line says how many GPUs"
        raise InputError(Problem(where="--num-gpus", message=message, expected="a number"))
    if model is not None:
        told.model_facts = facts_of_model(load_model(model, where="--model"))
    notes = list(told.notes)
    if num_gpus is not None and told.started not in (None, num_gpus):
        notes.append(f"the launch line starts {told.started} processes; checked for {num_gpus}")
    findings = tuple(found.rulebook.findings(told))
    return Checked(
        findings=findings,
        unknown=tuple(told.unknown),
        notes=tuple(notes),
        num_rules=len(found.rulebook.rules),
        num_gpus=told.num_gpus,
    )
