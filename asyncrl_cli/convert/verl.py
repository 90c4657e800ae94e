"""Values of a spec that need arithmetic, or several of verl's keys. The table of keys is tables/verl.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.convert.config import ForeignConfig, launched
from asyncrl_cli.convert.shared import (
    ASSUMED_STEPS,
    DISTILLATION,
    Devices,
    divide_gpus,
    image_settings,
    model_path,
    multiple,
    run_name,
    sees_images,
)
from asyncrl_cli.convert.table import Trainer, table
from asyncrl_cli.core.errors import ConfigError

CORRECTION = "algorithm.rollout_correction."
LOSS = "distillation.distillation_loss."
TEACHERS = "distillation.teacher_models.*.model_path"
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
)
INSTEAD = (
    "convert the shell script that starts it, or have Hydra print its configuration, `bash run.sh --cfg job > "
    "config.yaml`, and convert that file (docs/from-verl.md)"
)
ARGUMENT = r"[+~]*[a-z]\w*(\.\w+)+="
"""A pattern for an override on a command line."""


def read_command_line(line: list[str]) -> tuple[str, list[str]]:
    """Return the name of the program or its configuration, and the overrides and files of a command line.

    A configuration that `--config-path` and `--config-name` find is the first file. Raises ``ConfigError``.
    """
    end = launched(line)
    if line and line[-1].endswith(".py") and end == len(line):
        raise ConfigError("programs are not read", location=line[-1][-60:], hint=INSTEAD)
    words, options = [], {}
    remaining_words = iter(line[end:])
    for word in remaining_words:
        if not word.startswith("-"):
            words += [] if word == "$@" else [word]  # the script's arguments
            continue
        name, equals, value = word.partition("=")
        options[name] = (value if equals else next(remaining_words, "")).strip("'\"")
        if name not in ("--config-path", "--config-name", "--config-dir"):
            raise ConfigError(f"`{word[:60]}` is not an override of verl", hint="overrides are key=value")
    name = options.get("--config-name", "").removesuffix(".yaml")
    if name and not re.fullmatch(r"(one_step_off_|fully_async_)?ppo_(megatron_)?trainer", name):
        file = Path(options.get("--config-path") or options.get("--config-dir") or ".", f"{name}.yaml")
        if not file.is_file():
            message = f"`{name[:60]}` is not one of verl's configurations, and there is no file {str(file)[-60:]}"
            raise ConfigError(message, hint=INSTEAD)
        words.insert(0, str(file))
    return name or (line[end - 1] if end else ""), words


def trainer_of(name: str, values: Mapping[str, Any]) -> Trainer:
    """Return the trainer with the defaults of a program, given its configuration's name, or else by its keys."""
    text = f"{name} {values.get('defaults')}"
    if "fully_async" in text or any(key.startswith("async_training.") for key in values):
        return TRAINERS["fully_async"]
    return TRAINERS["one_step_off" if "one_step_off" in text or "rollout.nnodes" in values else "ppo"]


def settings(c: ForeignConfig) -> dict[str, Any]:
    """Return the values by key of the spec. None: the key is not written."""
    estimator = str(c.get("algorithm.adv_estimator"))
    prompt_tokens, response_tokens = c.count("data.max_prompt_length"), c.count("data.max_response_length")
    if c.count("$rollout.prompt_length") not in (0, prompt_tokens):
        c.check("other_prompt_length")
    if c.count("$rollout.response_length") not in (0, response_tokens):
        c.check("other_response_length")
    path, column = c.get("$model.path"), c.get("data.image_key")
    if column in (None, "images"):  # verl's default, which text-only configurations have, too
        if column and not sees_images(path):
            c.check("default_image_column")
        column = "images" if sees_images(path) else None
    image_limit = c.count(*c.matching("*limit_mm_per_prompt.image"), *c.matching("*limit_images"))
    overlong = next((name for name in OVERLONG if c.flag(f"{name}enable")), None)
    values = {
        "name": run_name(c.name("name", "trainer.experiment_name")),
        "model.path": model_path(c, path),
        **image_settings(c, path, column, image_limit, c.flag("$actor.freeze_vision_tower")),
        "model.max_length": prompt_tokens + response_tokens,
        "model.chat_template_kwargs": c.section("data.apply_chat_template_kwargs."),
        "model.lora.rank": max(c.count("$model.lora_rank"), c.count("$model.lora.rank")) or None,
        "task.use": _task(c),
        "data.train.path": _data_path(c, "data.train.path", c.get("data.train_files")),
        **_reward_parts(c, estimator),
        "algorithm.clip_low": _clip_low(c),
        **_correction(c),
        "algorithm.critic.warmup_steps": max(c.count("trainer.critic_warmup") - 1, 0) if estimator == "gae" else None,
        "algorithm.overlong_penalty": (c.number(f"{overlong}penalty_factor") or 1.0) if overlong else 0.0,
        "algorithm.overlong_buffer": min(c.number(f"{overlong}len") / max(response_tokens, 1), 1) if overlong else None,
        **_sizes(c, prompt_tokens + response_tokens, has_images=bool(column or image_limit or sees_images(path))),
        **_held_out(c, column),
        **_distillation(c),
    }
    if c.get("model_engine") == "veomni" and "actor_rollout_ref.actor.optim.lr_scheduler_type" not in c.values:
        values["trainer.schedule.kind"] = "cosine"
    return values


def _clip_low(c: ForeignConfig) -> float | None:
    if c.get("$actor.policy_loss.loss_mode") == "sapo":
        return None
    # Ratios are never negative, so a clip_low above 1 has no effect.
    return min(c.number("$actor.clip_ratio_low", "$actor.clip_ratio"), 1.0)


def _reward_parts(c: ForeignConfig, estimator: str) -> dict[str, Any]:
    keys, weights = c.get("algorithm.gdpo_reward_keys"), c.get("algorithm.gdpo_reward_weights")
    names = [str(name) for name in keys] if isinstance(keys, list) else []
    if estimator != "gdpo":
        return {"algorithm.reward_parts": None}
    if not names or (weights and (not isinstance(weights, list) or len(names) != len(weights))):
        c.check("unnamed_rewards")
    return {"algorithm.reward_parts": c.weights("algorithm.gdpo_reward_weights", names) or None}


class _Pace(NamedTuple):
    """How generation and training overlap: values of `pipeline`, and which GPUs generate."""

    mode: str
    max_staleness: int | None = None
    publish_every: int = 1
    weight_update: str | None = None
    generating_prefix: str = ""
    """The prefix of the keys that count the generating GPUs; empty if all GPUs generate and train in turn."""

    @classmethod
    def from_program(cls, c: ForeignConfig) -> _Pace:
        threshold = c.count("trainer.v1.sampler.max_off_policy_threshold") - 1
        match c.get("variant"), c.get("trainer.v1.trainer_mode"):
            case "fully_async", _:
                return cls(
                    "async",
                    math.ceil(c.number("async_training.staleness_threshold")),
                    c.count("async_training.trigger_parameter_sync_step", minimum=1),
                    # verl either aborts rollouts and continues them with a new KV cache, or lets them finish.
                    "recompute" if c.flag("async_training.partial_rollout") else "drain",
                    "rollout.",
                )
            case "one_step_off", _:
                return cls("one_step_off", generating_prefix="rollout.")
            case _, "separate_async":
                publish_every = c.count("trainer.v1.separate_async.parameter_sync_step", minimum=1)
                return cls("async", max(threshold, 1), publish_every, "recompute", "$rollout.")
            case _, "colocate_async":
                return cls("async", max(threshold, 1), weight_update="recompute")
        c.check("in_turn")
        return cls("sync")


def _sizes(c: ForeignConfig, max_tokens: int, *, has_images: bool) -> dict[str, Any]:
    """Devices, batches, versions and steps. ``max_tokens``: tokens of the longest prompt and response together."""
    pace, is_fully_async = _Pace.from_program(c), c.get("variant") == "fully_async"
    per_update, group_size = c.count("$actor.ppo_mini_batch_size"), c.count("$rollout.n", minimum=1)
    groups = c.count("data.train_batch_size", minimum=1)
    if is_fully_async:
        groups = max(per_update * c.count("async_training.require_batches"), 1)
    minibatches = 1
    if per_update and groups % per_update == 0:
        minibatches = groups // per_update
    else:
        c.check("indivisible_batch", groups=groups, per_update=per_update)

    steps: int | None = None  # None: verl counts epochs
    if c.number("trainer.total_training_steps") > 0:
        steps = multiple(c.number("trainer.total_training_steps"), pace.publish_every)
    elif is_fully_async and c.number("rollout.total_rollout_steps") > 0:
        steps = multiple(max(c.count("rollout.total_rollout_steps") // groups, 1), pace.publish_every)
    warmup = c.number("$actor.optim.lr_warmup_steps")
    if warmup < 0:
        warmup = max(c.number("$actor.optim.lr_warmup_steps_ratio"), 0) * (steps or ASSUMED_STEPS)
        if warmup and steps is None:
            c.check("warmup_share", steps=ASSUMED_STEPS)

    per_engine = c.count("$rollout.tensor_model_parallel_size", minimum=1)
    gpu_count = c.count("trainer.nnodes") * c.count("trainer.n_gpus_per_node")
    if not pace.generating_prefix:
        devices = divide_gpus(c, gpu_count, per_engine)
    else:
        nodes, per_node = (c.count(pace.generating_prefix + name, minimum=1) for name in ("nnodes", "n_gpus_per_node"))
        devices = Devices(max(gpu_count, 1), max(nodes * per_node // per_engine, 1), per_engine)
    per_sequence = c.count("$actor.ulysses_sequence_parallel_size", minimum=1)
    if has_images and per_sequence > 1:
        c.check("whole_images", gpus=per_sequence)
        per_sequence = 1
    max_ranks = groups * group_size // minibatches * per_sequence
    if 0 < max_ranks < devices.ranks:
        c.check("idle_ranks", gpus=devices.ranks, rollouts=max_ranks)
        devices = devices._replace(ranks=max_ranks)
    tokens = max_tokens * c.count("$actor.ppo_micro_batch_size_per_gpu", minimum=1)
    if c.flag("$actor.use_dynamic_bsz"):
        tokens = max(per_sequence * c.count("$actor.ppo_max_token_len_per_gpu"), max_tokens)
    if devices.ranks % per_sequence:
        c.check("indivisible_ranks", gpus=per_sequence, ranks=devices.ranks)
    ahead = ((pace.max_staleness or 0) + 1 + (pace.mode == "one_step_off")) * pace.publish_every
    memory = c.get("$rollout.standalone_gpu_memory_utilization", "$rollout.gpu_memory_utilization")
    running = devices.running_rollouts(c.count("$rollout.max_num_seqs"), group_size, groups * ahead)
    interval = pace.publish_every if is_fully_async else 1  # verl's asynchronous trainer counts versions
    return {
        "rollout.engines": devices.engines,
        "rollout.gpus_per_engine": devices.per_engine,
        "rollout.engine_args.gpu_memory_utilization": memory if pace.generating_prefix else None,
        "rollout.max_running_rollouts": running,
        "trainer.ranks": devices.ranks,
        "trainer.gpus_per_rank": devices.per_rank,
        # verl advances its schedule once per step, asyncrl once per update.
        "trainer.schedule.warmup_updates": round(warmup * c.count("$actor.ppo_epochs", minimum=1) * minibatches),
        "trainer.minibatches": minibatches,
        "trainer.tokens_per_microbatch": tokens,
        "trainer.sequence_parallel": 1 if devices.ranks % per_sequence else per_sequence,
        "pipeline.mode": pace.mode,
        "pipeline.max_staleness": pace.max_staleness,
        "pipeline.groups_per_step": groups,
        "pipeline.publish_every": pace.publish_every,
        "pipeline.weight_update": pace.weight_update,
        "stop.steps": steps,
        "stop.epochs": None if steps else c.count("trainer.total_epochs", minimum=1),
        "evaluation.every": multiple(c.count("trainer.test_freq", minimum=0) * interval, pace.publish_every),
        "checkpoints.every": multiple(c.count("trainer.save_freq", minimum=0) * interval, pace.publish_every),
    }


def _data_path(c: ForeignConfig, key: str, path: object) -> str | list[str] | None:
    files = [str(file) for file in (path if isinstance(path, list) else [path]) if file is not None]
    if not all(re.search(r"\.(jsonl?|parquet|csv)$", file) or ":" in file for file in files):
        c.check("file_type", key)
    return files if len(files) > 1 else files[0] if files else None


def _distillation(c: ForeignConfig) -> dict[str, Any]:
    """Distillation by policy gradient. The sampled token's advantage is minus k1, as with `preset: distill`."""
    if not c.flag("distillation.enabled"):
        return dict.fromkeys(("algorithm.reference_path", "algorithm.reward_coef"))
    teachers = [c.values[name] for name in c.matching(TEACHERS) if c.values[name]]
    if len(teachers) != 1:
        c.unsupported.append(f"{TEACHERS}: a run has one teacher, and there are {len(teachers)}")
    has_reward = c.get("reward.custom_reward_function.path", "custom_reward_function.path")
    task = {}
    if not has_reward and not c.flag("$rollout.multi_turn.enable"):
        del c.remarks["task.use"]
        task = {"task.use": "prompts"}
    return {
        **task,
        **DISTILLATION,
        "algorithm.reference_path": teachers[0] if teachers else None,
        "algorithm.clip_low": c.number(f"{LOSS}clip_ratio_low"),
        "algorithm.clip_high": c.number(f"{LOSS}clip_ratio_high"),
        "algorithm.dual_clip": 3.0,
        "algorithm.loss": "clip",
    }


def _correction(c: ForeignConfig) -> dict[str, Any]:
    """Bounds of weights and of rejection. In bypass mode the clipped ratio is the correction."""
    values: dict[str, Any] = dict.fromkeys(("cap", "mask_low", "mask_high", "reject_low", "reject_high"))
    if not c.flag(f"{CORRECTION}bypass_mode"):
        if c.get(f"{CORRECTION}rollout_is") in ("token", "sequence"):
            low, high = _bounds(c, f"{CORRECTION}rollout_is_threshold")
            values |= {"cap": high} if low is None else {"mask_low": low, "mask_high": high if low else None}
        if re.fullmatch(r"(token|seq_(sum|mean|max))_k[123]", str(c.get(f"{CORRECTION}rollout_rs"))):
            values["reject_low"], values["reject_high"] = _bounds(c, f"{CORRECTION}rollout_rs_threshold")
    return {f"algorithm.correction.{key}": value for key, value in values.items()}


def _bounds(c: ForeignConfig, name: str) -> tuple[float | None, float | None]:
    """Lower and upper bound from a threshold of verl: a number (the upper bound), or a text `lower_upper`."""
    try:
        bounds = [float(text) for text in str(c.get(name) or "").split("_")[:2] if text]
    except ValueError:
        return None, None
    return (bounds[0], bounds[1]) if len(bounds) == 2 else (None, bounds[0] if bounds else None)


def _task(c: ForeignConfig) -> str:
    """`task.use`. Reward functions for verl work unchanged."""
    if c.flag("$rollout.multi_turn.enable"):
        c.check("turns")
        return "environment:Environment"
    path = c.get("reward.custom_reward_function.path", "custom_reward_function.path")
    name = c.get("reward.custom_reward_function.name", "custom_reward_function.name") or "compute_score"
    if not path:
        c.check("verl_rewards")
        return "verl.utils.reward_score:default_compute_score"
    if str(path).startswith("pkg://"):
        return f"{str(path)[6:]}:{name}"
    stem = re.sub(r"\W", "_", str(path).rpartition("/")[2].removesuffix(".py"))
    c.check("copy_rewards", path=path, stem=stem)
    return f"{stem}:{name}"


def _held_out(c: ForeignConfig, image_column: Any) -> dict[str, Any]:
    """`data.eval.path` is the first file. The other files are `evaluation.sets`, each named after its folder."""
    held_out = c.get("data.val_files")
    files = [str(path) for path in held_out] if isinstance(held_out, list) else [str(held_out)] if held_out else []
    if not files:
        columns = [f"data.eval.{key}" for key in ("path", "size", "prompt_column", "image_column")]
        return dict.fromkeys([*columns, "evaluation.every", "evaluation.sets"])
    sets: dict[str, Any] = {}
    for path in files[1:]:
        *_, folder, file = ["", *path.split("/")]
        name = re.sub(r"\W", "_", folder or file.partition(".")[0])[:28] or "set"
        unique_name = next(name + suffix for suffix in ("", *map(str, range(2, 99))) if name + suffix not in sets)
        data = {"path": path, "prompt_column": c.get("data.prompt_key"), "image_column": image_column}
        sets[unique_name] = {"data": {key: value for key, value in data.items() if value is not None}}
    return {
        "data.eval.path": _data_path(c, "data.eval.path", files[:1]),
        "evaluation.sets": sets or None,
    }


TRAINERS = {variant: Trainer("verl", table("verl"), settings, variant) for variant in table("verl").variants}
"""verl's programs: `ppo`, `one_step_off` and `fully_async`."""
