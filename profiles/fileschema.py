"""What all file schemas share, and pydantic's findings in the user's words and places."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import Problem
from profiles.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from profiles.yamlfile import Document, Mark, Place

__all__ = ["FileSchema", "Name", "Sources", "Version", "problem_at", "validate"]


class FileSchema(BaseModel):
    """Base of every mapping in a file: no coercion, no unknown keys, no changes."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True
    )


_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._/\[\]-]*$"
Name = Annotated[str, Field(pattern=_NAME, min_length=1, max_length=100)]
Sources = Annotated[
    dict[str, str],
    Field(description="Where each number comes from, with its date, by the number's key."),
]
Version = Annotated[
    int,
    Field(
        ge=1,
        le=1,
        description="Version of this file format: 1.",
        json_schema_extra={"hint": "a newer parplan wrote this file"},
    ),
]
Schema = TypeVar("Schema", bound=FileSchema)


def validate(document: Document, schema: type[Schema]) -> Schema:
    """The document as a value of ``schema``. Raises ``InputError`` with every problem."""
    problems: list[tuple[Mark, Problem]] = []
    checked = None
    try:
        checked = schema.model_validate(document.data)
    except ValidationError as error:
        problems = [_translated(document, schema, dict(each)) for each in error.errors()]
    document.raise_problems(problems)
    assert checked is not None
    return checked


def problem_at(
    document: Document,
    place: Place,
    message: str,
    *,
    expected: str = "",
    hint: str = "",
    key: bool = False,
) -> tuple[Mark, Problem]:
    """A problem of what stands at ``place``, or of its ``key``, ready for
    ``Document.raise_problems``.
    """
    where, mark = document.where(place, key=key), document.mark(place, key=key)
    return mark, Problem(where=where, message=message, expected=expected, hint=hint)


_MESSAGES: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of sensible size",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "some text",
    "string_too_long": "shorter text",
    "string_pattern_mismatch": "a name of letters, digits, dots and dashes",
    "bool_type": "true or false",
    "list_type": "a list",
    "too_short": "a list with at least one entry",
    "too_long": "a shorter list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "union_tag_not_found": "a mapping with a kind",
}
_BOUNDS: Final = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _translated(
    document: Document, schema: type[FileSchema], error: dict[str, Any]
) -> tuple[Mark, Problem]:
    """One finding of pydantic: where it stands, what was got, what was expected."""
    place, rest = _resolved(document.data, error["loc"])
    owners = _owners(schema, error["loc"][:-1])
    last = str(error["loc"][-1]) if error["loc"] else ""
    kind = error["type"]
    if kind == "missing" or (kind == "union_tag_not_found" and isinstance(error["input"], dict)):
        key = last if kind == "missing" else "kind"
        known = document.data if not place else error["input"]
        hint = nearest(key, known) if isinstance(known, dict) else ""
        where = document.flags.get(key) or document.where(place, key=True)
        problem = Problem(
            where=where,
            message=f"{dotted((*place, key))} is missing",
            expected=_described(owners, key),
            hint=hint.replace("did you mean", "is it").replace("?", ", misspelt?"),
        )
        return document.mark(place, key=True), problem
    if kind == "extra_forbidden":
        valid = sorted({name for owner in owners for name in owner.model_fields})
        message, expected = f"unknown key {dotted(place)}", "one of " + ", ".join(valid)
        hint = nearest(last, valid)
        return problem_at(document, place, message, expected=expected, hint=hint, key=True)
    if kind == "union_tag_invalid" and not rest:
        place = (*place, "kind")
    return document.mark(place), _wrong_value(document, place, owners, error)


def _wrong_value(
    document: Document, place: Place, owners: list[type[BaseModel]], error: dict[str, Any]
) -> Problem:
    kind, context = error["type"], error.get("ctx", {})
    value = _at(document.data, place)
    hint = ""
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        expected = f"{words} {context[key]:,}".removesuffix(".0")
        hint = _hinted(owners, place) if key in ("lt", "le") else ""
    elif kind in ("literal_error", "enum"):
        expected = str(context["expected"]).replace("'", "")
        hint = nearest(str(value), re.split(r", | or ", expected))
    elif kind == "union_tag_invalid":
        expected = "one of " + str(context["expected_tags"]).replace("'", "")
        hint = nearest(str(context["tag"]), str(context["expected_tags"]).split("'")[1::2])
    elif kind == "too_short" and context["min_length"] > 1:
        expected = f"a list with at least {context['min_length']} entries"
    elif kind == "value_error":
        expected = str(context["error"])
    elif kind == "string_pattern_mismatch" and context["pattern"] != _NAME:
        expected = _described(owners, str(error["loc"][-1]))
    else:
        expected = _MESSAGES.get(kind, error["msg"])
    is_key = error["loc"][-1:] == ("[key]",)
    return Problem(
        where=document.where(place, key=is_key),
        message=(
            f"the key {dotted(place)}"
            if is_key
            else f"{dotted(place)} is {document.got(place, value)}"
        ),
        expected=expected,
        hint=hint or _misread(document, place, value, kind),
    )


def _misread(document: Document, place: Place, value: object, kind: str) -> str:
    """How a value of the wrong type was probably meant."""
    mark = document.values.get(place)
    text = mark.text if mark else ""
    if isinstance(value, bool):
        return f"YAML reads {text} as {str(value).lower()}: quote it" if text else ""
    if kind == "string_type" and isinstance(value, int | float):
        return f'quote it: "{text}"'
    if not isinstance(value, str) or kind not in ("int_type", "float_type"):
        return ""
    return next((hint(value) for form, hint in _NUMBER_LIKE if form.fullmatch(value)), "")


def _written_out(text: str) -> str:
    """YAML's way to write a number like 1e9, which it reads as text."""
    mantissa, _, exponent = text.lower().partition("e")
    try:
        power, number = int(exponent), float(text)
    except ValueError:
        return ""
    if "." not in mantissa:
        mantissa += ".0"
    plain = f" or {int(number)}" if 1 <= number < _READABLE and number == int(number) else ""
    return f"YAML reads {text} as text: write {mantissa}e{power:+d}{plain}"


_READABLE: Final = 10**16
_NUMBER_LIKE: Final[list[tuple[re.Pattern[str], Callable[[str], str]]]] = [
    (re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]{1,3}"), _written_out),
    (
        re.compile(r"[0-9]{1,3}([,' ][0-9]{3})+"),
        lambda text: "digits only: " + re.sub(r"[^0-9]", "", text),
    ),
    (re.compile(r"[0-9.]+ ?[A-Za-z/]+"), lambda _: "the number only: the key says the unit"),
    (re.compile(r"[-+]?[1-9][0-9]*(\.[0-9]+)?"), lambda _: "without quotes"),
    (re.compile(r"[-+]?0[0-9xo][0-9A-Fa-f]*"), lambda _: "a decimal number without leading zeros"),
]


def dotted(place: Place) -> str:
    """A place as people write it: ``nodes[0].count``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".") or "the file"


def _resolved(data: object, loc: tuple[str | int, ...]) -> tuple[Place, tuple[str | int, ...]]:
    """Pydantic's location without its union tags, and what of its end is not in the data."""
    place: list[str | int] = []
    skipped: list[str | int] = []
    for part in loc:
        found = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if found:
            place.append(part)
            data = data[part]  # type: ignore[index]
            skipped = []
        else:
            skipped.append(part)
    return tuple(place), tuple(skipped)


def _at(data: Any, place: Place) -> Any:
    for part in place:
        data = data[part]
    return data


def _owners(schema: type[FileSchema], loc: tuple[str | int, ...]) -> list[type[BaseModel]]:
    """The schema classes that may own the mapping at ``loc``."""
    owners: list[type[BaseModel]] = [schema]
    for part in loc:
        inner = [
            found
            for owner in owners
            if part in owner.model_fields
            for found in _schemas_in(owner.model_fields[str(part)].annotation)
        ]
        tagged = [owner for owner in owners if _tag(owner) == part]
        owners = inner or tagged or owners
    return owners


def _schemas_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _schemas_in(argument)]


def _tag(owner: type[BaseModel]) -> str:
    """What stands for ``owner`` in pydantic's locations: its kind, or else its name."""
    kind = owner.model_fields.get("kind")
    values = get_args(kind.annotation) if kind else ()
    return str(values[0]) if values else owner.__name__


def _described(owners: list[type[BaseModel]], key: str) -> str:
    described = [o.model_fields[key].description for o in owners if key in o.model_fields]
    text = next((each for each in described if each), "")
    for owner in owners:
        if key == "kind" and not text and key in owner.model_fields:
            return " or ".join(map(str, get_args(owner.model_fields[key].annotation)))
    return text[:1].lower() + text[1:].rstrip(".") if text else ""


def _hinted(owners: list[type[BaseModel]], place: Place) -> str:
    key = str(place[-1]) if place else ""
    for owner in owners:
        extra = owner.model_fields[key].json_schema_extra if key in owner.model_fields else None
        if isinstance(extra, dict) and "hint" in extra:
            return str(extra["hint"])
    return ""
