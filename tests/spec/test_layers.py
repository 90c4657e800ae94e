"""`extends` and `--set`; `pipeline.mode` is a preset of the layer that sets it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.spec.layers import Layers, merge, override
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.problems import Location, Problem, SpecError
from asyncrl_cli.spec.yaml_nodes import YamlNode

pytestmark = pytest.mark.slow

HERE = Location("here", 1, 1)
QUICKSTART = Path(__file__).parents[2] / "specs/quickstart.yaml"


def tree(value: Any) -> YamlNode:
    if isinstance(value, dict):
        return YamlNode({key: tree(inner) for key, inner in value.items()}, HERE)
    return YamlNode([tree(inner) for inner in value] if isinstance(value, list) else value, HERE)


def layers(path: Path) -> tuple[YamlNode | None, list[Problem]]:
    problems: list[Problem] = []
    return Layers(problems).read(str(path)), problems


def test_extends_merges_mappings_and_replaces_the_rest(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: [1, 2]}\nb: 1\n")
    (tmp_path / "sub/middle.yaml").write_text("extends: ../base.yaml\na: {y: [3]}\n")
    (tmp_path / "other.yaml").write_text("b: 2\nc: {d: 1}\n")
    (tmp_path / "top.yaml").write_text("extends: [sub/middle.yaml, other.yaml]\nc: null\n")
    root, problems = layers(tmp_path / "top.yaml")
    assert root is not None and not problems
    assert root.plain() == {"a": {"x": 1, "y": [3]}, "b": 2, "c": None}
    assert root.location_of("a.x") == Location(str(tmp_path / "base.yaml"), 1, 8)
    assert root.location_of("a.y") == Location(str(tmp_path / "sub/middle.yaml"), 2, 8)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nextends: gone.yaml\n", 2, "does not exist"),
        ("extends: s.yaml\n", 1, "extends itself: s.yaml → s.yaml"),
        ("extends: [.]\n", 1, "is not a file"),
        ("extends: {a: 1}\n", 1, "must be the path of a spec"),
        ("extends: [3]\n", 1, "must be the path of a spec"),
    ],
)
def test_mistakes_in_extends_are_reported(tmp_path: Path, text: str, line: int, words: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    _, problems = layers(tmp_path / "s.yaml")
    assert [(p.path, p.line) for p in problems] == [("extends", line)]
    assert words in problems[0].message


def test_long_cycles_are_shown(tmp_path: Path) -> None:
    for name, target in (("a", "b"), ("b", "c"), ("c", "b")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {target}.yaml\n")
    _, problems = layers(tmp_path / "a.yaml")
    assert "b.yaml → c.yaml → b.yaml" in problems[0].message
    assert problems[0].file.endswith("c.yaml")


def test_a_file_that_is_named_often_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "f0.yaml").write_text("a: {b: 1}\n")
    for number in range(1, 20):
        (tmp_path / f"f{number}.yaml").write_text(f"extends: [f{number - 1}.yaml, f{number - 1}.yaml]\n")
    problems: list[Problem] = []
    reader = Layers(problems)
    root = reader.read(str(tmp_path / "f19.yaml"))
    assert root is not None and not problems and root.plain() == {"a": {"b": 1}}
    assert len(reader.files) == 20


def test_more_files_than_a_spec_may_have(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"f{number}.yaml").write_text(f"extends: f{number + 1}.yaml\n")
    (tmp_path / "many.yaml").write_text(f"extends: [{'f40.yaml, ' * 40}]\n")
    (tmp_path / "f40.yaml").write_text("a: 1\n")
    assert "more than 32 files" in layers(tmp_path / "f0.yaml")[1][0].message
    assert "more than 32 files" in layers(tmp_path / "many.yaml")[1][0].message
    (tmp_path / "long.yaml").write_text(f"a: {'x' * 2**17}\n")
    assert "131,072 bytes" in layers(tmp_path / "long.yaml")[1][0].message


@pytest.mark.parametrize("target", ["shadow", "linked.yaml"])
def test_a_file_without_the_suffix_of_a_spec_is_not_quoted(tmp_path: Path, target: str) -> None:
    (tmp_path / "shadow").write_text("root:$6$hash:19000:0:99999:7:::\nmodel: secret\n")
    (tmp_path / "linked.yaml").symlink_to("shadow")
    (tmp_path / "top.yaml").write_text(f"extends: {target}\n")
    for spec in ("top.yaml", "linked.yaml"):
        with pytest.raises(SpecError) as caught:
            load_spec(tmp_path / spec)
        message = str(caught.value)
        assert re.search("shadow(, which)? is not a YAML file", message)
        assert "$6$" not in message and "secret" not in message


def test_a_file_is_read_when_a_file_that_it_extends_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("a: 1\n")
    (tmp_path / "top.yaml").write_text("extends: [gone.yaml, good.yaml]\nb: 2\n")
    root, problems = layers(tmp_path / "top.yaml")
    assert root is not None and root.plain() == {"a": 1, "b": 2}
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"# nothing\n", "the file is empty"),
        (b"- a\n", "not a mapping"),
        (b"a: 1\nb: \xff\n", "not UTF-8"),
    ],
)
def test_files_that_are_not_specs(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "s.yaml").write_bytes(data)
    root, problems = layers(tmp_path / "s.yaml")
    assert root is None and len(problems) == 1 and words in problems[0].message
    assert problems[0].line == (2 if b"\xff" in data else 1)


def test_overrides() -> None:
    problems: list[Problem] = []
    root = tree({"a": {"b": 1, "list": [1, 2]}, "m": {"path": "p", "init": None}})
    for assignment in ("a.b=1e-4", "a.list.1=[x]", "m.init.config={w: 3}", "m.path=", "new.key=a=b"):
        root = override(root, assignment, problems)
    assert not problems
    assert root.plain() == {
        "a": {"b": 1e-4, "list": [1, ["x"]]},
        "m": {"path": None, "init": {"config": {"w": 3}}},
        "new": {"key": "a=b"},
    }
    assert str(root.location_of("a.b")) == "--set a.b"
    assert str(root.location_of("m.init.config.w")) == "--set m.init.config"


@pytest.mark.parametrize(
    "assignment", ["a.b", "=3", "a..b=3", "a." * 70 + "b=3", "a.list.2=3", "a.list.x=3", "a.b={", "extends=x"]
)
def test_overrides_that_cannot_be_applied(assignment: str) -> None:
    problems: list[Problem] = []
    root = tree({"a": {"b": 1, "list": [1, 2]}})
    assert override(root, assignment, problems).plain() == root.plain()
    assert len(problems) == 1 and problems[0].file.startswith("--set ") and problems[0].line is None


# Keys `m` always hold mappings and keys `v` never do: if one layer has a mapping and another a value, merging
# cannot be associative, because a value forgets the mapping it replaced.
trees = st.recursive(
    st.dictionaries(st.sampled_from(["v1", "v2"]), st.none() | st.integers() | st.lists(st.integers(), max_size=2)),
    lambda inner: st.dictionaries(st.sampled_from(["m1", "m2"]), inner, max_size=2),
    max_leaves=8,
)


@given(trees, trees, trees)
def test_merge_is_associative(a: Any, b: Any, c: Any) -> None:
    left = merge(merge(tree(a), tree(b)), tree(c))
    right = merge(tree(a), merge(tree(b), tree(c)))
    assert left.plain() == right.plain()


@given(trees)
def test_merge_with_nothing_or_itself_changes_nothing(a: Any) -> None:
    assert merge(tree(a), tree({})).plain() == merge(tree({}), tree(a)).plain() == merge(tree(a), tree(a)).plain() == a


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("async", 2, "keep")),
        (["pipeline.mode=sync"], ("sync", 0, "drain")),
        (["pipeline.mode=one_step_off"], ("one_step_off", 1, "drain")),
        (["pipeline.mode=async"], ("async", 4, "keep")),
        (["pipeline.mode=async", "pipeline.max_staleness=3"], ("async", 3, "keep")),
        (["pipeline.max_staleness=3", "pipeline.mode=async"], ("async", 3, "keep")),
        (["pipeline.weight_update=recompute"], ("async", 2, "recompute")),
        (["pipeline.mode=sync", "pipeline.partial_rollouts=true"], ("sync", 1, "drain")),
        (["pipeline.partial_rollouts=true", "pipeline.mode=sync", "pipeline.max_staleness=2"], ("sync", 2, "drain")),
    ],
)
def test_an_override_of_the_mode_starts_from_its_preset(overrides: list[str], expected: tuple[str, int, str]) -> None:
    pipeline = load_spec(QUICKSTART, overrides).spec.pipeline
    assert (pipeline.mode, pipeline.max_staleness, pipeline.weight_update) == expected


def test_a_file_that_sets_the_mode_starts_from_its_preset(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {QUICKSTART}\npipeline: {{mode: sync}}\n")
    assert load_spec(child).spec.pipeline.max_staleness == 0
    child.write_text(f"extends: {QUICKSTART}\npipeline: {{groups_per_step: 16}}\n")
    assert load_spec(child).spec.pipeline.max_staleness == 2
