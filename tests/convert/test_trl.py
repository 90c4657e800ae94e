"""TRL's arguments converted to specs: files, command lines, and intended differences."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.convert.config import read_file
from asyncrl_cli.convert.table import Conversion, convert, spec_text
from asyncrl_cli.convert.trl import TRAINERS, parse
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.load import load_spec
from tests.convert.conftest import Command
from tests.convert.test_verl import flat

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data/trl"
FILES = sorted(DATA.glob("*.yaml"))
ZERO3 = str(DATA / "accelerate/deepspeed_zero3.yaml")
BASE = ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--dataset_name", "trl-lib/DeepMath-103K", "--num_processes", "8"]


def converted(*words: str) -> Conversion:
    found = parse(words)
    values = (read_file(found.files[0]) if found.files else {}) | found.values
    return convert(values, TRAINERS[found.method])


def spec_of(*words: str) -> dict[str, Any]:
    """The values of the valid spec that arguments give, by dotted key."""
    return flat(load_spec("spec.yaml", data=spec_text(converted(*words), "test", Path()).encode()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_example_files_give_valid_specs_that_name_every_argument(file: Path, home: Path) -> None:
    conversion = converted(str(file), "--accelerate_config", ZERO3)
    text = spec_text(conversion, file.name, Path())
    assert load_spec("spec.yaml", data=text.encode()).spec.data.train.system in (
        None,
        conversion.config.get("system_prompt"),
    )
    words = set(re.findall(r"[\w.]+", text))
    assert set(conversion.config.values) - words == set()
    assert conversion.unknown == []


def test_the_command_line_of_trl(home: Path, asyncrl: Command) -> None:
    arguments = ["--reward_funcs", "accuracy_reward", "--learning_rate=2e-6", "--max_steps", "-1", "--use_peft"]
    code, out, err = asyncrl("convert", "trl", "trl", "grpo", *BASE, *arguments)
    assert code == 0, err
    assert "learning_rate: 2.0e-06" in out and "use: math" in out and "path: hf:trl-lib/DeepMath-103K" in out
    assert "rank: 16" in out
    code, _, err = asyncrl("convert", "trl", "no-such.yaml")
    assert code == 2 and "neither a file nor an argument of TRL" in err


def test_arguments_are_read_as_trl_reads_them() -> None:
    words = ["rloo", "--a-b", "1", "--flag", "--list", "x", "2", "--text=3e-6", "--kwargs", '{"k": {"z": 1}}']
    assert parse(words) == ("rloo", [], {"a_b": 1, "flag": True, "list": ["x", 2], "text": 3e-6, "kwargs.k.z": 1})
    with pytest.raises(ConfigError):
        parse(["grpo", "stray"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "accelerate launch --config_file zero3.yaml --num_processes 8 train.py --beta 0",
            ("grpo", [], {"accelerate_config": "zero3.yaml", "num_processes": 8, "beta": 0}),
        ),
        (
            "X=1 torchrun --nproc_per_node=4 -m trl.scripts.rloo --beta 0",
            ("rloo", [], {"num_processes": 4, "beta": 0}),
        ),
        ("uv run examples/ppo.py --reward my.py", ("ppo", [], {"reward": "my.py"})),
        ("uv run trl grpo --beta 0", ("grpo", [], {"beta": 0})),
        ("grpo --beta 0 --reward my.py", ("grpo", [], {"beta": 0, "reward": "my.py"})),
    ],
)
def test_launchers_and_scripts_are_skipped(line: str, expected: tuple[object, ...]) -> None:
    assert parse(line.split()) == expected


def test_models_for_images_and_dropout_are_not_ignored() -> None:
    conversion = converted("grpo", *BASE, "--model_name_or_path", "Qwen/Qwen2.5-VL-3B-Instruct")
    values = {setting.key: setting.value for setting in conversion.settings}
    assert values["model.max_images"] == 1 and values["model.freeze"] == [] and conversion.unsupported == []
    assert {"model.max_images", "data.train.image_column"} <= {key for key, _ in conversion.remarks}
    assert converted("grpo", *BASE, "--model_name_or_path", "Qwen/Qwen2.5-Omni-7B").unsupported
    assert converted("grpo", *BASE, "--video_fps", "9").unsupported
    assert ["max_pixels"] in converted("grpo", *BASE, "--max_pixels", "9").lost.values()
    assert converted("grpo", *BASE).unsupported == []
    assert ["lora_dropout"] in converted("grpo", *BASE, "--use_peft", "--lora_dropout", "0.1").lost.values()


def test_epochs_stay_epochs(home: Path) -> None:
    text = spec_text(converted("grpo", *BASE, "--num_train_epochs", "2.5", "--warmup_ratio", "0.1"), "test", Path())
    loaded = load_spec("spec.yaml", data=text.encode())
    assert loaded.spec.stop.epochs == 3 and loaded.spec.stop.steps is None and loaded.warnings == ()
    assert "CHECK epochs: epochs are whole numbers here: rounded up" in text
    assert "CHECK warmup_updates: a share of the steps, computed for 100" in text


COUNTS = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8", "--num_generations", "16"]
PPO = ["ppo", *BASE, "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "16"]


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        # 4 completions on each of 8 devices, accumulated 8 times, in groups of 16.
        (COUNTS, "pipeline.groups_per_step", 16),
        (COUNTS, "trainer.minibatches", 1),
        ([*COUNTS, "--steps_per_generation", "32"], "pipeline.groups_per_step", 64),
        ([*COUNTS, "--steps_per_generation", "32"], "trainer.minibatches", 4),
        ([*COUNTS, "--generation_batch_size", "512"], "pipeline.groups_per_step", 32),
        ([*COUNTS, "--generation_batch_size", "512"], "trainer.minibatches", 2),
        # TRL counts updates: 4 minibatches · 2 iterations are 8 of them.
        ([*COUNTS, "--steps_per_generation", "32", "--num_iterations", "2", "--max_steps", "800"], "stop.steps", 100),
        ([*COUNTS, "--steps_per_generation", "32", "--save_steps", "8"], "checkpoints.every", 2),
        (["--save_strategy", "no"], "checkpoints.every", 0),
        (["--max_steps", "200", "--warmup_ratio", "0.1"], "trainer.schedule.warmup_updates", 20),
        (["--loss_type", "grpo"], "algorithm.aggregation", "sequence_mean"),
        ([], "algorithm.aggregation", "token_mean"),
        (["--loss_type", "dr_grpo", "--scale_rewards", "none"], "algorithm.advantage", "group_mean"),
        (["--loss_type", "cispo", "--epsilon_high", "5.0"], "algorithm.clip_high", 4.0),
        (["--loss_type", "cispo", "--epsilon_high", "5.0"], "algorithm.clip_low", 1.0),
        (["--loss_type", "sapo"], "algorithm.loss", "sapo"),
        (["--importance_sampling_level", "sequence", "--loss_type", "grpo"], "algorithm.loss", "gspo"),
        (["--epsilon_high", "0.28"], "algorithm.clip_high", 0.28),
        (["--delta", "4.0"], "algorithm.dual_clip", 4.0),
        (["--beta", "0.04"], "algorithm.kl_coef", 0.04),
        ([], "algorithm.uniform_groups", "train"),
        ([], "algorithm.correction.mask_high", 3.0),
        ([], "algorithm.correction.level", "sequence"),
        (["--vllm_importance_sampling_mode", "token_truncate"], "algorithm.correction.cap", 3.0),
        (["--vllm_importance_sampling_correction", "False"], "algorithm.correction.level", None),
        (["--mask_truncated_completions"], "algorithm.mask_truncated", True),
        ([], "trainer.ranks", 4),
        (["--use_vllm", "--vllm_mode", "server", "--vllm_tensor_parallel_size", "2"], "trainer.ranks", 8),
        (["--use_vllm", "--vllm_mode", "server", "--vllm_tensor_parallel_size", "2"], "rollout.gpus_per_engine", 2),
        (["--accelerate_config", "zero2"], "trainer.zero_stage", 2),
        (["--accelerate_config", ZERO3], "trainer.ranks", 4),
        (["--lr_scheduler_type", "constant_with_warmup"], "trainer.schedule.kind", "constant"),
        (["--chat_template_kwargs", '{"enable_thinking": false}'], "model.chat_template_kwargs.enable_thinking", False),
        ([], "data.apply_chat_template", False),
        (["--bf16", "False"], "trainer.dtype", "float32"),
        (["--report_to", "wandb", "tensorboard"], "tracking.tensorboard", True),
        ([], "pipeline.mode", "sync"),
        (["--output_dir", "out/My Model"], "name", "My-Model"),
    ],
)
def test_settings_of_grpo(home: Path, words: list[str], key: str, value: Any) -> None:
    assert spec_of("grpo", *BASE, *words)[key] == value


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["rloo", *BASE], "algorithm.advantage", "leave_one_out"),
        (["rloo", *BASE], "algorithm.kl_placement", "reward"),
        (["rloo", *BASE], "algorithm.kl_coef", 0.05),
        (["rloo", *BASE], "algorithm.sequence_divisor", 1),
        (["rloo", *BASE], "rollout.group_size", 2),
        (["async_grpo", *BASE], "pipeline.mode", "async"),
        (["async_grpo", *BASE], "pipeline.max_staleness", 4),
        (["async_grpo", *BASE, "--weight_sync_steps", "2", "--max_steps", "50"], "pipeline.publish_every", 2),
        (PPO, "rollout.group_size", 1),
        (PPO, "pipeline.groups_per_step", 512),
        ([*PPO, "--num_mini_batches", "4"], "pipeline.groups_per_step", 512),
        ([*PPO, "--num_mini_batches", "4"], "trainer.minibatches", 4),
        ([*PPO, "--total_episodes", "51200"], "stop.steps", 100),
        (PPO, "trainer.epochs", 4),
        (PPO, "algorithm.advantage", "gae"),
        (PPO, "algorithm.gae_lambda", 0.95),
        (PPO, "algorithm.kl_placement", "reward"),
    ],
)
def test_settings_of_other_trainers(home: Path, words: list[str], key: str, value: Any) -> None:
    assert spec_of(*words)[key] == value


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        (["--num_generations", "7"], "not divisible by num_generations"),
        (["--scale_rewards", "batch"], "deviation of the batch"),
        (["--loss_type", "vespo"], "this loss_type has no counterpart"),
        (
            ["--reward_funcs", "my_lib.rewards.fluent", "think_format_reward", "--reward_weights", "2", "1"],
            "(fluent, 2.0), (think_format_reward, 1.0)",
        ),
        (["--sync_ref_model"], "the reference becomes the policy"),
        (["--fp16"], "float16 is not supported"),
    ],
)
def test_settings_that_cannot_be_kept_get_a_remark(words: list[str], remark: str) -> None:
    assert remark in "\n".join(text for _, text in converted("grpo", *BASE, *words).remarks)


def test_every_argument_of_transformers_is_known() -> None:
    """The installed `TrainingArguments`, which TRL's configurations extend; read from source, as an import is slow."""
    package = find_spec("transformers")
    assert package is not None and package.origin is not None
    code = ast.parse((Path(package.origin).parent / "training_args.py").read_text(encoding="utf-8"))
    (definition,) = (node for node in code.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    fields = {
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id.islower()
    }
    assert len(fields) > 80
    private = {name for name in fields if name.startswith("_")} | {"framework"}
    conversion = convert(dict.fromkeys(fields - private, "x"), TRAINERS["grpo"])
    assert conversion.unknown == []


def test_lost_keys_are_marked_unless_they_are_off() -> None:
    conversion = converted("grpo", *BASE, "--top_p", "0.9", "--min_p", "null", "--load_in_4bit", "--my_own", "1")
    assert sorted(name for names in conversion.lost.values() for name in names) == ["load_in_4bit", "top_p"]
    assert "min_p" in conversion.needless and conversion.unknown == ["my_own"]


GKD = ["gkd", *BASE, "--lmbda", "1", "--beta", "1", "--teacher_model_name_or_path", "teacher/model"]


def test_on_policy_gkd_is_the_preset_distill(home: Path) -> None:
    spec = load_spec("spec.yaml", data=spec_text(converted(*GKD, "--max_steps", "9"), "test", Path()).encode()).spec
    assert (spec.algorithm.preset, spec.algorithm.reference_path, spec.algorithm.gamma) == (
        "distill",
        "teacher/model",
        0.0,
    )
    assert (spec.task.use, spec.rollout.group_size, spec.rollout.max_response_tokens) == ("prompts", 1, 128)
    assert spec.rollout.max_prompt_tokens == 1024 - 128
    assert converted(*GKD).unsupported == []


@pytest.mark.parametrize(
    ("words", "key"),
    [(["--lmbda", "0.5"], "lmbda"), (["--beta", "0"], "beta"), (["--teacher_model_name_or_path", "null"], "teacher")],
)
def test_gkd_with_another_meaning_is_refused_by_its_key(words: list[str], key: str) -> None:
    (reason,) = converted(*GKD, *words).unsupported
    assert reason.startswith(key)


PROGRAM = """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward
RATE = 2e-6
data = load_dataset("trl-lib/DeepMath-103K", "default", split="test")
def brief(completions, **_): return [0.0 for _ in completions]
functions = [brief, think_format_reward]
arguments = GRPOConfig(output_dir="out/mine", learning_rate=RATE, num_generations=4, bf16=torch.ok(), run_name=f"{x}")
adapter = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"])
GRPOTrainer(model="Qwen/Qwen3-0.6B", args=arguments, reward_funcs=functions, peft_config=adapter).train()
"""


def test_literals_of_a_program_are_read(home: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    spec = spec_of("train.py", "--bf16", "True", "--num_processes", "4")
    expected = {
        "name": "mine",
        "model.path": "Qwen/Qwen3-0.6B",
        "model.lora.rank": 8,
        "model.lora.alpha": 16,
        "data.train.path": "hf:trl-lib/DeepMath-103K",
        "data.train.config": "default",
        "data.train.split": "test",
        "trainer.optimizer.learning_rate": 2e-6,
        "rollout.group_size": 4,
    }
    assert {key: spec[key] for key in expected} == expected
    (remark,) = converted("train.py", "--bf16", "True").config.remarks["task.use"]
    assert "(brief, 1.0), (think_format_reward, 1.0)" in remark
    Path("train.py").write_text(PROGRAM.replace("reward_funcs=functions", "reward_funcs=brief"))
    assert spec_of("train.py", "--bf16", "True")["task.use"] == "my_rewards:brief"
    Path("train.py").write_text(PROGRAM)
    with pytest.raises(ConfigError, match=r"torch\.ok") as refused:
        spec_of("train.py")
    assert refused.value.hint == "add `--bf16 VALUE` after the script"
