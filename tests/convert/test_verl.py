"""verl's configurations converted to specs: its own files, the overrides of its examples, and intended differences."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.convert.config import override, read_file
from asyncrl_cli.convert.table import Conversion, convert, spec_text
from asyncrl_cli.convert.verl import read_command_line, trainer_of
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.load import load_spec
from tests.convert.conftest import DATA, cases, check_case, spec_values

pytestmark = pytest.mark.slow

FILES = sorted((DATA / "verl").glob("*.yaml"))


def converted(overrides: list[str], file: Path | None = None) -> Conversion:
    values = override(read_file(str(file)) if file else {}, overrides)
    return convert(values, trainer_of("", values))


def spec_of(*overrides: str) -> dict[str, Any]:
    """Return the values of the valid spec that overrides give, by dotted key."""
    return spec_values(converted(list(overrides)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_verls_own_files_give_valid_specs_that_name_every_key(file: Path, home: Path) -> None:
    conversion = converted([], file)
    text = spec_text(conversion, file.name, Path())
    load_spec("spec.yaml", data=text.encode())
    words = set(re.findall(r"[\w.-]+", text))
    assert set(conversion.config.values) - words == set()
    assert conversion.unknown == []


def test_unknown_keys_are_listed_and_marked(home: Path) -> None:
    conversion = converted(["trainer.no_such_key=3", "+data.mine.deep={a: 1}"])
    assert sorted(conversion.unknown) == ["data.mine.deep.a", "trainer.no_such_key"]
    text = spec_text(conversion, "test", Path())
    assert "CHECK: unknown keys" in text and "trainer.no_such_key = 3" in text and "data.mine.deep.a" in text


A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
GRPO = ["algorithm.adv_estimator=grpo", f"{R}n=8", f"{R}name=vllm"]


@pytest.mark.parametrize(("overrides", "result"), cases("verl"))
def test_settings(home: Path, overrides: list[str], result: Any) -> None:
    check_case(converted([*GRPO, *overrides]), overrides, result)


def test_lost_keys_are_marked_unless_they_are_off() -> None:
    name = f"{R}top_p"
    assert [name] in converted([*GRPO, f"{name}=0.9"]).lost.values()
    conversion = converted([*GRPO, f"{name}=1.0"])
    assert conversion.lost == {} and name in conversion.needless


def test_columns_of_a_complete_configuration_are_no_video_and_no_audio() -> None:
    """Each complete configuration has them, also if its data has none."""
    conversion = converted([], next(file for file in FILES if file.stem == "ppo_trainer"))
    assert conversion.unsupported == [] and {"data.video_key", "data.audio_key"} <= set(conversion.needless)
    assert ("data.train.image_column", "verl reads images from the column images, if the data has it") in (
        conversion.remarks
    )


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("python3 -m verl.trainer.main_ppo --config-path=config a=1 b=2", ["a=1", "b=2"]),
        ("X=1 ray job submit -- python3 -m recipe.dapo.main_dapo --config-name ppo_trainer a=1", ["a=1"]),
        ("python verl/trainer/main_ppo.py a=x.py", ["a=x.py"]),
        ("config.yaml a=1", ["config.yaml", "a=1"]),
        ("python3 -m verl.trainer.main_ppo a=1 $@", ["a=1"]),
    ],
)
def test_the_program_of_a_command_line_is_skipped(line: str, kept: list[str]) -> None:
    assert read_command_line(line.split())[1] == kept


@pytest.mark.parametrize("line", ["--config-name=mine a=1", "--multirun a=1", "train.py"])
def test_options_and_scripts_that_are_not_read_are_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        read_command_line(line.split())


@pytest.mark.parametrize(
    ("keys", "weights"), [("[a,b]", "[[1],2]"), ("[a,b]", "[x,2]"), ("true", "[1]"), ("[a]", "true")]
)
def test_odd_rewards_and_weights_end_without_a_traceback(keys: str, weights: str) -> None:
    names = [f"algorithm.gdpo_reward_{name}" for name in ("keys", "weights")]
    overrides = ["algorithm.adv_estimator=gdpo", f"{names[0]}={keys}", f"{names[1]}={weights}"]
    with suppress(ConfigError):
        converted([*GRPO, *overrides])


def test_further_held_out_files_are_sets_of_their_own(home: Path) -> None:
    files = [f"{home}/data/rlhf/gsm8k/test.parquet", f"{home}/data/math/test.parquet", f"{home}/data/a/math/x.parquet"]
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    spec = spec_of(*GRPO, f"data.val_files={files}")
    assert spec["data.eval.path"] == files[0]
    assert {name: values["data"]["path"] for name, values in spec["evaluation.sets"].items()} == {
        "math": files[1],
        "math2": files[2],
    }


@pytest.mark.parametrize(
    ("line", "mode", "preset"),
    [
        ("python3 -m verl.trainer.main_ppo", "sync", "decoupled"),
        ("python3 -m verl.experimental.fully_async_policy.fully_async_main", "async", "off"),
        ("python3 -m verl.experimental.one_step_off_policy.main_ppo", "one_step_off", "off"),
        ("python3 -m x.main --config-path=config --config-name=fully_async_ppo_megatron_trainer.yaml", "async", "off"),
        ("", "sync", "decoupled"),
    ],
)
def test_a_programs_defaults_decide(line: str, mode: str, preset: str) -> None:
    name, overrides = read_command_line([*line.split(), "data.train_batch_size=64"])
    values = override({}, overrides)
    found = {setting.key: setting.value for setting in convert(values, trainer_of(name, values)).settings}
    assert (found["pipeline.mode"], found["algorithm.correction.preset"]) == (mode, preset)


def test_a_configuration_that_the_command_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 8}\n")
    line = f"python3 -m verl.trainer.main_ppo --config-path={tmp_path} --config-name mine a.b=1"
    assert read_command_line(line.split())[1] == [f"{tmp_path}/mine.yaml", "a.b=1"]


def test_a_run_never_needs_more_gpus_than_it_had() -> None:
    for gpus in (1, 2, 4, 8):
        overrides = [f"trainer.n_gpus_per_node={gpus}", f"{R}tensor_model_parallel_size={gpus}"]
        found = {setting.key: setting.value for setting in converted([*GRPO, *overrides]).settings}
        used = found["rollout.engines"] * found["rollout.gpus_per_engine"]
        assert used + found["trainer.ranks"] * found["trainer.gpus_per_rank"] <= gpus
