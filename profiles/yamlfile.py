"""YAML read strictly: plain data, and where every key and value of it stands in the file.

YAML has traps that lose a user's meaning without a word: a key given twice, ``1e9`` read as text,
``on`` read as a boolean, ``012`` read as ten. None of them passes here. Anchors, tags and several
documents in one file have no use in these files and are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import yaml

from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Document", "Mark", "Place", "parse", "read", "read_text"]

Place = tuple[str | int, ...]  # keys and indices from the top of the file: ("nodes", 0, "count")

MAX_BYTES: Final = 10 * 10**6
MAX_VALUES: Final = 200_000
MAX_DEPTH: Final = 40
MAX_DIGITS: Final = 40

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT: Final = re.compile(r"[-+]?(([0-9][0-9_]*)?\.[0-9]+|[0-9][0-9_]*\.)([eE][-+][0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: Final[dict[str, bool | None]] = (
    dict.fromkeys(["", "~", "null", "Null", "NULL"], None)
    | {word: True for low in ("true", "yes", "on") for word in (low, low.title(), low.upper())}
    | {word: False for low in ("false", "no", "off") for word in (low, low.title(), low.upper())}
)


@dataclass(frozen=True, slots=True)
class Mark:
    """Line and column from 1, and the text of a scalar as it was written."""

    line: int
    column: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The data of one file. ``values`` and ``keys`` say where they stand.

    ``found`` are the problems of the reading itself, kept so that they are told together with
    those of the content. ``flags`` name what came from the command line instead of the file.
    """

    path: str
    data: Any
    values: Mapping[Place, Mark] = field(default_factory=dict)
    keys: Mapping[Place, Mark] = field(default_factory=dict)
    found: tuple[tuple[Mark, Problem], ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)

    def mark(self, place: Place, *, key: bool = False) -> Mark:
        """Where the value at ``place`` stands (or its key), else what encloses it."""
        while place:
            mark = (self.keys if key else self.values).get(place) or self.values.get(place)
            if mark is not None:
                return mark
            place = place[:-1]
        return self.values.get((), Mark(0, 0))

    def where(self, place: Place, *, key: bool = False) -> str:
        """``file:line:column`` of a place, or the flag that it came from."""
        if place and place[0] in self.flags:
            return self.flags[str(place[0])]
        mark = self.mark(place, key=key)
        return f"{self.path}:{mark.line}:{mark.column}" if mark.line else self.path

    def got(self, place: Place, value: object) -> str:
        """A value as the user wrote it."""
        if isinstance(value, dict | list):
            return "a mapping" if isinstance(value, dict) else "a list"
        mark = self.values.get(place)
        written = mark.text if mark is not None else str(value)
        if not written or value is None:
            return "empty" if value == "" else "nothing"
        return repr(written if len(written) <= _SHOWN else written[: _SHOWN - 3] + "...")

    def raise_problems(self, problems: list[tuple[Mark, Problem]] | None = None) -> None:
        """Raise every problem of the file, if any, in the order of the file.

        What could not be read is told once, not a second time for what stands in its stead.
        """
        unread = {problem.where for _, problem in self.found}
        told = [*self.found, *(each for each in problems or [] if each[1].where not in unread)]
        if told:
            told.sort(key=lambda each: (each[0].line, each[0].column))
            raise InputError([problem for _, problem in told])


_SHOWN: Final = 60


def read(path: str | Path) -> Document:
    """Read a YAML file. Raises ``InputError`` where it cannot be read as YAML at all."""
    document = parse(read_text(path), str(path))
    if not isinstance(document.data, dict):
        got = document.got((), document.data)
        raise InputError(
            Problem(
                where=document.where(()),
                message=f"the file holds {got}",
                expected="a mapping of keys to values at the top",
            )
        )
    return document


def read_text(path: str | Path) -> str:
    """The text of a file of reasonable size in UTF-8."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Problem(where=str(path), message=f"cannot be read: {reason}")) from None
    if len(content) > MAX_BYTES:
        message = f"is larger than {MAX_BYTES // 10**6} MB"
        raise InputError(Problem(where=str(path), message=message, expected="a small text file"))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        raise InputError(
            Problem(
                where=f"{path}:{before.count(10) + 1}:{column}",
                message=f"byte 0x{content[error.start]:02x} is not UTF-8",
                expected="text in UTF-8",
            )
        ) from None


def parse(text: str, path: str) -> Document:
    """The document in ``text``; ``path`` is what messages call it."""
    composer = _Composer(text, path)
    try:
        data = composer.document()
    except yaml.YAMLError as error:
        raise InputError(_syntax(error, path, text)) from None
    return Document(
        path=path,
        data=data,
        values=composer.values,
        keys=composer.keys,
        found=tuple(composer.found),
    )


def _syntax(error: yaml.YAMLError, path: str, text: str) -> Problem:
    """What the YAML parser says, at its mark."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        said = ", ".join(part for part in (error.context, error.problem) if part)
        return Problem(where=where, message=f"not valid YAML: {said}")
    position = int(getattr(error, "position", 0))
    before = text[:position]
    where = f"{path}:{before.count(chr(10)) + 1}:{position - before.rfind(chr(10))}"
    return Problem(where=where, message="a control character", expected="plain text")


class _Composer:
    """Turns the parser's events into plain data, noting marks and problems on the way."""

    def __init__(self, text: str, path: str) -> None:
        self._events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=_LOADER))
        self._path = path
        self.values: dict[Place, Mark] = {}
        self.keys: dict[Place, Mark] = {}
        self.found: list[tuple[Mark, Problem]] = []

    def document(self) -> Any:
        """The one document of the file."""
        next(self._events)  # the stream
        if not isinstance(next(self._events), yaml.DocumentStartEvent):
            self._refuse(Mark(1, 1), "the file is empty", "a mapping of keys to values")
        data = self._value(next(self._events), ())
        next(self._events)  # the document's end
        following = next(self._events)
        if isinstance(following, yaml.DocumentStartEvent):
            self._refuse(_mark(following), "a second document starts here", "one document a file")
        return data

    def _value(self, event: yaml.Event, place: Place) -> Any:
        mark = self.values[place] = _mark(event)
        if len(self.values) > MAX_VALUES:
            self._refuse(mark, f"more than {MAX_VALUES} values", "a smaller file")
        if len(place) > MAX_DEPTH:
            self._refuse(mark, "nested too deep", f"at most {MAX_DEPTH} levels")
        assert isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.AliasEvent):
            self._refuse(mark, f"the alias *{event.anchor}", "the value written out")
        if event.anchor is not None:
            self._note(mark, f"the anchor &{event.anchor}", "the value written out")
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            self._note(mark, f"the tag {tag}", "plain text, numbers, lists and mappings")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(place)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self._value(event, (*place, len(items))))
            return items
        assert isinstance(event, yaml.ScalarEvent)
        return self._scalar(event, mark)

    def _mapping(self, place: Place) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            mark = _mark(event)
            if not isinstance(event, yaml.ScalarEvent):
                self._refuse(mark, "a key that is not text", "a name")
            key = (*place, event.value)
            if event.value in mapping:
                first = self.keys[key].line
                self._note(mark, f"the key {event.value!r} stands twice, first in line {first}")
            else:
                self.keys[key] = mark
            mapping[event.value] = self._value(next(self._events), key)
        return mapping

    def _scalar(self, event: yaml.ScalarEvent, mark: Mark) -> str | float | bool | None:
        text = event.value
        if not event.implicit[0]:  # quoted
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            if len(text) > MAX_DIGITS:
                self._note(mark, f"a number of {len(text)} digits", "a number of sensible size")
                return 0
            return int(text)
        if _NOT_FINITE.fullmatch(text) or (_FLOAT.fullmatch(text) and abs(float(text)) > _HUGE):
            self._note(mark, f"{text!r} is not a finite number", "a finite number")
            return 0
        return float(text) if _FLOAT.fullmatch(text) else text

    def _note(self, mark: Mark, message: str, expected: str = "") -> None:
        where = f"{self._path}:{mark.line}:{mark.column}"
        self.found.append((mark, Problem(where=where, message=message, expected=expected)))

    def _refuse(self, mark: Mark, message: str, expected: str) -> NoReturn:
        self._note(mark, message, expected)
        raise InputError([problem for _, problem in self.found])


_HUGE: Final = 1e300


def _mark(event: yaml.Event) -> Mark:
    start = event.start_mark
    assert start is not None
    text = event.value if isinstance(event, yaml.ScalarEvent) else ""
    return Mark(start.line + 1, start.column + 1, text)
