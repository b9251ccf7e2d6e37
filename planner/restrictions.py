"""``--fix tp=8``, ``--max tp=8``, ``--exclude zero=3`` -> Restrictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from costmodel.layout import ContextComm, RecomputeKind
from costmodel.schedules import SCHEDULES
from planner.choices import CHOICES, ORDERS, Restrictions
from profiles.errors import InputError, Problem
from profiles.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["parse_restrictions"]

WORDS: Final[dict[str, tuple[str, ...]]] = {
    "schedule": tuple(SCHEDULES),
    "zero": ("0", "1", "2", "3"),
    "recompute": tuple(kind.value for kind in RecomputeKind),
    "rank_order": tuple(ORDERS),
    "sequence_parallel": ("true", "false"),
    "cp_comm": tuple(ContextComm),
}
NUMBERS: Final = tuple(name for name in CHOICES if name not in WORDS)
LONG: Final = 10


def parse_restrictions(
    fix: Iterable[str] = (),
    at_most: Iterable[str] = (),
    exclude: Iterable[str] = (),
    *,
    tp_across_nodes: bool = False,
) -> Restrictions:
    """Restrictions from ``NAME=VALUE`` or ``NAME=VALUE,VALUE``. Raises ``InputError`` with every
    name and value that is not known.
    """
    problems: list[Problem] = []
    fixed = _by_name("--fix", fix, problems)
    most = _by_name("--max", at_most, problems)
    excluded = _by_name("--exclude", exclude, problems)
    for name, values in most.items():
        if name not in (*NUMBERS, "zero"):
            message = f"{name} has no order"
            problems.append(
                Problem(where="--max", message=message, expected=f"one of {', '.join(NUMBERS)}")
            )
        elif len(values) != 1:
            problems.append(Problem(where="--max", message=f"{name} twice", expected="one number"))
    for name in sorted(fixed.keys() & excluded.keys()):
        if fixed[name] <= excluded[name]:
            message = f"{name} leaves nothing of what --fix allows"
            problems.append(Problem(where="--exclude", message=message))
    if problems:
        raise InputError(problems)
    return Restrictions(
        fixed={name: frozenset(values) for name, values in fixed.items()},
        at_most={name: int(next(iter(values))) for name, values in most.items()},
        excluded={name: frozenset(values) for name, values in excluded.items()},
        tp_across_nodes=tp_across_nodes,
    )


def _by_name(flag: str, texts: Iterable[str], problems: list[Problem]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_").lower()
        if not equals:
            problems.append(Problem(where=flag, message=repr(text), expected="NAME=VALUE"))
        elif name not in CHOICES:
            problems.append(
                Problem(
                    where=flag,
                    message=f"there is no choice {name!r}",
                    expected=f"one of {', '.join(CHOICES)}",
                    hint=nearest(name, CHOICES),
                )
            )
        else:
            own = [_canonical(value.strip().lower()) for value in values.split(",")]
            problems += [p for value in own if (p := _value_problem(flag, name, value))]
            found.setdefault(name, set()).update(own)
    return found


def _canonical(value: str) -> str:
    return value.lstrip("0") or "0" if value.isascii() and value.isdigit() else value


def _value_problem(flag: str, name: str, value: str) -> Problem | None:
    if name in WORDS:
        if value in WORDS[name]:
            return None
        expected, hint = f"one of {', '.join(WORDS[name])}", nearest(value, WORDS[name])
    else:
        if value.isascii() and value.isdigit() and 0 < len(value) < LONG and value != "0":
            return None
        expected, hint = "a whole number, at least 1", ""
    return Problem(where=flag, message=f"{name} is {value!r}", expected=expected, hint=hint)
