"""Rules of launchers, each a function that says how what a launcher was told breaks it.

A rule *fails* (the launcher refuses or crashes) or is a *trap* (it runs, and does something else
than it was told). Its docstring is the rule in one sentence, its source where the launcher's
authors wrote it down; the reference page is made of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from executor.launchers.told import Told

    Check: TypeAlias = Callable[[Told], Iterator["Broken"]]

__all__ = ["Broken", "Finding", "Rule", "Rulebook", "divisors", "nearest_legal"]


@dataclass(frozen=True, slots=True)
class Broken:
    """One way in which a rule is broken: the fact that is at fault, why, and what is legal."""

    fact: str
    message: str
    valid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a launcher."""

    name: str
    says: str
    source: str
    fails: bool
    broken: Callable[[Told], Iterator[Broken]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that does not hold. ``fails``: the job would not run; else it silently differs."""

    rule: Rule
    where: str
    message: str
    valid: str

    @property
    def fails(self) -> bool:
        """Whether the job would not run."""
        return self.rule.fails

    def __str__(self) -> str:
        kind = "fails" if self.fails else "trap"
        cure = f"; legal: {self.valid}" if self.valid else ""
        return f"{kind}: {self.message}{cure} [{self.rule.name}]"


class Rulebook:
    """The rules of one launcher, in order."""

    def __init__(self, *shared: Rule) -> None:
        """Begin with rules that several launchers have."""
        self.rules = list(shared)

    def fails(self, source: str) -> Callable[[Check], Rule]:
        """A rule whose breach stops the job."""
        return self._rule(source, fails=True)

    def trap(self, source: str) -> Callable[[Check], Rule]:
        """A rule whose breach nobody tells."""
        return self._rule(source, fails=False)

    def _rule(self, source: str, *, fails: bool) -> Callable[[Check], Rule]:
        def add(check: Check) -> Rule:
            says = " ".join((check.__doc__ or "").split())
            name = check.__name__.replace("_", "-")
            rule = Rule(name=name, says=says, source=source, fails=fails, broken=check)
            self.rules.append(rule)
            return rule

        return add

    def findings(self, told: Told) -> list[Finding]:
        """Every rule that does not hold, what fails first."""
        found = [
            Finding(
                rule=rule,
                where=told.where(broken.fact),
                message=broken.message,
                valid=broken.valid,
            )
            for rule in self.rules
            for broken in rule.broken(told)
        ]
        return sorted(found, key=lambda finding: not finding.fails)


_MOST: Final = 4


def divisors(number: int) -> list[int]:
    """The divisors of a number, from 1 up."""
    return [each for each in range(1, number + 1) if number % each == 0]


def nearest_legal(value: int, legal: list[int]) -> str:
    """The legal values next to ``value``, a few on each side."""
    below = [each for each in legal if each < value][-_MOST // 2 :]
    above = [each for each in legal if each > value][: _MOST // 2]
    return " or ".join(str(each) for each in (*below, *above)) or "none"
