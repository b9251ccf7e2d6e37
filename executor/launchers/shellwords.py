"""Shell text as words with places: quotes, continued lines, comments, arrays and variables.

Only the form is read here; ``executor.launchers.script`` gives variables their values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Part", "UnclosedError", "Word", "statements"]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?]")
_BRACED: Final = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?])(\[[@*]\])?(?:(:?[-=?+])(.*))?", re.DOTALL
)
_OPERATORS: Final = (";;", "&&", "||", ";", "|", "&")


class UnclosedError(ValueError):
    """A quote begins at ``line`` and ``column`` and never ends."""

    def __init__(self, line: int, column: int) -> None:
        """Both from 1."""
        super().__init__(f"a quote begins at {line}:{column} and does not end")
        self.line, self.column = line, column


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word: literal ``text``, or the variable ``name`` with what stands in for it.

    ``name`` is ``()`` for arithmetic and ``$`` for a command whose output is not known.
    """

    text: str = ""
    name: str = ""
    operator: str = ""
    default: str = ""
    quoted: bool = False
    whole: bool = False  # all elements of an array


@dataclass(frozen=True, slots=True)
class Word:
    """A word, at line and column from 1. ``items``: the elements of ``NAME=(...)``."""

    line: int
    column: int
    parts: tuple[Part, ...]
    items: tuple[Word, ...] | None = None

    @property
    def literal(self) -> str | None:
        """The text of a word without variables, None for another."""
        return (
            None if any(part.name for part in self.parts) else "".join(p.text for p in self.parts)
        )

    @property
    def start(self) -> str:
        """The literal text that it begins with."""
        return self.parts[0].text if self.parts and not self.parts[0].name else ""


def statements(text: str, *, operators: bool = True) -> list[list[Word]]:
    """The words of each command of a text, in order. Without ``operators`` the text is one list of
    words, in which ``|``, ``;``, ``&`` and brackets are letters like others. Raises
    ``UnclosedError``.
    """
    return _Lexer(text, operators=operators).statements()


class _Lexer:
    def __init__(self, text: str, *, operators: bool) -> None:
        self.operators = _OPERATORS if operators else ()
        self.ends = " \t\n;|&)" if operators else " \t\n"
        self.brackets = "()" if operators else ""
        self.text, self.at = text.replace("\r\n", "\n"), 0
        self.line, self.line_start = 1, 0

    def _next(self, count: int = 1) -> str:
        taken = self.text[self.at : self.at + count]
        for offset, char in enumerate(taken):
            if char == "\n":
                self.line += 1
                self.line_start = self.at + offset + 1
        self.at += count
        return taken

    def _starts(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def _skip_blank(self) -> None:
        while self.at < len(self.text):
            if self._starts("\\\n"):
                self._next(2)
            elif self.text[self.at] in " \t":
                self._next()
            elif self._starts("#"):
                while self.at < len(self.text) and not self._starts("\n"):
                    self._next()
            else:
                return

    def statements(self) -> list[list[Word]]:
        found: list[list[Word]] = [[]]
        heredoc = ""
        while True:
            self._skip_blank()
            if self.at >= len(self.text):
                return [words for words in found if words]
            operator = next((each for each in self.operators if self._starts(each)), "")
            if self._starts("\n") or operator:
                end = self._next(len(operator) or 1)
                found.append([])
                if heredoc and end == "\n":
                    self._skip_heredoc(heredoc)
                    heredoc = ""
            elif self.text[self.at] in self.brackets:
                self._next()
            elif match := re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(self.text, self.at):
                heredoc = match[1]
                self._next(len(match[0]))
            else:
                found[-1].append(self._word())

    def _skip_heredoc(self, end: str) -> None:
        while self.at < len(self.text):
            stop = self.text.find("\n", self.at)
            stop = len(self.text) if stop < 0 else stop + 1
            line = self._next(stop - self.at)
            if line.strip() == end:
                return

    def _word(self) -> Word:
        line, column = self.line, self.at - self.line_start + 1
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if self._starts("\\\n"):
                self._next(2)
            elif char in self.ends:
                break
            elif char in self.brackets:
                if parts and parts[-1].text.endswith("="):
                    return Word(line, column, _joined(parts), self._items())
                break
            else:
                parts += self._piece(char)
        if not parts:
            parts.append(Part(self._next()))
        return Word(line, column, _joined(parts))

    def _piece(self, char: str) -> list[Part]:
        """What begins with ``char`` inside a word."""
        if char in "$`":
            return [self._variable(quoted=False)]
        opened = UnclosedError(self.line, self.at - self.line_start + 1)
        self._next()
        if char == "\\":
            return [Part(self._next(), quoted=True)]
        if char == "'":
            return [Part(self._until("'", opened), quoted=True)]
        return self._double_quoted(opened) if char == '"' else [Part(char)]

    def _items(self) -> tuple[Word, ...]:
        self._next()
        items = []
        while self.at < len(self.text):
            self._skip_blank()
            if self._starts("\n") or self._starts(";"):
                self._next()
            elif self._starts(")"):
                self._next()
                break
            elif self.at < len(self.text):
                items.append(self._word())
        return tuple(items)

    def _until(self, end: str, opened: UnclosedError | None = None) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0 and opened:
            raise opened
        stop = len(self.text) if stop < 0 else stop
        taken = self._next(stop - self.at)
        self._next()
        return taken

    def _double_quoted(self, opened: UnclosedError) -> list[Part]:
        parts = [Part("", quoted=True)]
        while self.at < len(self.text) and not self._starts('"'):
            if self._starts("\\\n"):
                self._next(2)
            elif self._starts("\\") and self.text[self.at + 1 : self.at + 2] in '"\\$`':
                self._next()
                parts.append(Part(self._next(), quoted=True))
            elif self.text[self.at] in "$`":
                parts.append(self._variable(quoted=True))
            else:
                parts.append(Part(self._next(), quoted=True))
        if self.at >= len(self.text):
            raise opened
        self._next()
        return parts

    def _variable(self, *, quoted: bool) -> Part:
        if self._next() == "`":
            return Part(self._until("`"), name="$", quoted=quoted)
        if self._starts("(("):
            self._next(2)
            return Part(self._balanced("((", "))"), name="()", quoted=quoted)
        if self._starts("("):
            self._next()
            return Part(self._balanced("(", ")"), name="$", quoted=quoted)
        if self._starts("{"):
            self._next()
            return self._braced(quoted=quoted)
        match = _NAME.match(self.text, self.at)
        if match is None:
            return Part("$", quoted=quoted)
        self._next(len(match[0]))
        return Part("", match[0], quoted=quoted, whole=match[0] in "@*")

    def _braced(self, *, quoted: bool) -> Part:
        """``NAME}``, ``NAME[@]}``, ``NAME:-default}``; other operators give what is not known."""
        inner = self._balanced("{", "}")
        match = _BRACED.fullmatch(inner)
        if match is None:
            return Part(inner, name="$", quoted=quoted)
        name, whole, operator, default = match.groups()
        return Part("", name, operator or "", default or "", quoted, bool(whole))

    def _balanced(self, opening: str, closing: str) -> str:
        """The text up to the closing bracket that belongs to an opening one already read."""
        depth, start = 1, self.at
        while self.at < len(self.text):
            if self._starts(closing):
                depth -= 1
                if not depth:
                    inner = self.text[start : self.at]
                    self._next(len(closing))
                    return inner
                self._next(len(closing))
            elif self._starts(opening):
                depth += 1
                self._next(len(opening))
            else:
                self._next()
        return self.text[start:]


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Literal neighbours of the same quoting as one part."""
    found: list[Part] = []
    for part in parts:
        if found and not part.name and not found[-1].name and found[-1].quoted == part.quoted:
            found[-1] = Part(found[-1].text + part.text, quoted=part.quoted)
        else:
            found.append(part)
    return tuple(found)
