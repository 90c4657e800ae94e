"""Reading configurations, and writing specs with comments for any configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.convert.config import ForeignConfig, override, read_file
from asyncrl_cli.convert.prime_rl import TRAINER as PRIME_RL
from asyncrl_cli.convert.table import Trainer, convert, spec_text, table
from asyncrl_cli.convert.trl import TRAINERS
from asyncrl_cli.convert.verl import TRAINERS as VERL
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.keys import keys

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
    values = ForeignConfig(given, {}, "", {}).values
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


FILES = {
    "aliases.yaml": "a: &a [1]\n" + "".join(f"b{n}: &a [*a, *a]\n" for n in range(40)),
    "merges.yaml": "a: &a {x: 1}\n" + "".join(f"b{n}: &a {{p: *a, q: *a}}\n" for n in range(40)),
    "itself.yaml": "a: &a [*a]\n",
    "deep.yaml": "[" * 50_000,
    "deep.toml": "a = " + "[" * 50_000,
    "tables.toml": "[" + ".".join("a" * 50_000) + "]",
    "large.yaml": "# x\n" * 100_000,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_would_need_much_work_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    with pytest.raises(ConfigError) as refused:
        read_file(str(tmp_path / name))
    assert str(tmp_path / name)[:40] in refused.value.location


def test_a_pipe_is_refused_and_long_references_are(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_file(str(tmp_path / "pipe.yaml"))
    with pytest.raises(ConfigError, match="references"):
        ForeignConfig({f"a{n}": f"${{a{n + 1}}}" * 50 for n in range(8)} | {"a8": "x"}, {}, "", {})


NAMES = st.from_regex(r"[a-z_]{1,8}(\.[a-z_]{1,8}){0,3}", fullmatch=True)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text())


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES | st.sampled_from(sorted(VERL["ppo"].table.defaults)), VALUES, max_size=12))
def test_any_configuration_gives_yaml_that_names_every_key(values: dict[str, object]) -> None:
    conversion = convert(values, VERL["ppo"])
    text = spec_text(conversion, "a file", Path())
    assert isinstance(yaml.safe_load(text), dict)
    comments = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
    assert all(name in comments for name in values)


@pytest.mark.parametrize("trainer", [*VERL.values(), *TRAINERS.values(), PRIME_RL])
def test_rows_and_computed_values_are_keys_of_the_spec(trainer: Trainer) -> None:
    row_keys = {key for row_keys in trainer.table.rows for key in row_keys.split()}
    others = ("rollout.engine_args.", "task.options.")
    assert [key for key in row_keys if key not in keys() and not key.startswith(others)] == []
    assert trainer.settings(trainer.config({})).keys() <= row_keys
    remarks = {**table("shared").checks, **trainer.table.checks}
    assert {key for key, *_ in remarks.values()} - keys().keys() == set()
