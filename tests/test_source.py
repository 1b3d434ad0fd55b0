"""YAML 1.2 scalars, places, and what no YAML file may hold."""

from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.source import Node, Place, Problems, assignment, parse, read

SCALARS = {
    "1e-4": 1e-4,
    "1e5": 1e5,
    ".5": 0.5,
    "5.": 5.0,
    "012": 12,
    "+1": 1,
    "-3": -3,
    "0x1f": 31,
    "0o17": 15,
    "100_000": 100000,
    "1__0": "1__0",
    "2:30": "2:30",
    "no": "no",
    "on": "on",
    "y": "y",
    "true": True,
    "FALSE": False,
    "~": None,
    "null": None,
    "": None,
    "2020-01-01": "2020-01-01",
    "0-4": "0-4",
    "'1'": "1",
    "!!str 12": "12",
    "!!float 1": 1.0,
    "45m": "45m",
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    problems = Problems()
    found = parse(f"key: {text}", "f", problems).plain()["key"]
    assert found == value
    assert type(found) is type(value)
    assert not problems


FAULTS = {
    "a: 1\nb: 2\na: 3": 'f:3:1: key "a" is given twice (first in line 1)',
    "a: {b: 1, b: 1}": 'f:1:11: key "b" is given twice (first in line 1)',
    "1: x": "f:1:1: a key must be a word, found 1",
    "[a]: x": "f:1:1: a key must be a word, found a list or mapping",
    "a: .inf": "f:1:4: .inf is not a finite number",
    "a: [1e999]": "f:1:5: 1e999 is not a finite number",
    "a: -.INF": "f:1:4: -.INF is not a finite number",
    "a: .nan": "f:1:4: .nan is not a finite number",
    "a: !!int x": "f:1:4: 'x' is no int",
    "a: !env x": "f:1:4: tag !env means nothing here",
    "a: !!set {x}": "f:1:4: tag !!set means nothing here",
    "a: !!binary aGk=": "f:1:4: tag !!binary means nothing here",
}


@pytest.mark.parametrize(("text", "message"), FAULTS.items())
def test_faults_that_leave_the_rest_readable(text: str, message: str) -> None:
    problems = Problems()
    parse(text, "f", problems)
    with pytest.raises(UserError) as caught:
        problems.raise_any()
    assert str(caught.value) == message


BROKEN = {
    "a: [1": "f:1:6: not YAML: ",
    "a: b: c": "f:1:5: not YAML: mapping values are not allowed here",
    "a: 1\n\tb: 2": "f:2:1: not YAML: ",
    "a: *x": "f:1:4: not YAML: found undefined alias 'x'",
    "a: 1\n---\nb: 2": "f:2:1: not YAML: ",
    "a: &x [*x]": "f:1:4: this value contains itself",
    "a: 1\nb: \x07": "f:2:4: character that YAML forbids: ",
}


@pytest.mark.parametrize(("text", "message"), BROKEN.items())
def test_text_that_is_no_yaml(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, "f", Problems())
    assert str(caught.value).startswith(message)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read(tmp_path / "none.yaml", Problems())
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(UserError, match=r"latin\.yaml:2:4: not UTF-8"):
        read(path, Problems())


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: {c: x}\r\n")
    node = read(path, Problems())
    assert node.plain() == {"a": 1, "b": {"c": "x"}}
    found = node.find("b.c")
    assert found is not None
    assert (found.at.line, found.at.column) == (2, 8)


def test_values_know_where_they_and_their_keys_were_written() -> None:
    node = parse("a:\n  b: [10, {c: 3}]\n", "f", Problems())
    found = node.find("a.b.1.c")
    assert found == Node(3, Place("f", 2, 15), Place("f", 2, 12))
    assert node.find("a.b.2") is None
    assert node.find("a.x.y") is None
    assert str(node.nearest("a.x.y").at) == "f:2:3"


def test_anchors_serve_twice() -> None:
    assert parse("a: &x {k: 1}\nb: *x", "f", Problems()).plain() == {"a": {"k": 1}, "b": {"k": 1}}


def test_merge_keeps_what_is_not_overridden() -> None:
    base = parse("a: {b: 1, c: [1, 2]}\nd: 3", "base", Problems())
    over = parse("a: {c: [9]}\ne: 4", "over", Problems())
    merged = base.merge(over)
    assert merged.plain() == {"a": {"b": 1, "c": [9]}, "d": 3, "e": 4}
    assert [node.at.file for _, node in merged.leaves()] == ["base", "over", "base", "over"]


def test_assignment_reads_its_value_as_yaml() -> None:
    path, node = assignment("train.betas=[0.9, 1e-1]", Problems())
    assert (path, node.plain()) == ("train.betas", [0.9, 0.1])
    assert str(node.at) == 'override "train.betas=[0.9, 1e-1]"'
    for text in ("train.lr", "=3", ""):
        with pytest.raises(UserError, match="write key=value"):
            assignment(text, Problems())
