"""Reads prime-rl's TOML files and command line, and computes values of a spec. The table is tables/prime_rl.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl_cli.convert.config import ForeignConfig, options_of, read_file, typed_options
from asyncrl_cli.convert.shared import ASSUMED_STEPS, Devices, model_path, run_name
from asyncrl_cli.convert.table import Trainer, table
from asyncrl_cli.core.errors import ConfigError

PROCESSES = ("trainer", "orchestrator", "inference")
VLLM = "inference.vllm."
ASSUMED_PROMPTS = 100


def read_command_line(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the files and keys of a command line such as `uv run rl @ rl.toml --max-steps 9`.

    All files are one configuration, and the last value of a key counts. Raises ``ConfigError``.
    """
    plain_words, options = options_of(words)
    files = [word for word in plain_words if word not in ("uv", "run", "rl", "@", *PROCESSES)]
    if not files and not options:
        raise ConfigError("there is no file and no key", hint="name prime-rl's TOML file, such as rl.toml")
    values: dict[str, Any] = {}
    for file in files:
        process = next((name for name in PROCESSES if Path(file).stem.startswith((name[:5], name[:4]))), "")
        file_values = {
            key: value for key, value in read_file(file).items() if value != {}
        }  # an empty table says nothing
        values |= {f"{process}.{key}" if process else key: value for key, value in file_values.items()}
    overrides = typed_options(options)
    replaced = [key for key in values if any(key.startswith(f"{name}.") for name in overrides)]
    return files, {key: value for key, value in values.items() if key not in replaced} | overrides


def _environments(c: ForeignConfig, section: str) -> list[dict[str, Any]]:
    """The mappings in a list of environments, with the environment's own arguments under `env`."""
    nested: dict[str, Any] = {}
    prefix = f"orchestrator.{section}.source."
    for name in c.matching(f"{prefix}*"):
        *sections, key = name.removeprefix(prefix).split(".")
        inner = nested
        for path_key in sections:
            inner[path_key] = inner[path_key] if isinstance(inner.get(path_key), dict) else {}
            inner = inner[path_key]
        inner[key] = c.values[name]
    mappings = [mapping for mapping in nested.values() if isinstance(mapping, dict)]
    return [mapping | {"env": env if isinstance(env := mapping.get("env"), dict) else {}} for mapping in mappings]


def _tasks(c: ForeignConfig) -> dict[str, Any]:
    mix = [
        {
            "name": run_name(environment.get("name")) or f"source-{index}",
            "weight": environment.get("ratio", 1.0),
            "use": "verifiers",
            "options": environment["env"],
        }
        for index, environment in enumerate(_environments(c, "train"))
    ]
    sets: dict[str, Any] = {}
    for index, environment in enumerate(_environments(c, "eval")):
        count, samples, every = (
            environment.get(key, c.get(f"$eval.{key}")) for key in ("num_examples", "group_size", "interval")
        )
        has_count = isinstance(count, int) and count > 0
        sets[re.sub(r"\W", "_", str(environment.get("name") or f"set_{index}"))[:28]] = {
            "data": {"size": count if has_count else ASSUMED_PROMPTS},
            "task": {"use": "verifiers", "options": environment["env"] | {"held_out": False}},
            "every": every,
            "greedy": False,
            "samples": samples,
        }
        if not has_count:
            c.check("all_examples", prompts=ASSUMED_PROMPTS)
    is_single = len(mix) == 1
    c.check("held_out" if mix else "no_task", "task.options" if is_single else "task.mix")
    return {
        "task.use": mix[0]["use"] if is_single else None,
        "task.options": mix[0]["options"] if is_single else None,
        "task.mix": None if is_single else mix,
        "evaluation.sets": sets or None,
    }


def settings(c: ForeignConfig) -> dict[str, Any]:
    """Return the values by key of the spec. None: the key is not written."""
    per_engine, group_size = c.count(f"{VLLM}tensor_parallel_size", minimum=1), c.count("$group_size", minimum=1)
    node_gpus = c.count("deployment.gpus_per_node") if c.get("deployment.type") == "multi_node" else 0
    generating = c.count("deployment.num_infer_nodes") * node_gpus * c.count("deployment.num_infer_replicas")
    generating = generating or c.count("deployment.num_infer_gpus")
    training = c.count("deployment.num_train_nodes") * node_gpus or c.count("deployment.num_train_gpus")
    engines = max(generating // per_engine, c.count(f"{VLLM}data_parallel_size"), 1)
    devices = Devices(max(training, 1), engines, per_engine)
    groups = max(c.count("$batch_size") // group_size, 1)
    running = max(c.count("$concurrency.max_inflight") // engines, 1)

    length = c.count("trainer.model.seq_len", "$seq_len", "seq_len")
    response = c.count("$train.sampling.max_completion_tokens")
    if not 0 < response < length:
        c.check("half_response")
        response = length // 2
    has_lora, rate = c.section("trainer.model.lora.") is not None, c.number("trainer.optim.lr")
    decays = rate and c.get("trainer.scheduler.type") != "constant"
    step_limits = c.matching("*max_steps")
    if c.get(*step_limits) is None:
        c.check("no_end", steps=ASSUMED_STEPS)
    path = c.get("trainer.model.name", "$model.name", f"{VLLM}model", "model.name")
    return {
        "name": run_name(c.get("run.name", *c.matching("*monitors.wandb.name"))),
        "model.path": model_path(c, path),
        "model.max_length": length,
        "model.lora.rank": c.count("trainer.model.lora.rank") if has_lora else None,
        "model.lora.alpha": c.number("trainer.model.lora.alpha") if has_lora else None,
        **_tasks(c),
        "rollout.engines": engines,
        "rollout.max_running_rollouts": devices.running_rollouts(running, group_size, groups * 9),
        "rollout.max_prompt_tokens": length - response,
        "rollout.max_response_tokens": response,
        "trainer.ranks": devices.ranks,
        "trainer.schedule.final_fraction": c.number("trainer.scheduler.min_lr") / rate if decays else None,
        "trainer.tokens_per_microbatch": length,
        "pipeline.groups_per_step": groups,
        "stop.steps": c.get(*step_limits) or ASSUMED_STEPS,
    }


TRAINER = Trainer("prime-rl", table("prime_rl"), settings)
