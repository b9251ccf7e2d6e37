"""What a launcher is told: its keys, each said once, and the facts that they state.

A *fact* has the same name whatever the launcher (``tp``, ``micro_batch``, ``hidden``). A launcher's
table of ``Key``s says how it spells each fact, of which kind the value is and what absence means;
exporter, importer and checker all read that table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from profiles.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Key", "Kind", "Told", "by_fact", "by_name", "read_value"]


class Kind(StrEnum):
    """What stands after a key."""

    COUNT = "count"  # a whole number, at least 1
    SIZE = "size"  # a whole number, at least 0, or -1
    NUMBER = "number"
    TEXT = "text"
    WORDS = "words"  # several texts
    SWITCH = "switch"  # true or false; on a command line nothing, which means true
    OFF = "off"  # on a command line nothing, which means false


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a launcher. ``usual``: what its absence means. ``once``: former names. ``free``:
    nothing is wrong with a value that is not known.
    """

    name: str
    fact: str
    kind: Kind = Kind.COUNT
    usual: Any = None
    choices: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    bridge: str = ""
    free: bool = False


@dataclass(kw_only=True)
class Told:
    """The facts that a launcher was told. ``told.tp`` is what was given, or the usual.

    ``started``: the processes that a launch line starts, where it says so. ``compute_capability``
    of the GPUs, 10 from Blackwell on. ``places`` say where each fact was given. ``unknown`` keys
    are in no table; ``unmodelled`` ones are known and have a bearing that no estimate has;
    ``model_facts`` stand in for what the launcher was not told about the model.
    """

    launcher: str
    keys: Mapping[str, Key]
    num_gpus: int
    started: int | None = None
    compute_capability: int = 9
    given: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    model_facts: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unmodelled: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __getattr__(self, fact: str) -> Any:
        """The value of a fact."""
        for facts in (self.given, self.model_facts):
            if fact in facts:
                return facts[fact]
        try:
            return self.keys[fact].usual
        except KeyError:
            if fact in _OF_NO_KEY:
                return None
            raise AttributeError(fact) from None

    def says(self, fact: str) -> bool:
        """Whether the launcher was told it."""
        return fact in self.given

    def spelt(self, fact: str) -> str:
        """How the launcher spells a fact."""
        return self.keys[fact].name if fact in self.keys else fact

    def where(self, fact: str) -> str:
        """The place of a fact, or its key where it was not given."""
        return self.places.get(fact, self.spelt(fact))


# Facts of the model, which many launchers leave to the model's own code.
_OF_NO_KEY: Final = frozenset(
    [
        *("num_layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "tied", "latent"),
        *("num_experts", "expert_ffn", "seq_len", "global_batch", "sequence_parallel"),
        *("cp", "ep", "expert_tp", "pp"),
    ]
)


def by_fact(keys: Iterable[Key]) -> dict[str, Key]:
    """The keys of a table by the fact that they state."""
    return {key.fact: key for key in keys}


def by_name(keys: Iterable[Key]) -> dict[str, Key]:
    """The keys of a table by today's and former names."""
    return {name: key for key in keys for name in (key.name, *key.once)}


def read_value(key: Key, values: list[str]) -> Any:
    """The value of a key from the words behind it. Returns a ``Problem`` without a place where
    they are not of its kind.
    """
    if key.kind in (Kind.SWITCH, Kind.OFF):
        return _switch(key, values)
    if key.kind is Kind.WORDS:
        odd = [value for value in values if key.choices and value not in key.choices]
        return _no_choice(key, odd[0]) if odd else tuple(values)
    if len(values) != 1:
        count = "nothing" if not values else f"{len(values)} words"
        return Problem(where="", message=f"{key.name} has {count}", expected="one value")
    value = values[0]
    if key.kind is Kind.TEXT:
        return _no_choice(key, value) if key.choices and value not in key.choices else value
    return _number(key, value)


def _no_choice(key: Key, value: str) -> Problem:
    expected = f"one of {', '.join(key.choices)}"
    return Problem(where="", message=f"{key.name} is {value!r}", expected=expected)


def _switch(key: Key, values: list[str]) -> Any:
    on = key.kind is Kind.SWITCH
    if not values:
        return on
    word = values[0].lower()
    if len(values) == 1 and word in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        return (word in ("true", "1", "yes", "on")) is on
    message = f"{key.name} is {' '.join(values)!r}"
    return Problem(where="", message=message, expected="nothing, true or false")


def _number(key: Key, value: str) -> Any:
    try:
        number: float = float(value.replace("_", ""))
    except ValueError:
        number = float("nan")
    whole = number.is_integer()
    if key.kind is Kind.NUMBER and abs(number) < _HUGE:
        return number
    least = 1 if key.kind is Kind.COUNT else -1
    if whole and least <= number < _HUGE:
        return int(number)
    expected = (
        "a number" if key.kind is Kind.NUMBER else f"a whole number, at least {max(0, least)}"
    )
    return Problem(where="", message=f"{key.name} is {value!r}", expected=expected)


_HUGE: Final = 1e15
