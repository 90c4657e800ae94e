"""prime-rl's configurations as specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.convert.prime_rl import TRAINER, read_command_line
from asyncrl_cli.convert.table import Conversion, convert, spec_text
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from tests.convert.conftest import Command, cases, check_case

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data/prime_rl"
FILES = sorted(DATA.glob("*.toml"))
WIKI = str(DATA / "wiki_search.toml")


def converted(*words: str) -> Conversion:
    return convert(read_command_line(words)[1], TRAINER)


def spec_of(*words: str) -> ExperimentSpec:
    return load_spec("spec.yaml", data=spec_text(converted(*words), "test", Path()).encode()).spec


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_key_is_in_the_result(file: Path) -> None:
    conversion = converted(str(file))
    assert conversion.unknown == [] and conversion.unsupported == []
    text = spec_text(conversion, file.name, Path())
    assert not [key for key in conversion.config.values if key not in text], "each is named in a comment"


@pytest.mark.parametrize(("words", "result"), cases("prime-rl"))
def test_settings(home: Path, words: list[str], result: Any) -> None:
    check_case(converted(WIKI, *words), words, result)


def test_unknown_keys_are_named() -> None:
    assert converted(WIKI, "--trainer.my_own", "1").unknown == ["trainer.my_own"]


def test_several_environments_are_a_mix_and_evaluation_environments_are_sets(home: Path) -> None:
    spec = spec_of(str(DATA / "multi_env.toml"), "--orchestrator.eval.group-size", "4")
    assert [member.name for member in spec.task.mix] == ["reverse-text-a", "reverse-text-b"]
    held_out = spec.evaluation.sets["reverse_text"]
    assert (held_out.every, held_out.samples, held_out.data.size) == (5, 4, 64)
    assert held_out.task is not None and held_out.task.options["held_out"] is False


def test_on_policy_distillation_is_the_preset_distill(home: Path) -> None:
    algorithm = spec_of(str(DATA / "opd.toml")).algorithm
    assert (algorithm.preset, algorithm.whiten_advantages, algorithm.reward_coef) == ("distill", False, 0.0)
    assert algorithm.reference_path == "PrimeIntellect/Qwen3-0.6B-Reverse-Text-RL"


def test_the_files_of_the_three_processes_are_one_configuration(home: Path) -> None:
    spec = spec_of("uv", "run", "rl", "@", str(DATA / "apart/orch.toml"), str(DATA / "apart/train.toml"))
    assert (spec.stop.steps, spec.pipeline.groups_per_step, spec.trainer.optimizer.learning_rate) == (20, 8, 3e-6)
    assert spec.model.path == "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"


def test_the_command(home: Path, asyncrl: Command) -> None:
    code, out, err = asyncrl("convert", "prime-rl", WIKI, "--max-steps", "3", "-o", "spec.yaml")
    assert code == 0, err
    assert "0 unknown" in out and asyncrl("validate-spec", "spec.yaml")[0] == 0
    code, _, err = asyncrl("validate-spec", WIKI)
    assert code == 2 and f"asyncrl convert prime-rl {WIKI}" in err
    Path("bad.toml").write_text("a = \n")
    for words, message in {("bad.toml",): "is not TOML", ("none.toml",): "cannot be read", ("rl",): "no file"}.items():
        code, _, err = asyncrl("convert", "prime-rl", *words)
        assert code == 2 and message in err


TABLE = TRAINER.table
NAMES = sorted({name.replace("*", "0.x") for row in TABLE.rows.values() for name in row.names} | TABLE.defaults.keys())
VALUES: st.SearchStrategy[Any] = st.sampled_from([None, -1, 0, 0.5, 3, True, "", "x", [], [1], {}])


@given(st.dictionaries(st.sampled_from([*NAMES, "orchestrator.eval.source.0.env", "ckpt.interval"]), VALUES))
def test_no_value_is_a_crash(values: dict[str, Any]) -> None:
    conversion = convert(values, TRAINER)
    spec_text(conversion, "test", Path())
    lists = [*conversion.lost.values(), conversion.needless, conversion.unknown]
    listed = [name for names in (*lists, *(setting.origins for setting in conversion.settings)) for name in names]
    assert set(listed) == set(values), "every key is in the result"
