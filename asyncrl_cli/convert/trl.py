"""Reads TRL's arguments, and computes values of a spec that need arithmetic. The table of arguments is tables/trl.yaml.

TRL counts completions per device and optimizer updates; asyncrl counts groups and steps. A generation batch in TRL is a
step in asyncrl.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from asyncrl_cli.convert.config import (
    MAX_BYTES,
    ComputedValue,
    ForeignConfig,
    content,
    launched,
    options_of,
    read_file,
    typed_options,
)
from asyncrl_cli.convert.shared import (
    ASSUMED_STEPS,
    DISTILLATION,
    Devices,
    divide_gpus,
    image_settings,
    model_path,
    multiple,
    run_name,
)
from asyncrl_cli.convert.table import Trainer, table
from asyncrl_cli.core.errors import ConfigError

METHODS = {
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "ppo": "PPOConfig",
    "gkd": "GKDConfig",
    "async_grpo": "AsyncGRPOConfig",
}
"""TRL's commands, each with the class of its arguments."""
LAUNCHER_OPTIONS = {
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
PROMPT_TOKENS = 1024
"""`rollout.max_prompt_tokens` if TRL has no limit."""
BUILT_IN_REWARDS = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
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
    line = list(arguments)
    first_word = line[0] if line else "--"
    is_file = os.path.exists(first_word) and not first_word.endswith(".py")
    end = 0 if first_word.startswith("--") or first_word in METHODS or is_file else launched(line, "trl")
    launcher, line = line[:end], line[end:]
    program = Arguments("", [], {})
    if launcher and launcher[-1].endswith(".py") and (os.path.exists(launcher[-1]) or not line):
        program = read_program(launcher[-1])
        if not program.method and not line:
            message = "the program has no call of GRPOConfig or a similar class"
            raise ConfigError(message, location=launcher[-1][-60:], hint=INSTEAD)
    _, launcher_options = options_of([word for word in launcher[:-1] if word != "-m"])
    plain_words, options = options_of(line)
    options = {LAUNCHER_OPTIONS.get(name, name): texts for name, texts in launcher_options.items()} | options
    script = launcher[-1].removesuffix(".py").replace("/", ".").rpartition(".")[2] if launcher else ""
    method = program.method or (script if script in METHODS else "grpo")
    files = []
    for word in plain_words:
        if word in METHODS:
            method = word
        elif os.path.exists(word):
            files.append(word)
        else:
            hint = f"name a file, one of {', '.join(METHODS)}, or --argument value"
            raise ConfigError(f"`{word[:60]}` is neither a file nor an argument of TRL", hint=hint)
    files += options.pop("config", [])
    values = program.values
    if (accelerate := options.get("accelerate_config")) and os.path.exists(accelerate[0]):
        values |= read_file(accelerate[0])  # a file, and not one of TRL's names such as `zero3`
    return Arguments(method, files, values | typed_options(options))


def read_program(path: str) -> Arguments:
    """Read the literals of the calls that configure a Python program's training, without running it: `GRPOConfig` or a
    similar class, its trainer, `LoraConfig` and `load_dataset`. Names of the program's constants count as literals.

    Another value is refused with its line if it decides a key of the spec. Raises ``ConfigError``.
    """
    try:
        tree = ast.parse(content(path, MAX_BYTES))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"the program is not Python: {error}", location=path[-60:], hint=INSTEAD) from None
    constants = {ast.unparse(line.targets[0]): line.value for line in tree.body if isinstance(line, ast.Assign)}

    def literal(node: ast.expr) -> Any:
        node = constants.get(ast.unparse(node), node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return ComputedValue(ast.unparse(node), f"{path}:{node.lineno}")

    method, values = "", dict[str, Any]()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        class_name = ast.unparse(call.func).rpartition(".")[2]
        arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if class_name in METHODS.values():
            method = next(name for name, config in METHODS.items() if config == class_name)
        elif class_name == "LoraConfig":
            values["use_peft"] = True
            arguments = {f"lora_{name.removeprefix('lora_')}": node for name, node in arguments.items()}
        elif class_name == "load_dataset" and "dataset_name" not in values:
            split = {"dataset_train_split": arguments["split"]} if "split" in arguments else {}
            arguments = dict(zip(("dataset_name", "dataset_config"), call.args, strict=False)) | split
        elif class_name.replace("Trainer", "Config") in METHODS.values():
            if functions := arguments.get("reward_funcs"):
                functions = constants.get(ast.unparse(functions), functions)
                names = functions.elts if isinstance(functions, ast.List) else [functions]
                values["reward_funcs"] = [ast.unparse(name) for name in names]
            arguments = {"model_name_or_path": arguments["model"]} if "model" in arguments else {}
        else:
            continue
        values |= {name: literal(node) for name, node in arguments.items()}
    return Arguments(method, [], values)


def settings(c: ForeignConfig) -> dict[str, Any]:
    """Return the values by key of the spec. None: the key is not written."""
    model = c.get("model_name_or_path", "sft_model_path") or "Qwen/Qwen3-0.6B"
    is_frozen = any(map(c.flag, c.matching("freeze_vision*")))
    return {
        "name": run_name(c.name("name", "run_name") or PurePath(str(c.name("name", "output_dir") or "")).name),
        "model.path": model_path(c, model),
        **image_settings(c, model, column=None, limit=0, is_frozen=is_frozen),
        "model.chat_template_kwargs": c.section("chat_template_kwargs."),
        **_task(c),
        **_data(c),
        **_sizes(c),
        **(_distillation(c) if c.get("variant") == "gkd" else {}),
    }


class _Batch(NamedTuple):
    """TRL's batch sizes: completions, and optimizer updates and global steps per generation batch."""

    completions: int
    group_size: int
    passes: int
    updates: int
    global_steps: int
    """`warmup_steps`, `max_steps`, `save_steps` and `eval_steps` count these: updates, but batches in PPO."""

    @classmethod
    def from_arguments(cls, c: ForeignConfig, processes: int) -> _Batch:
        is_ppo = c.get("variant") == "ppo"
        per_device = c.count("per_device_train_batch_size", minimum=1)
        minibatches = c.count("num_mini_batches", minimum=1) if is_ppo else 1
        accumulated = per_device * c.count("gradient_accumulation_steps", minimum=1) * processes
        per_update = max(accumulated // minibatches, 1)
        completions = per_update * minibatches
        if not is_ppo:
            per_generation = per_device * processes * c.count("steps_per_generation")
            completions = c.count("generation_batch_size") or per_generation or per_update
        group_size = 1 if c.get("variant") in ("ppo", "gkd") else c.count("num_generations", minimum=1)
        passes = max(completions // per_update, 1)
        updates = passes * c.count("num_iterations", "num_ppo_epochs", minimum=1)
        return cls(completions, group_size, passes, updates, 1 if is_ppo else updates)


def _sizes(c: ForeignConfig) -> dict[str, Any]:
    is_async, uses_cpu = c.get("variant") == "async_grpo", c.flag("use_cpu")
    processes = c.count("num_processes", minimum=1)  # Accelerate's number, not TRL's
    batch = _Batch.from_arguments(c, processes)
    groups = max(batch.completions // batch.group_size, 1)
    if batch.completions % batch.group_size:
        c.check("indivisible_completions", completions=batch.completions, group_size=batch.group_size)
    if groups % batch.passes:
        c.check("indivisible_groups", groups=groups, passes=batch.passes)

    per_engine = c.count("vllm_tensor_parallel_size", minimum=1)
    if is_async or (c.flag("use_vllm") and c.get("vllm_mode") == "server"):
        devices = Devices(processes, 1, per_engine)
    else:
        devices = divide_gpus(c, processes, per_engine)
    if uses_cpu:
        c.remarks.pop("trainer.ranks", None)
    response = c.count("response_length", "max_completion_length", "max_new_tokens", minimum=1)
    prompt = c.count("max_prompt_length") or max(c.count("vllm_max_model_length", "max_length") - response, 0)
    if not prompt:
        prompt = PROMPT_TOKENS
        c.check("unlimited_prompts", tokens=prompt)

    steps: int | None = None  # None: TRL counts epochs
    if c.number("max_steps") > 0:
        steps = max(multiple(c.number("max_steps"), batch.global_steps) // batch.global_steps, 1)
    elif c.number("total_episodes") > 0:
        steps = math.ceil(c.number("total_episodes") / batch.completions)
    warmup = c.number("warmup_steps")
    # A `warmup_steps` below 1 is a share, like `warmup_ratio`.
    ratio = warmup if 0 < warmup < 1 else 0.0 if warmup else c.number("warmup_ratio")
    if ratio and steps is None:
        c.check("warmup_share", steps=ASSUMED_STEPS)
    if steps is None and c.number("num_train_epochs") % 1:
        c.check("rounded_epochs")
    if not is_async:
        c.check("in_turn")
    versions = (c.count("max_staleness") + 1) * c.count("weight_sync_steps", minimum=1)
    all_steps = steps or ASSUMED_STEPS
    warmup_updates = ratio * all_steps * batch.updates if ratio else int(warmup) * batch.updates // batch.global_steps
    return {
        "model.max_length": prompt + response,
        "rollout.engines": devices.engines,
        "rollout.gpus_per_engine": 0 if uses_cpu else devices.per_engine,
        "rollout.group_size": batch.group_size,
        # TRL's limit is 256. Fewer if all steps within the staleness bound have fewer rollouts.
        "rollout.max_running_rollouts": devices.running_rollouts(256, batch.group_size, groups * versions),
        "rollout.max_prompt_tokens": prompt,
        "rollout.max_response_tokens": response,
        **_objective(c, batch.updates),
        "trainer.ranks": devices.ranks,
        "trainer.gpus_per_rank": 0 if uses_cpu else devices.per_rank,
        "trainer.schedule.warmup_updates": round(warmup_updates),
        "trainer.minibatches": 1 if groups % batch.passes else batch.passes,
        "trainer.tokens_per_microbatch": c.count("per_device_train_batch_size", minimum=1) * (prompt + response),
        "pipeline.groups_per_step": groups,
        "evaluation.every": _interval(c, "evaluation.every", "eval", all_steps, batch.global_steps),
        "checkpoints.every": _interval(c, "checkpoints.every", "save", all_steps, batch.global_steps),
        "stop.steps": steps,
        "stop.epochs": None if steps else max(math.ceil(c.number("num_train_epochs")), 1),
    }


def _interval(c: ForeignConfig, key: str, prefix: str, steps: int, global_steps: int) -> int:
    """An interval in steps. TRL counts global steps, a share of all of them, or epochs."""
    strategy = str(c.get(f"{prefix}_strategy"))
    if strategy in ("no", "False", "None"):
        return 0
    count = c.number(f"{prefix}_steps") or (c.number("logging_steps") if prefix == "eval" else 0)
    if strategy != "steps" or not count:
        c.check("interval_in_epochs", key)
        return 0
    return max(round(count * steps), 1) if count < 1 else multiple(count, global_steps) // global_steps


def _objective(c: ForeignConfig, updates: int) -> dict[str, Any]:
    """The keys of `algorithm` that need arithmetic. ``updates``: optimizer updates per step."""
    if c.get("variant") == "rloo" and updates > 1:
        c.check("sequence_ratios")
    values: dict[str, Any] = {}
    if c.get("loss_type") == "cispo":  # `epsilon_high` is the upper edge itself.
        edge = c.number("epsilon_high", "epsilon")
        if edge <= 1:
            c.check("low_edge")
        values["algorithm.clip_high"] = edge - 1 if edge > 1 else 4.0
    return values


def _distillation(c: ForeignConfig) -> dict[str, Any]:
    """GKD with λ = 1 and β = 1, the reverse KL divergence. The student's samples estimate the sum over the vocabulary
    that TRL computes."""
    c.remarks.pop("task.use", None)
    unclipped = dict.fromkeys(("algorithm.clip_low", "algorithm.clip_high"))  # a step has one update
    teacher = c.get("teacher_model_name_or_path")
    return DISTILLATION | unclipped | {"task.use": "prompts", "algorithm.reference_path": teacher}


def _task(c: ForeignConfig) -> dict[str, Any]:
    """The task with TRL's reward functions, which work unchanged. Several get a function that adds them up."""
    value = c.get("reward_funcs")
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)] if value else []
    task: dict[str, Any] = dict.fromkeys(
        ("algorithm.reward_parts", "algorithm.reward_aggregation", "task.options.field")
    )
    if names == ["accuracy_reward"]:  # TRL's comparison of mathematical answers is the task `math`.
        return task | {"task.use": "math", "task.options.field": "solution"}
    if len(names) == 1 and "get_soft_overlong_punishment" not in names:
        module, _, name = names[0].rpartition(".")
        module = module or ("trl.rewards" if name in BUILT_IN_REWARDS else "my_rewards")
        c.check("copy_rewards", module=module)
        return task | {"task.use": f"{module}:{name}"}
    names = names or ["my_reward"]
    weights_by_name = c.weights("reward_weights", [name.rpartition(".")[2] for name in names])
    c.check("several_rewards", functions=", ".join(f"({name}, {weight})" for name, weight in weights_by_name.items()))
    if c.get("multi_objective_aggregation") == "normalize_then_sum":
        task |= {"algorithm.reward_parts": weights_by_name, "algorithm.reward_aggregation": "normalize_then_sum"}
    return task | {"task.use": "rewards:rewards"}


def _data(c: ForeignConfig) -> dict[str, Any]:
    name = c.get("dataset_name")
    is_local = name is not None and (str(name).startswith((".", "/", "~")) or os.path.exists(str(name)))
    values: dict[str, Any] = {}
    for section, split_name in (("train", "dataset_train_split"), ("eval", "dataset_test_split")):
        values[f"data.{section}.path"] = None if name is None else str(name) if is_local else f"hf:{name}"
        values[f"data.{section}.config"] = None if name is None or is_local else c.get("dataset_config")
        values[f"data.{section}.split"] = None if name is None or is_local else c.get(split_name)
    if name is None or c.get("eval_strategy") in (None, "no", False):
        names = ("path", "config", "split", "prompt_column", "image_column", "system")
        values |= dict.fromkeys(f"data.eval.{key}" for key in names)
    return values


TRAINERS = {method: Trainer("TRL", table("trl"), settings, method) for method in METHODS}
