"""Configuration files of launchers as one flat table: read from JSON, YAML and TOML, and written.

``zero_optimization: {stage: 2}`` is the key ``zero_optimization.stage``. Places are those of the
file where its parser says them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executor.launchers.told import Kind, Told, by_fact, by_name, read_value
from profiles import jsonfile, yamlfile
from profiles.errors import InputError, Problem
from profiles.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from executor.launchers.commandline import Source
    from executor.launchers.told import Key
    from profiles.yamlfile import Document, Place

__all__ = ["nested", "read_document", "read_mapping"]

_MOST_KEYS: Final = 5_000
AUTO: Final = "auto"  # what Hugging Face fills in from the training script


def nested(keys: Iterable[Key], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The file of a table: each key that has a fact, inside the mappings that its name says."""
    config: dict[str, Any] = {}
    for key in keys:
        if key.fact in facts:
            inner = config
            *path, last = key.name.split(".")
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = facts[key.fact]
    return config


def read_document(source: Source) -> Document:
    """The mapping of a file, or of JSON or YAML as typed."""
    if not source.is_file:
        document = yamlfile.parse(source.text, source.where)
        if not isinstance(document.data, dict):
            message = f"there is no file {source.given[:80]!r}"
            expected = "the path of a file, or its text"
            raise InputError(Problem(where=source.where, message=message, expected=expected))
        return document
    suffix = Path(source.given).suffix.lower()
    if suffix == ".json":
        return jsonfile.read(source.given)
    return _toml(source.given) if suffix == ".toml" else yamlfile.read(source.given)


def _toml(path: str) -> Document:
    text = yamlfile.read_text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(Problem(where=path, message=f"not valid TOML: {error}")) from None
    return yamlfile.Document(path=path, data=data, values=dict(_toml_marks(text)))


def _toml_marks(text: str) -> Iterator[tuple[Place, yamlfile.Mark]]:
    """Where each plain key of a TOML file stands."""
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.strip()
        if plain.startswith("[") and "]" in plain:
            section = tuple(
                part.strip().strip('"') for part in plain[1 : plain.index("]")].split(".")
            )
        elif "=" in plain and not plain.startswith("#"):
            key = plain.partition("=")[0].strip().strip('"')
            column = len(line) - len(line.lstrip()) + 1
            yield (*section, *key.split(".")), yamlfile.Mark(number, column)


def read_mapping(
    launcher: str,
    keys: Sequence[Key],
    document: Document,
    *,
    num_gpus: int,
    no_bearing: Callable[[str], object],
    unmodelled: Callable[[str], object],
) -> Told:
    """The facts of a document. Raises ``InputError`` with every value that is not of its kind."""
    names = by_name(keys)
    told = Told(launcher=launcher, keys=by_fact(keys), num_gpus=num_gpus)
    problems = [problem for _, problem in document.found]
    for count, (place, value) in enumerate(_flat(document.data, names, ())):
        name = ".".join(place)
        key = names.get(name)
        where = document.where(place)
        if count > _MOST_KEYS:
            raise InputError(Problem(where=where, message=f"more than {_MOST_KEYS} keys"))
        if key is not None:
            _take(told, key, value, where, problems)
        elif unmodelled(name):
            told.unmodelled.append(f"{name}: {value}")
        elif not no_bearing(name):
            hint = nearest(name, names)
            told.unknown.append(f"{where}: {name}{f' ({hint})' if hint else ''}")
    if problems:
        raise InputError(problems)
    return told


def _flat(data: Any, names: dict[str, Key], place: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    """Every key with its value; a mapping is opened unless the table knows it as a whole."""
    for key, value in data.items():
        own = (*place, str(key))
        if isinstance(value, dict) and value and ".".join(own) not in names:
            yield from _flat(value, names, own)
        else:
            yield own, value


def _take(told: Told, key: Key, value: Any, where: str, problems: list[Problem]) -> None:
    if value is None or value == AUTO:
        if value == AUTO:
            told.notes.append(f"{where}: {key.name} is auto: the training script says it")
            told.places[key.fact] = where
        return
    read: Any
    if key.kind is Kind.WORDS:
        read = read_value(
            key, [str(each) for each in value] if isinstance(value, list) else [str(value)]
        )
    elif isinstance(value, bool) and key.kind is not Kind.TEXT:
        read = value
        if key.kind not in (Kind.SWITCH, Kind.OFF):
            read = Problem(where=where, message=f"{key.name} is {value}", expected=key.kind.value)
    elif isinstance(value, dict | list):
        read = value if key.kind is Kind.TEXT else None
        if read is None:
            kind = "a mapping" if isinstance(value, dict) else "a list"
            read = Problem(where=where, message=f"{key.name} is {kind}", expected=key.kind.value)
    else:
        read = read_value(key, [str(value)])
    if isinstance(read, Problem):
        hint = nearest(str(value), key.choices) if key.choices else ""
        problems.append(
            Problem(where=where, message=read.message, expected=read.expected, hint=hint)
        )
        return
    told.given[key.fact] = read
    told.places[key.fact] = where
