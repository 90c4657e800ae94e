"""Computes values of a spec that need arithmetic, or several of verl's keys. The table of keys is in ``verl.py``."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from asyncrl_cli.convert.common import (
    ASSUMED_STEPS,
    DISTILLATION,
    IN_TURN,
    Devices,
    divided,
    images,
    model_path,
    multiple,
    run_name,
    running_rollouts,
    sees_images,
    split,
    tracking,
)
from asyncrl_cli.convert.source import Source, shown
from asyncrl_cli.spec.data_sources import kind_of

A = "actor_rollout_ref.actor."
R = "actor_rollout_ref.rollout."
M = "actor_rollout_ref.model."
F = f"{A}fsdp_config."
V1 = "trainer.v1."
D = "distillation."
L = f"{D}distillation_loss."
PROGRAM = "program"
"""Not a key of verl: `ppo`, `one_step_off` or `fully_async`."""
TEACHERS = f"{D}teacher_models.*.model_path"
CORRECTION = "algorithm.rollout_correction."
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
)

ESTIMATORS = {
    "gae": ("ppo", "gae"),
    "grpo": ("grpo", "group_norm"),
    "grpo_vectorized": ("grpo", "group_norm"),
    "gdpo": ("grpo", "group_norm"),
    "rloo": ("rloo", "leave_one_out"),
    "rloo_vectorized": ("rloo", "leave_one_out"),
    "reinforce_plus_plus": ("reinforce_pp", "none"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "group_mean"),
}
"""The preset and `algorithm.advantage` for each of verl's advantage estimators."""
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
TOOL_FORMATS = {
    "gpt-oss": "openai",
    "hermes": "hermes",
    "llama3": "llama3_json",
    "llama3_json": "llama3_json",
    "qwen": "hermes",
    "qwen3_coder": "qwen3_coder",
}
"""vLLM's parser for each of verl's tool formats."""
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "sequence_sum",
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}

Mode = Literal["sync", "one_step_off", "colocate_async", "separate_async", "fully_async"]


def settings(s: Source) -> dict[str, Any]:
    """Return the values by key of the spec. None: the key is not written."""
    gae = s.get("algorithm.adv_estimator") == "gae"
    loss_mode = s.get(f"{A}policy_loss.loss_mode")
    estimator = _chosen(s, key="algorithm.advantage", name="algorithm.adv_estimator", table=ESTIMATORS, fallback="grpo")
    loss = _chosen(s, key="algorithm.loss", name=f"{A}policy_loss.loss_mode", table=LOSSES, fallback="vanilla")
    lora_rank = max(s.count(f"{M}lora_rank"), s.count(f"{M}lora.rank"))
    in_turns = s.flag(f"{R}multi_turn.enable")
    prompt_tokens, response_tokens = s.count("data.max_prompt_length"), s.count("data.max_response_length")
    if s.get("data.truncation") in ("left", "right", "middle") and not s.flag("data.filter_overlong_prompts"):
        s.remark("rollout.max_prompt_tokens", "verl truncates longer prompts, and trains on them")
    if s.get(f"{R}do_sample") is not None and not s.flag(f"{R}do_sample"):
        s.remark("rollout.sampling.temperature", "do_sample is false in verl; here rollouts are always sampled")
    schedule = s.get(f"{A}optim.warmup_style", f"{A}optim.lr_scheduler_type", f"{A}optim.lr_decay_style")
    if s.get("model_engine") == "veomni" and f"{A}optim.lr_scheduler_type" not in s.given:
        schedule = "cosine"
    divisors = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": s.count(f"{A}loss_scale_factor") or None}
    offloads_all = s.flag(f"{F}param_offload") or s.flag(f"{F}offload_policy")
    router_replay = s.get(f"{A}router_replay.mode")
    if router_replay == "R2":
        only = "R2 replays the trainer's choice of experts; asyncrl has only R3, which replays the engine's choice"
        s.remark("algorithm.router_replay", only)
    overlong = next((name for name in OVERLONG if s.flag(f"{name}enable")), None)
    path = s.text("model.path", f"{M}path")
    column = s.get("data.image_key")
    if column in (None, "images"):  # verl's default, which text-only configurations have, too
        if column and not sees_images(path):
            s.remark("data.train.image_column", "verl reads images from the column images, if the data has it")
        column = "images" if sees_images(path) else None
    limits = s.matching("*limit_mm_per_prompt.image") + s.matching("*limit_images")
    frozen = s.flag(f"{A}freeze_vision_tower")
    return {
        "name": run_name(s.text("name", "trainer.experiment_name")),
        "model.path": model_path(path, s),
        **images(s, path, column, s.count(*limits), frozen),
        "model.max_length": prompt_tokens + response_tokens,
        "model.chat_template_kwargs": s.section("data.apply_chat_template_kwargs."),
        "model.lora.rank": lora_rank or None,
        "model.lora.alpha": s.number(f"{M}lora_alpha") if lora_rank else None,
        "model.lora.target_modules": s.get(f"{M}target_modules") if lora_rank else None,
        "task.use": _task(s, in_turns),
        "task.episode.max_calls": s.get(f"{R}multi_turn.max_assistant_turns") if in_turns else None,
        "data.train.path": _data_path(s, "data.train.path", s.text("data.train.path", "data.train_files")),
        "data.train.size": max(s.count("data.train_max_samples"), 0) or None,
        "rollout.max_prompt_tokens": prompt_tokens,
        "rollout.sampling.temperature": s.get(f"{R}temperature"),
        "rollout.dtype": _dtype(s, "rollout.dtype", s.get(f"{R}dtype")),
        "rollout.tool_parser": _chosen(
            s, key="rollout.tool_parser", name=f"{R}multi_turn.format", table=TOOL_FORMATS, fallback="hermes"
        )
        if in_turns and s.get(f"{R}multi_turn.format")
        else None,
        # Only a name, because all keys that a preset decides are written.
        "algorithm.preset": loss if estimator[0] == "grpo" and loss != "clip" else estimator[0],
        "algorithm.advantage": _advantage(s, estimator[1]),
        "algorithm.whiten_advantages": s.get("algorithm.adv_estimator") in WHITENED,
        **_parts(s),
        "algorithm.loss": loss,
        # Ratios are never negative, so a clip_low above 1 has no effect.
        "algorithm.clip_low": min(s.number(f"{A}clip_ratio_low", f"{A}clip_ratio"), 1.0),
        "algorithm.clip_high": s.number(f"{A}clip_ratio_high", f"{A}clip_ratio"),
        "algorithm.dual_clip": s.get(f"{A}clip_ratio_c") if loss_mode == "vanilla" else None,
        "algorithm.sapo_temperatures": [s.number(f"{A}tau_pos"), s.number(f"{A}tau_neg")]
        if loss_mode == "sapo"
        else None,
        "algorithm.aggregation": _chosen(
            s, key="algorithm.aggregation", name=f"{A}loss_agg_mode", table=AGGREGATIONS, fallback="token-mean"
        ),
        "algorithm.sequence_divisor": divisors.get(str(s.get(f"{A}loss_agg_mode"))),
        "algorithm.entropy_coef": s.number(f"{A}entropy_coeff"),
        **_kl(s),
        "algorithm.router_replay": router_replay == "R3" or None,
        **_correction(s),
        "algorithm.overlong_penalty": (s.number(f"{overlong}penalty_factor") or 1.0) if overlong else 0.0,
        "algorithm.overlong_buffer": min(s.number(f"{overlong}len") / max(response_tokens, 1), 1.0)
        if overlong
        else None,
        "algorithm.uniform_groups": "reject" if s.flag("algorithm.filter_groups.enable") else "train",
        "algorithm.critic.learning_rate": s.get("critic.optim.lr") if gae else None,
        "algorithm.critic.value_clip": s.get("critic.cliprange_value") if gae else None,
        "algorithm.critic.warmup_steps": s.count("trainer.critic_warmup") if gae else None,
        "trainer.zero_stage": 3,
        "trainer.dtype": _dtype(s, "trainer.dtype", s.get(f"{F}dtype")),
        "trainer.schedule.kind": schedule if schedule in ("linear", "cosine") else "constant",
        "trainer.attention": s.get(f"{M}override_config.attn_implementation") or "flash_attention_2",
        "trainer.offload": "all" if offloads_all else "optimizer" if s.flag(f"{F}optimizer_offload") else "none",
        **_sizes(s, prompt_tokens + response_tokens, has_images=bool(column or s.count(*limits) or sees_images(path))),
        **_held_out(s, column),
        "evaluation.temperature": s.number(f"{R}val_kwargs.temperature") or None
        if s.flag(f"{R}val_kwargs.do_sample")
        else None,
        **tracking(s, "trainer.logger", project=s.text("tracking.experiment", "trainer.project_name")),
        **_distillation(s),
    }


def _sizes(s: Source, max_tokens: int, *, has_images: bool) -> dict[str, Any]:
    """Devices, batches, versions and steps. ``max_tokens``: tokens of the longest prompt and response together."""
    mode = _mode(s)
    in_turn = mode in ("sync", "colocate_async")  # all GPUs generate, and then all GPUs train
    fully_async = mode == "fully_async"
    if mode == "sync":
        s.remark("pipeline.mode", IN_TURN)
    staleness = None
    if fully_async:
        staleness = math.ceil(s.number("async_training.staleness_threshold"))
    elif mode in ("separate_async", "colocate_async"):
        staleness = max(s.count(f"{V1}sampler.max_off_policy_threshold") - 1, 1)
    # verl either aborts rollouts and continues them with a new KV cache, or lets them finish.
    weight_update = "recompute" if staleness is not None else None
    if fully_async and not s.flag("async_training.partial_rollout"):
        weight_update = "drain"
    publish_every = 1
    if fully_async or mode == "separate_async":
        key = "async_training.trigger_parameter_sync_step" if fully_async else f"{V1}separate_async.parameter_sync_step"
        publish_every = max(s.count(key), 1)

    per_update = s.count(f"{A}ppo_mini_batch_size")
    groups = max(s.count("data.train_batch_size"), 1)
    if fully_async:
        groups = max(per_update * s.count("async_training.require_batches"), 1)
    minibatches = 1
    if per_update and groups % per_update == 0:
        minibatches = groups // per_update
    else:
        indivisible = f"{groups} groups are not divisible into minibatches of {per_update}"
        s.remark("trainer.minibatches", f"{indivisible}: choose the number of updates")

    # verl's asynchronous trainer counts intervals in versions.
    intervals = {
        key: multiple(max(s.count(name), 0) * (publish_every if fully_async else 1), publish_every)
        for key, name in {"evaluation.every": "trainer.test_freq", "checkpoints.every": "trainer.save_freq"}.items()
    }
    warmup = s.number(f"{A}optim.lr_warmup_steps")
    counted: int | None = None  # None: verl counts epochs
    if s.number("trainer.total_training_steps") > 0:
        counted = multiple(s.number("trainer.total_training_steps"), publish_every)
    elif fully_async and s.number("rollout.total_rollout_steps") > 0:
        counted = multiple(max(s.count("rollout.total_rollout_steps") // groups, 1), publish_every)
    if warmup < 0:
        warmup = max(s.number(f"{A}optim.lr_warmup_steps_ratio"), 0) * (counted or ASSUMED_STEPS)
        if warmup and counted is None:
            s.remark("trainer.schedule.warmup_updates", f"a share of the steps, computed for {ASSUMED_STEPS}")

    per_engine = max(s.count(f"{R}tensor_model_parallel_size"), 1)
    total = s.count("trainer.nnodes") * s.count("trainer.n_gpus_per_node")
    if in_turn:
        devices = split(total, per_engine)
        divided(s, devices, total)
    else:
        prefix = R if mode == "separate_async" else "rollout."
        generating = max(s.count(f"{prefix}nnodes"), 1) * max(s.count(f"{prefix}n_gpus_per_node"), 1)
        devices = Devices(max(total, 1), max(generating // per_engine, 1), per_engine)
    per_sequence = max(s.count(f"{A}ulysses_sequence_parallel_size"), 1)
    if has_images and per_sequence > 1:
        s.remark(
            "trainer.sequence_parallel", f"verl divides a sequence over {per_sequence} GPUs; with images it is whole"
        )
        per_sequence = 1
    largest = groups * max(s.count(f"{R}n"), 1) // minibatches * per_sequence
    if 0 < largest < devices.ranks:
        s.remark("trainer.ranks", f"{devices.ranks} GPUs are more than the {largest} rollouts of a minibatch")
        devices = devices._replace(ranks=largest)
    tokens = max_tokens * max(s.count(f"{A}ppo_micro_batch_size_per_gpu"), 1)
    if s.flag(f"{A}use_dynamic_bsz"):
        tokens = max(per_sequence * s.count(f"{A}ppo_max_token_len_per_gpu"), max_tokens)
    divides = devices.ranks % per_sequence == 0
    if not divides:
        gpus = f"verl divides a sequence over {per_sequence} GPUs"
        s.remark("trainer.sequence_parallel", f"{gpus}, which does not divide the {devices.ranks} ranks here")
    ahead = ((staleness or 0) + 1 + (mode == "one_step_off")) * publish_every
    memory = s.get(f"{R}standalone_gpu_memory_utilization", f"{R}gpu_memory_utilization")
    return {
        "rollout.engines": devices.engines,
        "rollout.gpus_per_engine": devices.per_engine,
        "rollout.engine_args.gpu_memory_utilization": None if in_turn else memory,
        "rollout.max_running_rollouts": running_rollouts(
            s.count(f"{R}max_num_seqs"), group_size=max(s.count(f"{R}n"), 1), groups=groups * ahead, devices=devices
        ),
        "trainer.ranks": devices.ranks,
        "trainer.gpus_per_rank": devices.per_rank,
        # verl advances its schedule once per step, asyncrl once per update.
        "trainer.schedule.warmup_updates": round(warmup * max(s.count(f"{A}ppo_epochs"), 1) * minibatches),
        "trainer.minibatches": minibatches,
        "trainer.tokens_per_microbatch": tokens,
        "trainer.sequence_parallel": per_sequence if divides else 1,
        "pipeline.mode": mode if mode in ("sync", "one_step_off") else "async",
        "pipeline.max_staleness": staleness,
        "pipeline.groups_per_step": groups,
        "pipeline.publish_every": publish_every,
        "pipeline.weight_update": weight_update,
        "stop.steps": counted,
        "stop.epochs": None if counted else max(s.count("trainer.total_epochs"), 1),
        **intervals,
    }


def _data_path(s: Source, key: str, path: object) -> str | list[str] | None:
    files = [str(file) for file in (path if isinstance(path, list | tuple) else [path]) if file is not None]
    if any(kind_of(file) is None for file in files):
        s.remark(key, "asyncrl reads .jsonl, .json, .parquet and .csv (docs/data.md)")
    return files if len(files) > 1 else files[0] if files else None


def _dtype(s: Source, key: str, name: object) -> str:
    if str(name) in ("float16", "fp16", "half"):
        s.remark(key, "float16 is not supported: bfloat16 is used")
    return "bfloat16"


def _mode(s: Source) -> Mode:
    program: Literal["ppo", "one_step_off", "fully_async"] = s.get(PROGRAM)
    if program != "ppo":
        return program
    mode = s.get(f"{V1}trainer_mode")
    return mode if mode in ("separate_async", "colocate_async") else "sync"


def _chosen(s: Source, key: str, name: str, table: dict[str, Any], fallback: str) -> Any:
    """The table's entry for the value of verl's key ``name``. If there is none, the fallback's entry, with a remark."""
    value = str(s.get(name))
    if value not in table:
        s.remark(key, f"{name}={value} has no counterpart: `{fallback}` is used instead")
    return table.get(value, table[fallback])


def _advantage(s: Source, name: str) -> str:
    if name == "group_norm" and not s.flag("algorithm.norm_adv_by_std_in_grpo"):
        name = "group_mean"
    if name not in ("gae", "none") and s.count(f"{R}n") < 2:
        relative = "an advantage relative to the group needs a rollout.group_size of 2 or more"
        s.remark("algorithm.advantage", relative)
    return name


def _parts(s: Source) -> dict[str, Any]:
    """GDPO's rewards, by their keys in the reward function's dict."""
    if s.get("algorithm.adv_estimator") != "gdpo":
        return {"algorithm.reward_parts": None, "algorithm.reward_aggregation": None}
    names = [str(name) for name in s.get("algorithm.gdpo_reward_keys") or []]
    weights = s.get("algorithm.gdpo_reward_weights") or [1.0] * len(names)
    if not names or len(names) != len(weights):
        s.remark("algorithm.reward_parts", "name each metric of the reward function and its weight")
    return {
        "algorithm.reward_parts": {name: float(weight) for name, weight in zip(names, weights, strict=False)} or None,
        "algorithm.reward_aggregation": "normalize_then_sum",
    }


def _kl(s: Source) -> dict[str, Any]:
    in_loss, in_reward = s.flag(f"{A}use_kl_loss"), s.flag("algorithm.use_kl_in_reward")
    coef = 0.0
    if in_loss:
        coef = s.number(f"{A}kl_loss_coef")
        if in_reward:
            both = "a spec has one KL penalty: only the penalty in the loss is used, not the penalty in the reward"
            s.remark("algorithm.kl_coef", both)
    elif in_reward:
        coef = s.number("algorithm.kl_ctrl.kl_coef")
        if s.get("algorithm.kl_ctrl.type") not in (None, "fixed"):
            s.remark("algorithm.kl_coef", "the coefficient is fixed, without adaptive control")
    of_reward = in_reward and not in_loss
    name = "algorithm.kl_penalty" if of_reward else f"{A}kl_loss_type"
    text = str(s.get(name))
    if text.endswith("+"):
        s.remark("algorithm.kl_estimator", f"`{text}` is the value of {text[:-1]} with k2's gradient: k2 is used")
        estimator = "k2"
    elif not coef and text not in KL_ESTIMATORS:
        estimator = "k3"
    else:
        estimator = _chosen(s, key="algorithm.kl_estimator", name=name, table=KL_ESTIMATORS, fallback="low_var_kl")
    return {
        "algorithm.kl_coef": coef,
        "algorithm.kl_estimator": estimator,
        "algorithm.kl_placement": "reward" if of_reward else "loss",
    }


def _distillation(s: Source) -> dict[str, Any]:
    """Distillation by policy gradient. The sampled token's advantage is minus k1, as with `preset: distill`."""
    if not s.flag(f"{D}enabled"):
        return dict.fromkeys(("algorithm.reference_path", "algorithm.reward_coef"))
    same = {"use_policy_gradient": True, "loss_mode": "k1", "use_task_rewards": False}
    for name, wanted in same.items():
        if (value := s.get(f"{L}{name}")) != wanted:
            s.unsupported.append(f"{L}{name} = {shown(value)}: preset: distill is verl's distillation with {wanted}")
    if limit := s.number(f"{L}loss_max_clamp"):
        s.remark("algorithm.kl_coef", f"verl limits a token's KL estimate to {limit:g}; here it has no limit")
    teachers = [s.given[name] for name in s.matching(TEACHERS) if s.given[name]]
    if len(teachers) != 1:
        s.unsupported.append(f"{TEACHERS}: a run has one teacher, and there are {len(teachers)}")
    rewarded = s.get("reward.custom_reward_function.path", "custom_reward_function.path")
    if not rewarded and not s.flag(f"{R}multi_turn.enable"):
        del s.remarks["task.use"]
    s.remarks.pop("algorithm.advantage", None)
    return {
        **({} if "task.use" in s.remarks else {"task.use": "prompts"}),
        **DISTILLATION,
        "algorithm.reference_path": teachers[0] if teachers else None,
        "algorithm.clip_low": s.number(f"{L}clip_ratio_low"),
        "algorithm.clip_high": s.number(f"{L}clip_ratio_high"),
        "algorithm.dual_clip": 3.0,
        "algorithm.loss": "clip",
    }


def _correction(s: Source) -> dict[str, Any]:
    """Weights and rejection. In bypass mode the clipped ratio is the correction."""
    bypass = s.flag(f"{CORRECTION}bypass_mode")
    if bypass and s.get(f"{CORRECTION}loss_type") == "reinforce":
        clipped = "REINFORCE with importance weights has no counterpart: the clipped objective is used"
        s.remark("algorithm.correction.preset", clipped)
    found: dict[str, Any] = {"preset": "off" if bypass else "decoupled", "level": None}
    found |= dict.fromkeys(("cap", "mask_low", "mask_high"))
    found |= dict.fromkeys(("reject_by", "reject_over", "reject_low", "reject_high"))
    level = s.get(f"{CORRECTION}rollout_is")
    if not bypass and level in ("token", "sequence"):
        low, high = _bounds(s, f"{CORRECTION}rollout_is_threshold")
        found["level"] = level
        found |= {"cap": high} if low is None else {"mask_low": low, "mask_high": high if low else None}
    elif not bypass and level is not None:
        s.remark("algorithm.correction.level", f"rollout_is={level} has no counterpart: there are no weights")
    wanted = str(s.get(f"{CORRECTION}rollout_rs") or "")
    rejection = re.fullmatch(r"(token|seq_(?:sum|mean|max))_(k[123])", wanted)
    if wanted and bypass:
        off = "in bypass mode nothing is rejected: set correction.preset: decoupled to reject"
        s.remark("algorithm.correction.reject_by", off)
    elif rejection:
        low, high = _bounds(s, f"{CORRECTION}rollout_rs_threshold")
        found |= {"reject_by": rejection[2], "reject_over": rejection[1].replace("seq_", "sequence_")}
        found |= {"reject_low": low, "reject_high": high}
    elif wanted:
        s.remark("algorithm.correction.reject_by", f"rollout_rs={wanted} has no counterpart: nothing is rejected")
    return {f"algorithm.correction.{key}": value for key, value in found.items()}


def _bounds(s: Source, name: str) -> tuple[float | None, float | None]:
    """Lower and upper bound from a threshold of verl: a number (the upper bound), or a text `lower_upper`."""
    parts = [part for part in str(s.get(name) or "").split("_") if part]
    try:
        numbers = [float(part) for part in parts[:2]]
    except ValueError:
        return None, None
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, numbers[0] if numbers else None)


def _task(s: Source, in_turns: bool) -> str:
    """`task.use`. Reward functions for verl work unchanged."""
    if in_turns:
        s.remark(
            "task.use",
            "this configuration has several turns: write an environment or an agent with its tools (docs/agents.md), "
            "and name it here as `module:Class` or `module:function`",
        )
        return "environment:Environment"
    path = s.text("task.use", "reward.custom_reward_function.path", "custom_reward_function.path")
    name = s.get("reward.custom_reward_function.name", "custom_reward_function.name") or "compute_score"
    if not path:
        s.remark("task.use", "verl's own rewards: install verl here, or choose a task such as `math` (docs/tasks.md)")
        return "verl.utils.reward_score:default_compute_score"
    if str(path).startswith("pkg://"):
        return f"{str(path)[6:]}:{name}"
    stem = re.sub(r"\W", "_", str(path).rpartition("/")[2].removesuffix(".py"))
    s.remark("task.use", f"copy {path} next to this file, as {stem}.py; the function stays as it is (docs/tasks.md)")
    return f"{stem}:{name}"


def _held_out(s: Source, image_column: Any) -> dict[str, Any]:
    """`data.eval.path` is the first file. The other files are `evaluation.sets`, each named after its folder."""
    held_out = s.text("data.eval.path", "data.val_files")
    files = [str(path) for path in held_out] if isinstance(held_out, list) else [str(held_out)] if held_out else []
    if not files:
        own = [f"data.eval.{key}" for key in ("path", "size", "prompt_column", "image_column")]
        return dict.fromkeys([*own, "evaluation.every", "evaluation.sets"])
    sets: dict[str, Any] = {}
    for path in files[1:]:
        *_, folder, file = ["", *path.split("/")]
        name = re.sub(r"\W", "_", folder or file.partition(".")[0])[:28] or "set"
        unique = next(name + suffix for suffix in ("", *map(str, range(2, 99))) if name + suffix not in sets)
        data = {"path": path, "prompt_column": s.get("data.prompt_key"), "image_column": image_column}
        sets[unique] = {"data": {key: value for key, value in data.items() if value is not None}}
    return {
        "data.eval.path": _data_path(s, "data.eval.path", files[:1]),
        "data.eval.size": max(s.count("data.val_max_samples"), 0) or None,
        "evaluation.sets": sets or None,
    }


# -- conditions of rows without a counterpart


def is_complete(s: Source) -> bool:
    """True for the output of `--cfg job` and for copies of verl's file. They have keys that no user wrote."""
    return "data.return_raw_input_ids" in s.given or any(name.endswith("_target_") for name in s.given)


def critic_differs(s: Source) -> bool:
    """True if a user wrote settings of a critic. A complete configuration has them anyway."""
    return s.get("algorithm.adv_estimator") == "gae" and not is_complete(s)


def reward_arguments_are_used(s: Source) -> bool:
    """True if arguments of the reward function matter. The overlong penalty's arguments are converted."""
    return s.get("reward.custom_reward_function.path", "custom_reward_function.path") is not None


def lengths_differ(s: Source) -> bool:
    """True if rollouts have other limits than the data."""
    return any(
        s.count(f"{R}{name}_length") not in (0, s.count(f"data.max_{name}_length")) for name in ("prompt", "response")
    )
