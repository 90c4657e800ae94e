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
from tests.convert.conftest import DATA, Command, cases, check_case, spec_values

pytestmark = pytest.mark.slow

FOLDER = DATA / "trl"
FILES = sorted(FOLDER.glob("*.yaml"))
ZERO3 = str(FOLDER / "accelerate/deepspeed_zero3.yaml")
BASE = ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--dataset_name", "trl-lib/DeepMath-103K", "--num_processes", "8"]


def converted(*words: str) -> Conversion:
    found = parse(words)
    values = (read_file(found.files[0]) if found.files else {}) | found.values
    return convert(values, TRAINERS[found.method])


def spec_of(*words: str) -> dict[str, Any]:
    """Return the values of the valid spec that arguments give, by dotted key."""
    return spec_values(converted(*words))


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


def test_epochs_stay_epochs(home: Path) -> None:
    text = spec_text(converted("grpo", *BASE, "--num_train_epochs", "2.5", "--warmup_ratio", "0.1"), "test", Path())
    loaded = load_spec("spec.yaml", data=text.encode())
    assert loaded.spec.stop.epochs == 3 and loaded.spec.stop.steps is None and loaded.warnings == ()
    assert "CHECK epochs: epochs are whole numbers here: rounded up" in text
    assert "CHECK warmup_updates: a share of the steps, computed for 100" in text


@pytest.mark.parametrize(("words", "result"), cases("trl"))
def test_settings(home: Path, words: list[str], result: Any) -> None:
    check_case(converted(words[0], *BASE, *words[1:]), words[1:], result)


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


def test_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="are not numbers") as raised:
        converted("grpo", *BASE, "--reward_funcs", "a.b", "c.d", "--reward_weights", "1", "x")
    assert raised.value.location == "reward_weights"


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
    assert refused.value.hint == "add `--bf16 VALUE` after the program"
