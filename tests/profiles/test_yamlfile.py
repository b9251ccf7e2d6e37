from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import yamlfile
from profiles.errors import InputError


def found(path: str) -> None:
    """Read, and raise what the reading noted as well."""
    yamlfile.read(path).raise_problems()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3\n", "file.yaml:3:1: the key 'a' stands twice, first in line 1"),
        ("a: {b: 1, b: 2}\n", "file.yaml:1:11: the key 'b' stands twice, first in line 1"),
        ("a: .nan\n", "file.yaml:1:4: '.nan' is not a finite number; expected a finite number"),
        ("a: -.inf\n", "file.yaml:1:4: '-.inf' is not a finite number; expected a finite number"),
        (
            "a: 1.0e+999\n",
            "file.yaml:1:4: '1.0e+999' is not a finite number; expected a finite number",
        ),
        (
            "a: " + "9" * 5000,
            "file.yaml:1:4: a number of 5000 digits; expected a number of sensible size",
        ),
        ("", "file.yaml:1:1: the file is empty; expected a mapping of keys to values"),
        (
            "# only this\n",
            "file.yaml:1:1: the file is empty; expected a mapping of keys to values",
        ),
        (
            "- 1\n- 2\n",
            "file.yaml:1:1: the file holds a list; expected a mapping of keys to values at the top",
        ),
        (
            "hello\n",
            (
                "file.yaml:1:1: the file holds 'hello'; "
                "expected a mapping of keys to values at the top"
            ),
        ),
        (
            "a: 1\n---\na: 2\n",
            "file.yaml:2:1: a second document starts here; expected one document a file",
        ),
        ("a: &x 1\nb: 2\n", "file.yaml:1:4: the anchor &x; expected the value written out"),
        (
            "a: !!python/object:os.system 1\n",
            (
                "file.yaml:1:4: the tag tag:yaml.org,2002:python/object:os.system; "
                "expected plain text, numbers, lists and mappings"
            ),
        ),
        ("? [1, 2]\n: 3\n", "file.yaml:1:3: a key that is not text; expected a name"),
        (b"a: 1\nb: \xff\xfe\n", "file.yaml:2:4: byte 0xff is not UTF-8; expected text in UTF-8"),
        (b"a: 1\nb: x\x00y\n", "file.yaml:2:5: a control character; expected plain text"),
        ("[" * 50 + "]" * 50, "file.yaml:1:42: nested too deep; expected at most 40 levels"),
    ],
)
def test_what_yaml_would_let_pass_is_told_with_its_place(problems, text, told):
    assert problems(found, text) == [told]


def test_a_syntax_error_is_told_at_its_mark(problems):
    (told,) = problems(found, "a: [1, 2\nb: 3\n")
    assert told.startswith("file.yaml:2:2: not valid YAML: ")


def test_no_depth_of_nesting_overflows_the_stack(problems):
    assert "nest" in problems(found, "[" * 100_000)[0]


def test_aliases_are_refused_before_they_can_explode(problems):
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    told = problems(found, bomb)
    assert told[-1] == "file.yaml:2:8: the alias *a; expected the value written out"


def test_a_huge_file_is_refused_unread(problems):
    (told,) = problems(found, b"a" * (yamlfile.MAX_BYTES + 1))
    assert told == "file.yaml: is larger than 10 MB; expected a small text file"


def test_too_many_values_are_refused(problems):
    (told,) = problems(found, "a: [" + "1," * (yamlfile.MAX_VALUES + 1) + "]")
    assert "more than 200000 values" in told


@pytest.mark.parametrize("name", [".", "missing.yaml", "x" * 5000, "nul\0"])
def test_a_path_that_cannot_be_read_is_the_users_mistake(tmp_path, name):
    with pytest.raises(InputError, match="cannot be read"):
        yamlfile.read(f"{tmp_path}/{name}")


def test_all_problems_of_a_file_are_told_in_its_order(problems):
    told = problems(found, "a: .inf\na: 1\nb: !x y\n")
    assert [line.split(": ")[0] for line in told] == [
        "file.yaml:1:4",
        "file.yaml:2:1",
        "file.yaml:3:4",
    ]


def test_scalars_are_read_as_yaml_reads_them(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("[]: 0\n".replace("[]", "a") + "b: -1_000\nc: 1.5e+3\nd: 1e9\ne: on\nf: ~\n")
    assert yamlfile.read(path).data == {
        "a": 0,
        "b": -1000,
        "c": 1500.0,
        "d": "1e9",
        "e": True,
        "f": None,
    }


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert yamlfile.read(path).data == {"a": 1}


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        yamlfile.parse(text, "any")
    except InputError as error:
        assert all(problem.where.startswith("any") for problem in error.problems)  # noqa: PT017 - it may be fine, too
