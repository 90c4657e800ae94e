"""Reading configurations, and writing specs with comments for any configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.convert.rows import Trainer, convert
from asyncrl_cli.convert.source import Source, override, read_file
from asyncrl_cli.convert.trl import TRAINERS
from asyncrl_cli.convert.verl import DEFAULTS, TRAINER
from asyncrl_cli.convert.write import spec_text
from asyncrl_cli.core.errors import ConfigError

pytestmark = pytest.mark.slow


def test_references_are_resolved() -> None:
    given = {
        "a.n": 3,
        "a.same": "${.n}",
        "b": "${a.same}",
        "c": "${oc.select:no.such,5}",
        "d": "${oc.select:no.such,${a.n}}",
        "e": "runs/${a.n}/${b}",
        "f": "${no.such}",
        "loop": "${loop}",
    }
    values = Source(given, {}).given
    assert values == given | {"a.same": 3, "b": 3, "c": 5, "d": 3, "e": "runs/3/3", "f": "${no.such}"}


def test_overrides_follow_hydra() -> None:
    values = {"a.b": 1, "a.c": 2, "d": 3}
    assignments = ["a.b=5e-6", "+e=[x,y]", "++f.g={h: 1}", "~d", 'text="1"']
    assert override(values, assignments) == {"a.b": 5e-6, "a.c": 2, "e": ["x", "y"], "f.g.h": 1, "text": "1"}
    assert override({"a.b": 1, "a.c": 2}, ["a={b: 3}"]) == {"a.b": 3}


@pytest.mark.parametrize("text", ["a: [", "- 1", "just text", "\x00", "a: *b"])
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError):
        read_file(str(tmp_path / "c.yaml"))


NAMES = st.from_regex(r"[a-z_]{1,8}(\.[a-z_]{1,8}){0,3}", fullmatch=True)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text())


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES | st.sampled_from(sorted(DEFAULTS)), VALUES, max_size=12))
def test_any_configuration_gives_yaml_that_names_every_key(values: dict[str, object]) -> None:
    conversion = convert(values, TRAINER)
    text = spec_text(conversion, "a file", Path())
    assert isinstance(yaml.safe_load(text), dict)
    comments = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
    assert all(name in comments for name in values)


@pytest.mark.parametrize("trainer", [TRAINER, *TRAINERS.values()])
def test_every_computed_value_has_a_row(trainer: Trainer) -> None:
    computed = trainer.settings(Source({}, trainer.defaults))
    assert computed.keys() <= {row.key for row in trainer.rows}
