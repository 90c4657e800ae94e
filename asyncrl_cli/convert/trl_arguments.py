"""Parses TRL's arguments: YAML or JSON files, and the command line of `trl grpo` or a script."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.convert.script import ShellText, Unknown
from asyncrl_cli.convert.source import content, launched, options_of, read_file, short, typed, words
from asyncrl_cli.convert.trl import DEFAULTS
from asyncrl_cli.core.errors import ConfigError

_LAUNCHER_OPTIONS = {
    "config_file": "accelerate_config",
    "zero_stage": "deepspeed_config.zero_stage",
    "nproc_per_node": "num_processes",
    "num_gpus": "num_processes",
}
"""Options of Accelerate, torchrun and DeepSpeed before the name of the script, and our names for them."""
INSTEAD = (
    "give the command line, `asyncrl convert trl grpo --learning_rate 1e-6 ...`, or have the script print its "
    "arguments as JSON (docs/from-trl.md)"
)


class Arguments(NamedTuple):
    """The trainer, the configuration files, and the command line's arguments, which apply to each file."""

    method: str
    files: list[str]
    values: dict[str, Any]


def parse(arguments: Sequence[str]) -> Arguments:
    """Parse a command line: `trl grpo`, files, `--config FILE`, `--name value…`, `--name=value`, `--flag`.

    It may start with a script and its launcher, such as `accelerate launch --num_processes 8 train.py`. Raises
    ``ConfigError`` for any other word.
    """
    line = words(arguments, "--")
    end = 0 if _begins_with_arguments(line) else launched(line, "trl")
    launcher, line = line[:end], line[end:]
    program = Arguments("", [], {})
    if launcher and launcher[-1].endswith(".py") and (os.path.exists(launcher[-1]) or not line):
        program = read_program(launcher[-1])
        if not program.method and not line:
            message = "the program has no call of GRPOConfig or a similar class"
            raise ConfigError(message, location=short(launcher[-1]), hint=INSTEAD)
    _, options = options_of([word for word in launcher[:-1] if word != "-m"])
    options = {_LAUNCHER_OPTIONS.get(name, name): texts for name, texts in options.items()}
    plain, own = options_of(line)
    options |= own
    script = launcher[-1].removesuffix(".py").replace("/", ".").rpartition(".")[2] if launcher else ""
    method = program.method or (script if script in DEFAULTS else "grpo")
    files = []
    for word in plain:
        if word in DEFAULTS:
            method = word
        elif os.path.exists(word):
            files.append(word)
        else:
            hint = f"name a file, one of {', '.join(DEFAULTS)}, or --argument value"
            raise ConfigError(f"`{short(word)}` is neither a file nor an argument of TRL", hint=hint)
    files += options.pop("config", [])
    values = program.values
    if (accelerate := options.get("accelerate_config")) and os.path.exists(accelerate[0]):
        values |= read_file(accelerate[0])  # a file, and not one of TRL's names such as `zero3`
    return Arguments(method, files, values | typed(options))


def _begins_with_arguments(line: Sequence[str]) -> bool:
    first = line[0] if line else "--"
    return first.startswith("--") or first in DEFAULTS or (os.path.exists(first) and not first.endswith(".py"))


_CONFIGS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "PPOConfig": "ppo",
    "GKDConfig": "gkd",
    "AsyncGRPOConfig": "async_grpo",
}


def read_program(path: str) -> Arguments:
    """Read a Python program without running it: literals of `GRPOConfig`, `LoraConfig`, `load_dataset` and the trainer.

    A value that only a run gives is refused if it decides a key of the spec. Raises ``ConfigError``.
    """
    try:
        tree = ast.parse(content(path, "script"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = f"the program is not Python: {error}"
        raise ConfigError(message, location=short(path), hint=INSTEAD) from None
    constants = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    modules = {
        alias.asname or alias.name: f"{statement.module}.{alias.name}"
        for statement in ast.walk(tree)
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    own_names = {statement.name for statement in ast.walk(tree) if isinstance(statement, ast.FunctionDef)}

    def literal(node: ast.expr) -> Any:
        resolved = constants.get(node.id, node) if isinstance(node, ast.Name) else node
        try:
            return ast.literal_eval(resolved)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            unknown = Unknown(short(ast.unparse(node)), f"line {node.lineno} computes it")
            return ShellText.of_segments((unknown,), f"{path}:{node.lineno}")

    def functions(node: ast.expr) -> Any:
        resolved = constants.get(node.id, node) if isinstance(node, ast.Name) else node
        names = [ast.unparse(item) for item in (resolved.elts if isinstance(resolved, ast.List) else [node])]
        return [modules.get(name) or (f"{Path(path).stem}.{name}" if name in own_names else name) for name in names]

    method, values = "", dict[str, Any]()
    for name, call in _calls(tree):
        options = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if name in _CONFIGS:
            method = _CONFIGS[name]
            values |= {option: literal(node) for option, node in options.items()}
        elif name == "LoraConfig":
            renamed = {option: f"lora_{option.removeprefix('lora_')}" for option in options}
            values |= {"use_peft": True} | {renamed[option]: literal(node) for option, node in options.items()}
        elif name == "load_dataset" and "dataset_name" not in values:
            places = dict(zip(("dataset_name", "dataset_config"), call.args, strict=False))
            places |= {"dataset_train_split": options["split"]} if "split" in options else {}
            values |= {option: literal(node) for option, node in places.items()}
        elif name.removesuffix("Trainer") + "Config" in _CONFIGS:
            rewards, model = options.get("reward_funcs"), options.get("model")
            values |= {"reward_funcs": functions(rewards)} if rewards else {}
            values |= {"model_name_or_path": literal(model)} if model else {}
    return Arguments(method, [], values)


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node
