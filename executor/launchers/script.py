"""A launch script, or arguments as typed -> the words of the commands that it runs.

Variables, arrays, arithmetic and simple conditions are followed. What is not known (a variable
that is not set, the output of a command, a branch whose condition nobody can tell) stays so: a
word that has it says which, and only where such a word matters is it an error.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from executor.launchers.shellwords import UnclosedError, Word, statements
from profiles import yamlfile
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from executor.launchers.shellwords import Part

__all__ = ["Command", "Token", "commands_of_file", "commands_of_text"]

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)
_DECLARING: Final = ("export", "local", "declare", "readonly", "typeset", "env")
_CONTROL: Final = ("if", "elif", "then", "else", "fi", "for", "while", "until", "do", "done")
_MOST_WORDS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Token:
    """A word of a command with its place; ``missing`` names what of it is not known, which stands
    in the text as it was written.
    """

    text: str
    place: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its words, and the variables that are set for it."""

    tokens: tuple[Token, ...]
    environment: Mapping[str, str]

    @property
    def place(self) -> str:
        """Where it begins."""
        return self.tokens[0].place

    @property
    def line(self) -> str:
        """The number of the line in which it begins."""
        return self.place.split(":")[-2]


def commands_of_file(path: str, values: Mapping[str, str]) -> list[Command]:
    """The commands of a script, with those of the files that it sources."""
    return _Shell(path, values).run(yamlfile.read_text(path))


def commands_of_text(
    text: str, values: Mapping[str, str], *, where: str, operators: bool = True
) -> list[Command]:
    """The commands of a text; ``where`` is what places call it. Without ``operators`` it is a list
    of arguments.
    """
    return _Shell(where, values).run(text, operators=operators)


@dataclass(slots=True)
class _Shell:
    path: str
    given: Mapping[str, str]
    values: dict[str, list[str]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    branches: list[tuple[bool | None, bool]] = field(default_factory=list)  # taken, any before
    loops: int = 0
    found: list[Command] = field(default_factory=list)

    def run(self, text: str, *, operators: bool = True) -> list[Command]:
        self.values = {name: [value] for name, value in self.given.items()}
        self._run(text, operators=operators)
        return self.found

    def _run(self, text: str, *, operators: bool = True) -> None:
        for statement in self._statements(text, operators=operators):
            words = self._past_control(statement)
            if words:
                self._command(words)

    def _statements(self, text: str, *, operators: bool = True) -> list[list[Word]]:
        try:
            return statements(text, operators=operators)
        except UnclosedError as unclosed:
            where = f"{self.path}:{unclosed.line}:{unclosed.column}"
            raise InputError(
                Problem(where=where, message="a quote begins here and does not end")
            ) from None

    def _past_control(self, statement: list[Word]) -> list[Word]:
        """The words behind ``then``, ``else`` and such; conditions are judged on the way."""
        words = list(statement)
        while words and words[0].literal in _CONTROL:
            control = words.pop(0).literal
            if control in ("if", "elif"):
                self._branch(control, self._holds(words))
                return []
            if control in ("for", "while", "until"):
                self.loops += 1
                return []
            if control == "done":
                self.loops = max(0, self.loops - 1)
            elif control == "fi" and self.branches:
                self.branches.pop()
            elif control == "else":
                self._branch("else", condition=True)
        return words

    def _branch(self, control: str, condition: bool | None) -> None:  # noqa: FBT001
        if control == "if":
            self.branches.append((condition, condition is True))
            return
        if not self.branches:
            return
        taken, before = self.branches.pop()
        if before:
            self.branches.append((False, True))
        elif taken is None:  # an earlier condition that nobody can tell
            self.branches.append((None, False))
        else:
            self.branches.append((condition, condition is True))

    @property
    def _live(self) -> bool | None:
        """Whether the current place is reached; None where that is not known."""
        taken = [each for each, _ in self.branches]
        if False in taken:
            return False
        return None if None in taken or self.loops else True

    def _holds(self, words: list[Word]) -> bool | None:
        """What ``[ a = b ]`` and its like say; None for what is not understood."""
        texts = [text for word in words for text in self._texts(word, split=False) or [""]]
        if any(_MARK.search(text) for text in texts):
            return None
        texts = [text for text in texts if text not in ("[", "[[", "]", "]]")]
        if texts[:1] == ["!"]:
            inner = _test(texts[1:])
            return None if inner is None else not inner
        return _test(texts)

    def _command(self, words: list[Word]) -> None:
        live = self._live
        if live is False:
            return
        declares = words[0].literal in _DECLARING
        rest = words[1:] if declares else words
        rest = [w for w in rest if not (declares and (w.literal or "").startswith("-"))]
        leading: dict[str, str] = {}
        while rest and (assignment := _ASSIGNMENT.fullmatch(_shown(rest[0]))):
            name = assignment[1]
            self._assign(rest[0], name, add=bool(assignment[2]), known=live is True)
            value = self.values[name]
            leading[name] = _plain(" ".join(value))
            rest = rest[1:]
        if declares:
            self.exported |= leading
            for word in rest:
                if word.literal in self.values:
                    value = self.values[str(word.literal)]
                    self.exported[str(word.literal)] = _plain(" ".join(value))
            return
        if rest and rest[0].literal in ("source", "."):
            self._source(rest[1:])
        elif rest:
            tokens = tuple(token for word in rest for token in self._expand(word))[:_MOST_WORDS]
            if tokens:
                self.found.append(Command(tokens, {**self.exported, **leading}))

    def _source(self, words: list[Word]) -> None:
        names = [token.text for word in words[:1] for token in self._expand(word)]
        for name in names:
            path = Path(self.path).parent / name
            if path.is_file():
                outer, self.path = self.path, str(path)
                self._run(yamlfile.read_text(path))
                self.path = outer

    def _assign(self, word: Word, name: str, *, add: bool, known: bool) -> None:
        if name in self.given and not add:
            return
        if word.items is not None:
            value = [text for item in word.items for text in self._texts(item)]
        else:
            first, *others = word.parts
            start = first.text.partition("=")[2]
            parts = (*((type(first)(start),) if start else ()), *others)
            value = self._texts(Word(word.line, word.column, parts), split=False)
        if not known:
            value = [_unknown(f"{name}, which depends on a condition")]
        before = self.values.get(name, []) if add else []
        if add:
            value = before + value if word.items is not None else ["".join(before + value)]
        self.values[name] = value

    def _expand(self, word: Word) -> Iterator[Token]:
        """The words that a word becomes."""
        place = f"{self.path}:{word.line}:{word.column}"
        for text in self._texts(word):
            yield Token(_plain(text), place, tuple(_MARK.findall(text)))

    def _texts(self, word: Word, *, split: bool = True) -> list[str]:
        texts, whole = [""], bool(word.parts)
        if all((part.whole and part.quoted) or not (part.name or part.text) for part in word.parts):
            return [text for part in word.parts if part.name for text in self._value(part)]
        for part in word.parts:
            value = self._value(part)
            if not part.name or (part.quoted and not part.whole) or not split:
                texts[-1] += " ".join(value)
                whole = whole and bool(part.name) and not part.quoted
                continue
            pieces = value if part.quoted else [w for text in value for w in _split(text)]
            if pieces:
                texts[-1] += pieces[0]
                texts += pieces[1:]
        return [] if whole and texts == [""] else texts  # an empty variable is no word

    def _value(self, part: Part) -> list[str]:
        """The words that a piece stands for."""
        if not part.name:
            return [part.text]
        if part.name == "()":
            return [self._arithmetic(part.text)]
        if part.name == "$":
            return [_unknown(f"$({part.text.strip()[:40]})")]
        return self._variable(part)

    def _variable(self, part: Part) -> list[str]:
        value = self.values.get(part.name, [])
        if part.operator.endswith("+"):
            return self._default(part) if any(value) else [""]
        if any(value) or (part.name in self.values and not part.operator):
            return value if part.whole else value[:1] or [""]
        if part.operator.endswith(("-", "=")):
            return self._default(part)
        return [] if part.name in ("@", "*") else [_unknown(f"${part.name}")]

    def _default(self, part: Part) -> list[str]:
        words = (word for statement in self._statements(part.default) for word in statement)
        return [" ".join(text for word in words for text in self._texts(word))]

    def _arithmetic(self, text: str) -> str:
        unknown: list[str] = []

        def value(match: re.Match[str]) -> str:
            own = self.values.get(match[1], [""])[0]
            if not own or _MARK.search(own):
                unknown.append(own or _unknown(f"${match[1]}"))
                return "1"
            return own

        plain = re.sub(r"\$?\{?([A-Za-z_][A-Za-z0-9_]*|(?<=\$)[0-9])\}?", value, text)
        if unknown:
            return unknown[0]
        number = _calculated(plain)
        return _unknown(f"$(({text.strip()[:40]}))") if number is None else str(number)


# What is not known stands in a value between two control characters.
_MARK: Final = re.compile("\x01([^\x02]*)\x02")


def _unknown(what: str) -> str:
    return f"\x01{what}\x02"


def _plain(text: str) -> str:
    return _MARK.sub(r"\1", text)


def _split(text: str) -> list[str]:
    """The words of a text; what is not known is never cut."""
    return re.findall(r"(?:\x01[^\x02]*\x02|\S)+", text)


def _shown(word: Word) -> str:
    """A word's literal start, for telling assignments."""
    return word.start if not word.parts[0].quoted else ""


_COMPARE: Final[dict[str, Callable[[str, str], bool]]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_COMPARE_NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def _test(texts: list[str]) -> bool | None:
    match texts:
        case ["-z" | "-n" as kind, value]:
            return (value == "") is (kind == "-z")
        case [left, comparison, right] if comparison in _COMPARE:
            return _COMPARE[comparison](left, right)
        case [left, comparison, right] if comparison in _COMPARE_NUMBERS:
            if left.isdigit() and right.isdigit():
                return _COMPARE_NUMBERS[comparison](int(left), int(right))
    return None


_ARITHMETIC: Final = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _calculated(text: str) -> int | None:
    """The value of whole numbers joined by + - * / %; None for anything else."""

    def of(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return int(_ARITHMETIC[type(node.op)](of(node.left), of(node.right)))
        raise ValueError

    try:
        return of(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None
