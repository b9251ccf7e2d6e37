"""Arguments and scripts of launchers -> what they were told.

A script may run several things; the launch line is the command with arguments of the launcher's
table. The words before them say how many processes start.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executor.launchers.script import Command, Token, commands_of_file, commands_of_text
from executor.launchers.told import Kind, Told, by_fact, by_name, read_value
from profiles import yamlfile
from profiles.errors import InputError, Problem
from profiles.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from executor.launchers.told import Key

__all__ = ["Source", "launch_line", "read_flags", "world_size"]

ENOUGH: Final = 2  # arguments of the table, for a command to be a launch line
_PROCESSES: Final = ("--nproc_per_node", "--nproc-per-node", "--ntasks-per-node", "--num_gpus")
_NODES: Final = ("--nnodes", "--nodes", "-N", "--num_nodes")
_FILE: Final = re.compile(r"[^\s-]\S*\.\w+")  # meant as a path
_SBATCH: Final = re.compile(r"^#SBATCH\s+(--?[\w-]+)[= ]\s*(\d+)", re.MULTILINE)


class Source:
    """What the user gave: a file, or text as typed; with values for variables, and which line."""

    def __init__(
        self, given: str, *, values: Mapping[str, str] | None = None, line: int | None = None
    ) -> None:
        """``given`` is a path where such a file exists."""
        self.given, self.values, self.line = given, dict(values or {}), line
        self.is_file = _is_file(given)
        self.where = given if self.is_file else "arguments"

    @property
    def text(self) -> str:
        """The text, of the file or as typed."""
        return yamlfile.read_text(self.given) if self.is_file else self.given

    def commands(self) -> list[Command]:
        """The commands of a script, or the typed arguments as one."""
        text = self.text
        if not self.is_file and _FILE.fullmatch(text):
            message = f"there is no file {text[:80]!r}"
            expected = "the path of a file, or arguments"
            raise InputError(Problem(where=self.where, message=message, expected=expected))
        if not text.strip():
            raise InputError(Problem(where=self.where, message="there is nothing to read"))
        first = next((w for w in text.split("\n") if w.strip() and not w.startswith("#")), "")
        if first.lstrip().startswith("-"):  # arguments, on as many lines as they like
            joined = re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", "\n").replace("\n", " \\\n")
            plain = joined.rstrip(" \\\n")
            return commands_of_text(plain, self.values, where=self.where, operators=False)
        if self.is_file:
            return commands_of_file(self.given, self.values)
        return commands_of_text(text, self.values, where=self.where)

    @property
    def scheduled(self) -> dict[str, int]:
        """Numbers of ``#SBATCH`` lines."""
        return {name: int(value) for name, value in _SBATCH.findall(self.text)}


def _is_file(given: str) -> bool:
    try:
        return bool(given) and Path(given).is_file()
    except (OSError, ValueError):
        return False


def launch_line(source: Source, names: Iterable[str], *, forms: str) -> Command:
    """The one command with arguments of a launcher. Raises ``InputError`` where there is none, or
    several and ``line`` picks none of them.
    """
    known = set(names)
    found: list[Command] = []
    for command in (_opened(each, known, source) for each in source.commands()):
        count = sum(_name_of(token.text) in known for token in command.tokens)
        if command.tokens[0].text in _SHOWING or any(_alike(command, each) for each in found):
            continue
        if count >= ENOUGH or (count and len(command.tokens) <= _SHORT):
            found.append(command)
    if source.line is not None:
        picked = [each for each in found if each.line == str(source.line)]
        found = picked or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise InputError(Problem(where=source.where, message="no launch line", expected=forms))
    lines = ", ".join(each.line for each in found)
    raise InputError(
        Problem(
            where=found[1].place,
            message=f"{len(found)} launch lines, in lines {lines}",
            expected="one",
            hint=f"--line {found[0].line} picks the first",
        )
    )


_SHORT: Final = 3
_SHOWING: Final = ("echo", "printf", "set", "cat")  # commands that start nothing


def _alike(left: Command, right: Command) -> bool:
    """Whether two commands pass the same words, as ``run=...; $run`` and ``eval $run`` do."""
    ours, theirs = (
        [token.text for token in each.tokens if token.text != "eval"] for each in (left, right)
    )
    return ours == theirs


def _name_of(text: str) -> str:
    return text.partition("=")[0]


def _opened(command: Command, known: set[str], source: Source) -> Command:
    """The command with its text arguments opened, where one holds the launch line itself:
    ``srun bash -c "python train.py --bf16"``.
    """
    tokens: list[Token] = []
    variables = {**command.environment, **source.values}
    for token in command.tokens:
        inner: list[Token] = []
        if " " in token.text.strip():
            for nested in commands_of_text(token.text, variables, where=token.place):
                inner += [Token(each.text, token.place, each.missing) for each in nested.tokens]
        if sum(_name_of(each.text) in known for each in inner) >= ENOUGH:
            tokens += inner
        else:
            tokens.append(token)
    return Command(tuple(tokens), command.environment)


def world_size(command: Command, source: Source) -> int | None:
    """How many processes a launch line starts; None where it does not say."""
    scheduled = source.scheduled
    words = [token.text for token in command.tokens]
    if any(token.missing for token in command.tokens[:_LAUNCHER_WORDS]):
        words = [token.text for token in command.tokens if not token.missing]
    per_node = _number_of(words, _PROCESSES) or next(
        (scheduled[n] for n in ("--gpus-per-node", "--ntasks-per-node") if n in scheduled), None
    )
    nodes = _number_of(words, _NODES) or next(
        (scheduled[name] for name in ("--nodes", "-N") if name in scheduled), None
    )
    if per_node is None:
        return None
    if nodes is None:
        nodes = None if any(_name_of(word) in _NODES for word in words) else 1
    return None if nodes is None else nodes * per_node


_LAUNCHER_WORDS: Final = 40


def _number_of(words: Sequence[str], names: tuple[str, ...]) -> int | None:
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else (words[position + 1] if position + 1 < len(words) else "")
            if text.isascii() and text.isdigit():
                return int(text)
    return None


def read_flags(
    launcher: str,
    keys: Sequence[Key],
    command: Command,
    *,
    num_gpus: int,
    no_bearing: Callable[[str], object],
    unmodelled: Callable[[str], object],
    known: Iterable[str] = (),
) -> Told:
    """The facts behind the flags of a command. Raises ``InputError`` with every value that is not
    of its kind, and every variable that is not set and matters.
    """
    names = by_name(keys)
    told = Told(launcher=launcher, keys=by_fact(keys), num_gpus=num_gpus)
    told.environment |= command.environment
    problems: list[Problem] = []
    for flag, values in _flags(command.tokens, names, told):
        name = _name_of(flag.text)
        key = names.get(name)
        if key is not None:
            _take(told, key, flag, values, problems)
        elif unmodelled(name):
            told.unmodelled.append(" ".join([name, *(value.text for value in values)]))
        elif not no_bearing(name):
            hint = nearest(name, [*names, *known])
            told.unknown.append(f"{flag.place}: {name}{f' ({hint})' if hint else ''}")
    if problems:
        raise InputError(problems)
    return told


def _flags(
    tokens: Sequence[Token], names: Mapping[str, Key], told: Told
) -> list[tuple[Token, list[Token]]]:
    """Each flag with the words behind it. What stands before the first flag of the launcher is its
    own launch; a variable that is not set and stands alone could hold anything.
    """
    start = next(
        (n for n, token in enumerate(tokens) if _name_of(token.text) in names), len(tokens)
    )
    script = max((n + 1 for n in range(start) if tokens[n].text.endswith(".py")), default=start)
    found: list[tuple[Token, list[Token]]] = []
    for token in tokens[min(start, script) :]:
        if token.text.startswith("--") and len(token.text) > len("--"):
            name, equals, value = token.text.partition("=")
            inline = [Token(value, token.place, token.missing)] if equals else []
            flag = Token(name, token.place, () if equals else token.missing)
            found.append((flag, inline))
        elif token.missing and token.text in token.missing and not _wants(found, names):
            told.notes.append(f"{token.place}: {token.text} is not set; what it holds is not read")
        elif found:
            found[-1][1].append(token)
    return found


def _wants(found: list[tuple[Token, list[Token]]], names: Mapping[str, Key]) -> bool:
    """Whether the last flag still waits for its value."""
    if not found:
        return False
    flag, values = found[-1]
    key = names.get(flag.text)
    return not values and (key is None or key.kind not in (Kind.SWITCH, Kind.OFF))


def _take(told: Told, key: Key, flag: Token, values: list[Token], problems: list[Problem]) -> None:
    missing = [name for value in values for name in value.missing]
    if missing and key.free:
        return
    if missing:
        name = missing[0].removeprefix("$")
        hint = f"--set {name}=VALUE" if name.isidentifier() or name.isdigit() else ""
        message = f"{key.name} needs {missing[0]}, which is not set"
        problems.append(Problem(where=values[0].place, message=message, hint=hint))
        return
    value: Any = read_value(key, [each.text for each in values])
    if isinstance(value, Problem):
        where = values[0].place if values else flag.place
        hint = nearest(values[0].text, key.choices) if values and key.choices else ""
        problems.append(
            Problem(where=where, message=value.message, expected=value.expected, hint=hint)
        )
        return
    told.given[key.fact] = value
    told.places[key.fact] = flag.place
