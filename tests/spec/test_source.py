"""YAML with positions: scalars, duplicate keys, environment, syntax errors."""

from __future__ import annotations

import math

import pytest

from asyncrl_cli.spec.problems import Place, Problem
from asyncrl_cli.spec.source import Node, read_yaml


def read(text: str) -> tuple[Node | None, list[Problem]]:
    problems: list[Problem] = []
    return read_yaml(text, Place("s.yaml", 1, 1), problems), problems


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


def test_places_of_keys_and_values() -> None:
    node, _ = read("a:\n  bc: 1\n  d: [7, 8]\n")
    assert node is not None
    assert node.place_of("a.bc") == Place("s.yaml", 2, 7)
    assert node.place_of("a.bc", key=True) == Place("s.yaml", 2, 3)
    assert node.place_of("a.d.1") == Place("s.yaml", 3, 10)
    assert node.place_of("a.nowhere.deeper") == Place("s.yaml", 1, 1)


@pytest.mark.parametrize(
    ("text", "path", "line", "column", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "a", 3, 1, "written twice, first at s.yaml:1:1"),
        ("a: {1: x}\n", "a", 1, 5, "keys must be text"),
        ("a: {[1]: x}\n", "a", 1, 5, "keys must be text"),
        ("a: b: c\n", "", 1, 5, "not valid YAML"),
        ("a:\n\tb: 1\n", "", 2, 1, "not valid YAML"),
        ("a: 1\nb: \x07\n", "", 2, 4, "U+0007"),
        ("a: &x [*x]\n", "a.0", 1, 4, "contains itself"),
        ("a: !mine 3\n", "a", 1, 4, "tag `!mine`"),
        ("a: !!int five\n", "a", 1, 4, "cannot be read as int"),
        ("<<: 3\n", "", 1, 5, "`<<` takes a mapping"),
        ("a: ${env:NO_SUCH_THING}\n", "a", 1, 4, "NO_SUCH_THING is not set"),
        ("a: ${env:}\n", "a", 1, 4, "not finished"),
        ("a: 1\n---\nb: 2\n", "", 2, 1, "not valid YAML"),
    ],
)
def test_mistakes_have_a_place(text: str, path: str, line: int, column: int, words: str) -> None:
    _, problems = read(text)
    assert [(p.path, p.line, p.column) for p in problems] == [(path, line, column)]
    assert words in problems[0].message


def test_flow_mappings_explain_unquoted_variables() -> None:
    _, problems = read("a: {b: ${env:HOME}}")
    assert "needs quotes" in problems[0].mend


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "1e-3")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("GONE", raising=False)
    text = "a: ${env:RATE}\nb: x-${env:RATE}\nc: ${env:GONE:-7}\nd: ${env:EMPTY}\ne: '${env:GONE:-}'\nf: $${env:RATE}"
    assert plain(text) == {"a": 1e-3, "b": "x-1e-3", "c": 7, "d": None, "e": None, "f": "${env:RATE}"}


def test_merge_keys() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc:\n  <<: [*a, *b]\n  y: 3\n"
    assert plain(text) == {"a": {"x": 1, "y": 1}, "b": {"x": 2, "z": 2}, "c": {"x": 1, "y": 3, "z": 2}}
