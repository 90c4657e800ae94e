"""YAML with positions: scalars, duplicate keys, environment, syntax errors."""

from __future__ import annotations

import math

import pytest

from asyncrl_cli.spec.problems import Location, Problem
from asyncrl_cli.spec.yaml_nodes import YamlNode, read_yaml


def read(text: str) -> tuple[YamlNode | None, list[Problem]]:
    problems: list[Problem] = []
    return read_yaml(text, Location("s.yaml", 1, 1), problems), problems


def plain(text: str) -> object:
    node, problems = read(text)
    assert node is not None and not problems
    return node.plain()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("3.0e-4", 3e-4),
        (".5", 0.5),
        ("-2.", -2.0),
        ("100_000", 100_000),
        ("007", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("-3", -3),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("~", None),
        ("", None),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("<<", "<<"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = plain(f"x: {text}")
    assert found == {"x": value}
    assert isinstance(found, dict) and type(found["x"]) is type(value)


def test_locations_of_keys_and_values() -> None:
    node, _ = read("a:\n  bc: 1\n  d: [7, 8]\n")
    assert node is not None
    assert node.location_of("a.bc") == Location("s.yaml", 2, 7)
    assert node.location_of("a.bc", key=True) == Location("s.yaml", 2, 3)
    assert node.location_of("a.d.1") == Location("s.yaml", 3, 10)
    assert node.location_of("a.nowhere.deeper") == Location("s.yaml", 1, 1)


@pytest.mark.parametrize(
    ("text", "path", "line", "column", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "a", 3, 1, "duplicate key, first at s.yaml:1:1"),
        ("a: {1: x}\n", "a", 1, 5, "keys must be text"),
        ("a: {[1]: x}\n", "a", 1, 5, "keys must be text"),
        ('a: "\\ud800"\n', "a", 1, 4, "half of a surrogate pair"),
        ('"\\udc00": 1\n', "", 1, 1, "half of a surrogate pair"),
        (f"a: {2**63}\n", "a", 1, 4, "does not fit into 64 bits"),
        (f"a: 0x1{'0' * 16}\n", "a", 1, 4, "does not fit into 64 bits"),
        ("a: {{x}}\n", "a", 1, 5, "keys must be text"),
        ("a: 1\nb: \x07\n", "", 2, 4, "U+0007"),
        ("a: &x [*x]\n", "a.0", 1, 4, "contains itself"),
        ("a: !mine 3\n", "a", 1, 4, "tag `!mine`"),
        ("a: !!int five\n", "a", 1, 4, "cannot be read as int"),
        ("a: ${env:NO_SUCH_THING}\n", "a", 1, 4, "NO_SUCH_THING is not set"),
        ("a: ${env:}\n", "a", 1, 4, "unfinished variable"),
    ],
)
def test_mistakes_have_a_location(text: str, path: str, line: int, column: int, words: str) -> None:
    _, problems = read(text)
    assert [(p.path, p.line, p.column) for p in problems] == [(path, line, column)]
    assert words in problems[0].message


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        (
            'name: "x\nseed: 1\n',
            3,
            1,
            "while scanning a quoted scalar that begins in line 1: found unexpected end of stream",
        ),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, 2, "while parsing a flow sequence that begins in line 2: expected ',' or ']'"),
        ("a: b: c\n", 1, 5, ": mapping values are not allowed here"),
        ("a:\n\tb: 1\n", 2, 1, "while scanning for the next token: found character '\\t'"),
        ("a: @x\n", 1, 4, "while scanning for the next token: found character '@'"),
        ("a: 1\n---\nb: 2\n", 2, 1, "expected a single document in the stream"),
    ],
)
def test_yaml_mistakes_have_pyyamls_message_with_location_and_hint(
    text: str, line: int, column: int, message: str
) -> None:
    _, problems = read(text)
    assert [(p.path, p.line, p.column) for p in problems] == [("", line, column)]
    assert problems[0].message.startswith("not valid YAML") and message in problems[0].message
    assert "write `key: value`, indent with spaces" in problems[0].hint


def test_aliases_are_not_written_out_without_limit() -> None:
    bomb = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    for above, name in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{above}'] * 10)}]\n"
    _, problems = read(bomb)
    assert len(problems) == 1 and "more than 10,000 values" in problems[0].message and problems[0].line == 1
    nested = f"a: &a {'[' * 40}1{']' * 40}\nb: {'[' * 40}*a{']' * 40}\n"
    _, problems = read(nested)
    assert len(problems) == 1 and "nested too deeply" in problems[0].message


def test_escaped_surrogate_pairs_are_one_character() -> None:
    assert plain('a: "\\ud83d\\ude00"\n') == {"a": "\U0001f600"}


def test_long_runs_of_dollars_and_variables_are_read_fast() -> None:
    assert plain(f"a: {'$' * 100_000}") == {"a": "$" * 100_000}
    _, problems = read(f"a: '{'${env:A:-' * 10_000}'")
    assert "unfinished variable" in problems[0].message


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "1e-3")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("GONE", raising=False)
    text = "a: ${env:RATE}\nb: x-${env:RATE}\nc: ${env:GONE:-7}\nd: ${env:EMPTY}\ne: '${env:GONE:-}'\nf: $${env:RATE}"
    assert plain(text) == {"a": 1e-3, "b": "x-1e-3", "c": 7, "d": None, "e": None, "f": "${env:RATE}"}


def test_a_change_to_none_removes_an_entry_from_a_list_too() -> None:
    root, _ = read("stages: [{size: 1, name: }, null, 3]\nname:")
    assert root is not None
    assert root.changed(["stages", "*"], lambda node: None if node.value is None else node).plain() == {
        "stages": [{"size": 1, "name": None}, 3],
        "name": None,
    }
    assert root.changed(["*", "*", "name"], lambda _: None).plain()["stages"] == [{"size": 1}, None, 3]
