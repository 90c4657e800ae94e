"""verl's configurations converted to specs: its own files, the overrides of its examples, and intended differences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.convert.config import override, read_file
from asyncrl_cli.convert.shell import command_words
from asyncrl_cli.convert.table import Conversion, convert, spec_text
from asyncrl_cli.convert.verl import ARGUMENT, read_command_line, trainer_of
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
    check_case(converted([*GRPO, *overrides]), "".join(overrides[:1]).partition("=")[0].lstrip("+"), result)


def test_the_fully_asynchronous_dapo_example(home: Path) -> None:
    """The command line of verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_8_8.sh."""
    spec = spec_of(
        *("data.train_batch_size=0", "data.gen_batch_size=1", f"{R}n=16", "algorithm.adv_estimator=grpo"),
        *("data.max_prompt_length=2048", "data.max_response_length=8192", "actor_rollout_ref.hybrid_engine=False"),
        *(f"{A}clip_ratio_low=0.2", f"{A}clip_ratio_high=0.28", f"{A}clip_ratio_c=10.0"),
        *(f"{A}ppo_mini_batch_size=32", f"{R}tensor_model_parallel_size=1", f"{R}gpu_memory_utilization=0.80"),
        *("reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg.enable=True"),
        *("+reward.reward_kwargs.overlong_buffer_cfg.len=4096", "rollout.total_rollout_steps=51200"),
        *("+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0", "rollout.nnodes=1", "trainer.nnodes=1"),
        *("rollout.n_gpus_per_node=8", "trainer.n_gpus_per_node=8", "trainer.test_freq=10"),
        *("async_training.staleness_threshold=0.1", "async_training.trigger_parameter_sync_step=4"),
        *("async_training.require_batches=4", "async_training.partial_rollout=True"),
    )
    expected = {
        "pipeline.mode": "async",
        "pipeline.max_staleness": 1,
        "pipeline.groups_per_step": 128,
        "pipeline.publish_every": 4,
        "pipeline.weight_update": "recompute",
        "trainer.minibatches": 4,
        "trainer.ranks": 8,
        "rollout.engines": 8,
        "rollout.engine_args.gpu_memory_utilization": 0.8,
        "algorithm.overlong_penalty": 1.0,
        "algorithm.overlong_buffer": 0.5,
        "algorithm.dual_clip": 10.0,
        "evaluation.every": 40,
        "stop.steps": 400,
        "model.max_length": 10240,
    }
    assert {key: spec[key] for key in expected} == expected


def test_lost_keys_are_marked_unless_they_are_off() -> None:
    name = f"{R}top_p"
    assert [name] in converted([*GRPO, f"{name}=0.9"]).lost.values()
    conversion = converted([*GRPO, f"{name}=1.0"])
    assert conversion.lost == {} and name in conversion.needless


DISTILL = [
    "distillation.enabled=True",
    "distillation.distillation_loss.loss_mode=k1",
    "distillation.distillation_loss.use_policy_gradient=True",
    "distillation.distillation_loss.use_task_rewards=False",
    "distillation.teacher_models.teacher_model.model_path=teacher/model",
]


def test_distillation_of_the_sampled_token_is_the_preset_distill() -> None:
    conversion = converted([*GRPO, *DISTILL, "distillation.distillation_loss.clip_ratio_high=0.3"])
    assert conversion.unsupported == [] and conversion.unknown == []
    found = {setting.key: setting.value for setting in conversion.settings}
    wanted = {"preset": "distill", "reference_path": "teacher/model", "clip_high": 0.3, "kl_coef": 1.0, "gamma": 0.0}
    assert {key: found[f"algorithm.{key}"] for key in wanted} == wanted
    assert found["task.use"] == "prompts" and "task.use" not in dict(conversion.remarks)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("distillation.distillation_loss.loss_mode=forward_kl_topk", "loss_mode"),
        ("distillation.distillation_loss.use_policy_gradient=False", "use_policy_gradient"),
        ("distillation.distillation_loss.use_task_rewards=True", "use_task_rewards"),
        ("distillation.teacher_models.other.model_path=another/model", "teacher_models"),
    ],
)
def test_distillation_with_another_meaning_is_refused_by_its_key(override: str, key: str) -> None:
    (reason,) = converted([*GRPO, *DISTILL, override]).unsupported
    assert key in reason


@pytest.mark.parametrize(
    "override",
    [
        "data.video_key=clips",
        "data.audio_key=sounds",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-Omni-7B",
        "distillation.enabled=True",
    ],
)
def test_runs_that_cannot_be_trained_are_unsupported(override: str) -> None:
    assert converted([*GRPO, override]).unsupported
    assert converted(GRPO).unsupported == []


def test_columns_of_a_complete_configuration_are_no_video_and_no_audio() -> None:
    """Each complete configuration has them, also if its data has none."""
    conversion = converted([], next(file for file in FILES if file.stem == "ppo_trainer"))
    assert conversion.unsupported == [] and {"data.video_key", "data.audio_key"} <= set(conversion.needless)
    assert ("data.train.image_column", "verl reads images from the column images, if the data has it") in (
        conversion.remarks
    )


VISION = "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.mark.parametrize(
    ("overrides", "limit", "column", "freeze"),
    [
        ([VISION, "data.image_key=pictures"], 1, "pictures", []),
        (["data.image_key=pictures"], 1, "pictures", []),
        ([VISION, f"{R}limit_mm_per_prompt.image=4", f"{A}freeze_vision_tower=True"], 4, "images", ["vision"]),
    ],
)
def test_images_are_kept_with_column_number_and_the_trained_tower(
    overrides: list[str], limit: int, column: str | None, freeze: list[str]
) -> None:
    conversion = converted([*GRPO, *overrides])
    values = {setting.key: setting.value for setting in conversion.settings}
    assert conversion.unsupported == []
    assert (values["model.max_images"], values["model.freeze"]) == (limit, freeze)
    assert values["data.train.image_column"] == values.get("data.eval.image_column") == column
    assert "model.max_images" not in {setting.key for setting in converted(GRPO).settings}


def test_epochs_stay_epochs(home: Path) -> None:
    text = spec_text(converted([*GRPO, "trainer.total_epochs=7", "trainer.save_freq=500"]), "test", Path())
    loaded = load_spec("spec.yaml", data=text.encode())
    assert loaded.spec.stop.epochs == 7 and loaded.spec.stop.steps is None and loaded.warnings == ()


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


def test_gdpos_rewards_are_parts(home: Path) -> None:
    keys = (*GRPO, "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=['format','answer']")
    found = spec_of(*keys, "+algorithm.gdpo_reward_weights=[0.5,1.0]")
    assert found["algorithm.reward_parts"] == {"format": 0.5, "answer": 1.0}
    assert (found["algorithm.reward_aggregation"], found["algorithm.advantage"]) == ("normalize_then_sum", "group_norm")
    assert spec_of(*keys)["algorithm.reward_parts"] == {"format": 1.0, "answer": 1.0}
    assert spec_of(*GRPO)["algorithm.reward_parts"] == {}


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


def test_unknown_names_and_paths_of_a_script_do_not_stop_a_conversion(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "NAME=qwen_$(date +%Y)\npython3 -m verl.trainer.main_ppo trainer.experiment_name=$NAME \\\n"
        "  data.train_files=\"['$DATA_ROOT/a.parquet']\" trainer.default_local_dir=$CKPTS/$(hostname)\n"
    )
    values = override({}, read_command_line(command_words([str(script)], ARGUMENT))[1])
    conversion = convert(values, trainer_of("", values))
    found = {setting.key: setting.value for setting in conversion.settings}
    assert (found["name"], found["data.train.path"]) == ("qwen", "${env:DATA_ROOT}/a.parquet")
    assert {"name", "data.train.path"} <= {key for key, _ in conversion.remarks}


def test_a_run_never_needs_more_gpus_than_it_had() -> None:
    for gpus in (1, 2, 4, 8):
        overrides = [f"trainer.n_gpus_per_node={gpus}", f"{R}tensor_model_parallel_size={gpus}"]
        found = {setting.key: setting.value for setting in converted([*GRPO, *overrides]).settings}
        used = found["rollout.engines"] * found["rollout.gpus_per_engine"]
        assert used + found["trainer.ranks"] * found["trainer.gpus_per_rank"] <= gpus
