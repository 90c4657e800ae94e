"""Computes values of a spec that need arithmetic, or several of TRL's arguments. The table is in ``trl.py``.

TRL counts completions per device and optimizer updates; asyncrl counts groups and steps. A generation batch in TRL is a
step in asyncrl.
"""

from __future__ import annotations

import math
import os
from pathlib import PurePath
from typing import Any

from asyncrl_cli.convert.common import (
    ASSUMED_STEPS,
    ATTENTION,
    DISTILLATION,
    IN_TURN,
    Devices,
    divided,
    images,
    model_path,
    multiple,
    run_name,
    running_rollouts,
    split,
    tracking,
)
from asyncrl_cli.convert.source import Source, shown

METHOD = "method"
"""Not an argument of TRL: `grpo`, `rloo`, `ppo`, `async_grpo` or `gkd`, from the command or the default."""
PROMPT_TOKENS = 1024
"""`rollout.max_prompt_tokens` if TRL has no limit."""
CORRECTION = "vllm_importance_sampling_"
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
AGGREGATIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "sequence_sum",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
}
BUILT_IN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
"""TRL's reward functions."""


def settings(s: Source) -> dict[str, Any]:
    """Return the values by key of the spec. None: the key is not written."""
    ppo = s.get(METHOD) == "ppo"
    peft = s.flag("use_peft")
    stage = s.get("deepspeed_config.zero_stage")
    named = {"zero1": 1, "zero2": 2, "zero3": 3}.get(str(s.get("accelerate_config")))
    zero_stage = named or (3 if stage is None else s.count("deepspeed_config.zero_stage"))
    offload = "optimizer" if s.get("deepspeed_config.offload_optimizer_device") == "cpu" else "none"
    if s.get("deepspeed_config.offload_param_device") == "cpu" and zero_stage == 3:
        offload = "all"
    attention = s.get("attn_implementation", "model_init_kwargs.attn_implementation")
    schedule = str(s.get("lr_scheduler_type"))
    if schedule not in SCHEDULES:
        unknown = f"lr_scheduler_type={schedule} has no counterpart: `constant` is used instead"
        s.remark("trainer.schedule.kind", unknown)
    wide = s.get("bf16") is not None and not s.flag("bf16") and not s.flag("fp16")
    dtype = "float32" if wide else "bfloat16"
    if s.flag("fp16"):
        s.remark("trainer.dtype", "float16 is not supported: bfloat16 is used")
    project = s.text("tracking.experiment", "wandb_project", "project")
    logs = tracking(s, "report_to", project)
    model = s.text("model.path", "model_name_or_path", "sft_model_path") or "Qwen/Qwen3-0.6B"
    return {
        "name": run_name(s.text("name", "run_name") or PurePath(str(s.text("name", "output_dir") or "")).name),
        "model.path": model_path(model, s),
        **images(s, model, column=None, limit=0, frozen=any(map(s.flag, s.matching("freeze_vision*")))),
        "model.chat_template_kwargs": s.section("chat_template_kwargs."),
        "model.lora.rank": s.count("lora_r") if peft else None,
        "model.lora.alpha": s.number("lora_alpha") if peft else None,
        "model.lora.target_modules": (s.get("lora_target_modules") or "all-linear") if peft else None,
        **_task(s),
        **_data(s),
        "data.apply_chat_template": s.get("system_prompt") is not None,
        "rollout.dtype": dtype,
        "algorithm.gamma": s.get("gamma") if ppo else None,
        "algorithm.gae_lambda": s.get("lam") if ppo else None,
        "algorithm.entropy_coef": s.number("entropy_coef"),
        **_correction(s),
        "algorithm.mask_truncated": s.flag("mask_truncated_completions"),
        "algorithm.uniform_groups": "train",
        "algorithm.critic.value_clip": s.get("cliprange_value") if ppo else None,
        "algorithm.critic.learning_rate": s.get("learning_rate") if ppo else None,
        "trainer.zero_stage": zero_stage,
        "trainer.dtype": dtype,
        "trainer.optimizer.betas": [s.number("adam_beta1"), s.number("adam_beta2")],
        "trainer.schedule.kind": SCHEDULES.get(schedule, "constant"),
        "trainer.attention": attention if attention in ATTENTION else "sdpa",
        "trainer.offload": offload,
        **_sizes(s),
        **logs,
        "tracking.wandb.entity": s.get("wandb_entity") if logs["tracking.wandb.project"] else None,
        "tracking.experiment": project,
        **(_distillation(s) if s.get(METHOD) == "gkd" else {}),
    }


def _sizes(s: Source) -> dict[str, Any]:
    method = str(s.get(METHOD))
    ppo, is_async, single = method == "ppo", method == "async_grpo", method in ("ppo", "gkd")
    processes = max(s.count("num_processes"), 1)  # Accelerate's number, not TRL's
    per_device = max(s.count("per_device_train_batch_size"), 1)
    minibatches = max(s.count("num_mini_batches"), 1) if ppo else 1
    per_update = max(per_device * max(s.count("gradient_accumulation_steps"), 1) * processes // minibatches, 1)
    if ppo:
        completions = per_update * minibatches
    elif s.count("generation_batch_size"):
        completions = s.count("generation_batch_size")
    else:
        per_generation = s.count("steps_per_generation")
        completions = per_device * processes * per_generation if per_generation else per_update
    size = 1 if single else max(s.count("num_generations"), 1)
    groups = max(completions // size, 1)
    if completions % size:
        s.remark(
            "pipeline.groups_per_step",
            f"{completions} completions (per device · processes · accumulation) are not divisible by num_generations "
            f"{size}: TRL would refuse it, so processes may be missing; add --num_processes",
        )
    elif "num_processes" not in s.given:
        s.remark(
            "pipeline.groups_per_step",
            "the number of processes is Accelerate's: add --num_processes N, or --accelerate_config FILE",
        )
    passes = max(completions // per_update, 1)
    updates = passes * max(s.count("num_iterations", "num_ppo_epochs"), 1)
    if groups % passes:
        indivisible = f"{groups} groups are not divisible into {passes} updates: choose the number of updates"
        s.remark("trainer.minibatches", indivisible)

    per_engine = max(s.count("vllm_tensor_parallel_size"), 1)
    if is_async or (s.flag("use_vllm") and s.get("vllm_mode") == "server"):
        devices = Devices(processes, 1, per_engine)
    else:
        devices = split(processes, per_engine)
    cpu = s.flag("use_cpu")
    if not cpu and (devices.ranks != processes or devices.per_rank < 1):
        divided(s, devices, processes)
    response = max(s.count("response_length", "max_completion_length", "max_new_tokens"), 1)
    prompt = s.count("max_prompt_length") or max(s.count("vllm_max_model_length", "max_length") - response, 0)
    if not prompt:
        prompt = PROMPT_TOKENS
        unlimited = f"TRL does not limit prompts; {prompt} is a placeholder. Longer prompts are skipped"
        s.remark("rollout.max_prompt_tokens", unlimited)

    versions = (s.count("max_staleness") + 1) * max(s.count("weight_sync_steps"), 1)
    counted = _steps(s, completions, updates)
    steps = counted or ASSUMED_STEPS
    count = s.number("warmup_steps")
    # A `warmup_steps` below 1 is a share, like `warmup_ratio`.
    ratio = count if 0 < count < 1 else 0.0 if count else s.number("warmup_ratio")
    if ratio and counted is None:
        s.remark("trainer.schedule.warmup_updates", f"a share of the steps, computed for {steps}")
    if counted is None and s.number("num_train_epochs") % 1:
        s.remark("stop.epochs", "epochs are whole numbers here: rounded up")
    if not is_async:
        s.remark("pipeline.mode", IN_TURN)
    return {
        "model.max_length": prompt + response,
        "rollout.engines": devices.engines,
        "rollout.gpus_per_engine": 0 if cpu else devices.per_engine,
        "rollout.group_size": size,
        # TRL's limit is 256. Fewer if all steps within the staleness bound have fewer rollouts.
        "rollout.max_running_rollouts": running_rollouts(
            256, group_size=size, groups=groups * versions, devices=devices
        ),
        "rollout.max_prompt_tokens": prompt,
        "rollout.max_response_tokens": response,
        **_objective(s, updates),
        "trainer.ranks": devices.ranks,
        "trainer.gpus_per_rank": 0 if cpu else devices.per_rank,
        "trainer.schedule.warmup_updates": round(ratio * steps * updates) if ratio else int(count),
        "trainer.minibatches": 1 if groups % passes else passes,
        "trainer.tokens_per_microbatch": per_device * (prompt + response),
        "pipeline.mode": "async" if is_async else "sync",
        "pipeline.max_staleness": s.count("max_staleness") if is_async else None,
        "pipeline.groups_per_step": groups,
        "pipeline.publish_every": s.count("weight_sync_steps") if is_async else None,
        "evaluation.every": _interval(s, "evaluation.every", "eval", steps=steps, updates=updates),
        "checkpoints.every": _interval(s, "checkpoints.every", "save", steps=steps, updates=updates),
        "stop.steps": counted,
        "stop.epochs": None if counted else max(math.ceil(s.number("num_train_epochs")), 1),
    }


def _steps(s: Source, completions: int, updates: int) -> int | None:
    """`stop.steps`; None if TRL counts epochs."""
    if s.number("max_steps") > 0:
        return max(multiple(s.number("max_steps"), updates) // updates, 1)
    if s.number("total_episodes") > 0:
        return max(s.count("total_episodes") // completions, 1)
    return None


def _interval(s: Source, key: str, kind: str, *, steps: int, updates: int) -> int:
    """An interval in steps. TRL counts optimizer updates, a share of all updates, or epochs."""
    strategy = str(s.get(f"{kind}_strategy"))
    if strategy in ("no", "False", "None"):
        return 0
    count = s.number(f"{kind}_steps") or (s.number("logging_steps") if kind == "eval" else 0)
    if strategy != "steps" or not count:
        s.remark(key, "TRL counts epochs here: choose an interval in steps")
        return 0
    return max(round(count * steps), 1) if count < 1 else multiple(count, updates) // updates


def _objective(s: Source, updates: int) -> dict[str, Any]:
    """The keys of `algorithm` that depend on the trainer and its loss. ``updates``: optimizer updates per step."""
    method, loss_type = str(s.get(METHOD)), str(s.get("loss_type"))
    ppo, rloo, cispo = method == "ppo", method == "rloo", loss_type == "cispo"
    loss = "gspo" if s.get("importance_sampling_level") == "sequence" else "clip"
    if loss_type in ("cispo", "sapo"):
        loss = loss_type
    elif method in ("grpo", "async_grpo") and loss_type not in AGGREGATIONS:
        s.remark("algorithm.loss", f"loss_type={loss_type} has no counterpart: `clip` is used instead")
    elif rloo and updates > 1:
        s.remark("algorithm.loss", "TRL's RLOO clips the ratio of an entire sequence, asyncrl each token's ratio")
    scale = str(s.get("scale_rewards")).lower()
    advantage = "gae" if ppo else "leave_one_out" if rloo else "group_mean"
    if advantage == "group_mean" and scale in ("group", "true"):
        advantage = "group_norm"
    elif advantage == "group_mean" and scale == "batch":
        unscaled = "scaling by the deviation of the batch has no counterpart: rewards are not scaled"
        s.remark("algorithm.advantage", unscaled)
    preset = loss if loss != "clip" else "dr_grpo" if loss_type == "dr_grpo" else "grpo"
    clip = s.number("cliprange" if ppo else "epsilon")
    clip_high = s.number("epsilon_high") if s.get("epsilon_high") is not None and not ppo else clip
    if cispo and not ppo:  # `epsilon_high` is the upper edge itself.
        if clip_high <= 1:
            edge = "TRL's cispo takes the upper edge itself (5 in its paper), and this edge is below 1"
            s.remark("algorithm.clip_high", edge)
        clip_high = clip_high - 1 if clip_high > 1 else 4.0
    reference_steps = 0
    if s.flag("sync_ref_model"):
        reference_steps = multiple(s.number("ref_model_sync_steps"), updates) // updates
        if s.number("ref_model_mixup_alpha") != 1.0:
            mixes = "TRL mixes reference and policy; here the reference becomes the policy"
            s.remark("algorithm.reference_update_every", mixes)
    temperatures = [s.number("sapo_temperature_pos"), s.number("sapo_temperature_neg")]
    return {
        # Only a name, because all keys that a preset decides are written.
        "algorithm.preset": method if ppo or rloo else preset,
        "algorithm.advantage": advantage,
        "algorithm.whiten_advantages": ppo or s.flag("normalize_advantages"),
        "algorithm.loss": loss,
        "algorithm.clip_low": 1.0 if cispo else clip,
        "algorithm.clip_high": clip_high,
        "algorithm.dual_clip": s.number("delta") or None if loss == "clip" else None,
        "algorithm.sapo_temperatures": temperatures if loss_type == "sapo" else None,
        "algorithm.aggregation": {"ppo": "token_mean", "rloo": "sequence_sum"}.get(method)
        or AGGREGATIONS.get(loss_type, "token_mean"),
        "algorithm.sequence_divisor": 1 if rloo else None,
        "algorithm.kl_coef": s.number("kl_coef" if ppo else "beta"),
        "algorithm.kl_estimator": str(s.get("kl_estimator")) if ppo else "k1" if rloo else "k3",
        "algorithm.kl_placement": "reward" if ppo or rloo else "loss",
        "algorithm.reference_update_every": reference_steps,
    }


def _distillation(s: Source) -> dict[str, Any]:
    """GKD with λ = 1 and β = 1, the reverse KL divergence. The student's samples estimate the sum over the vocabulary
    that TRL computes."""
    for name in ("lmbda", "beta"):
        if s.number(name) != 1.0:
            s.unsupported.append(f"{name} = {shown(s.get(name))}: preset: distill is GKD with lmbda 1 and beta 1")
    teacher = s.get("teacher_model_name_or_path")
    if teacher is None:
        s.unsupported.append("teacher_model_name_or_path: without one the teacher is the model itself, with no effect")
    if s.number("temperature") != 1.0:
        s.remark("rollout.sampling.temperature", "TRL compares student and teacher at 1, and here at this temperature")
    s.remark("algorithm.kl_coef", "for the sampled token; TRL sums over the vocabulary, with less variance")
    s.remarks.pop("task.use", None)
    unclipped = dict.fromkeys(("algorithm.clip_low", "algorithm.clip_high"))  # a step has one update
    return DISTILLATION | unclipped | {"task.use": "prompts", "algorithm.reference_path": teacher}


def _correction(s: Source) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(("level", "cap", "mask_low", "mask_high"))
    if s.get(METHOD) != "ppo" and s.flag(f"{CORRECTION}correction"):
        level, _, rest = str(s.get(f"{CORRECTION}mode")).partition("_")
        high = s.number(f"{CORRECTION}clip_max", f"{CORRECTION}cap") or None
        masks = f"_{rest}".endswith("_mask")
        found = {
            "level": level,
            "cap": None if masks else high,
            "mask_low": s.number(f"{CORRECTION}clip_min") or None,
            "mask_high": high if masks else None,
        }
    return {f"algorithm.correction.{key}": value for key, value in {"preset": "decoupled", **found}.items()}


def _task(s: Source) -> dict[str, Any]:
    given = s.get("reward_funcs")
    names = [str(name) for name in given] if isinstance(given, list) else [str(given)] if given else []
    # TRL's comparison of mathematical answers is the task `math`.
    task: dict[str, Any] = dict.fromkeys(
        ("algorithm.reward_parts", "algorithm.reward_aggregation", "task.options.field")
    )
    if names == ["accuracy_reward"]:
        return task | {"task.use": "math", "task.options.field": "solution"}
    if s.get("reward_model_name_or_path", "reward_model_path"):
        s.remark("task.use", "there are no reward models: call yours from a reward function, or use the task `judge`")
    if len(names) == 1 and "get_soft_overlong_punishment" not in names:
        module, _, name = names[0].rpartition(".")
        module = module or ("trl.rewards" if name in BUILT_IN else "my_rewards")
        s.remark("task.use", f"copy {module} next to this file, unless it is installed; the function stays as it is")
        return task | {"task.use": f"{module}:{name}"}
    names = names or ["my_reward"]
    imports = [
        f"from {name.rpartition('.')[0] if '.' in name else 'trl.rewards' if name in BUILT_IN else 'my_rewards'} "
        f"import {name.rpartition('.')[2]}"
        for name in names
    ]
    weights = s.get("reward_weights")
    weights = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    weighted = [(name.rpartition(".")[2], weight) for name, weight in zip(names, weights, strict=True)]
    functions = ", ".join(f"({name}, {weight})" for name, weight in weighted)
    apart = s.get("multi_objective_aggregation") == "normalize_then_sum"
    total = "sum(weight * score for (_, weight), score in zip(functions, row) if score is not None)"
    measured = "{f.__name__: score for (f, _), score in zip(functions, row) if score is not None}"
    result = f"RewardResult({total},\n                             {measured})" if apart else total
    imports += ["from asyncrl_cli.tasks.base import RewardResult"] if apart else []
    s.remark(
        "task.use",
        "write rewards.py next to this file:\n"
        + "\n".join(f"    {line}" for line in dict.fromkeys(imports))
        + "\n\n    def rewards(prompts, completions, **columns):\n"
        f"        functions = [{functions}]\n"
        "        scores = [f(prompts=prompts, completions=completions, **columns) for f, _ in functions]\n"
        f"        return [{result}\n                for row in zip(*scores)]",
    )
    if apart:
        found = {name: float(weight) for name, weight in weighted}
        task |= {"algorithm.reward_parts": found, "algorithm.reward_aggregation": "normalize_then_sum"}
    return task | {"task.use": "rewards:rewards"}


COLUMNS = ("prompt_column", "image_column", "system")


def _data(s: Source) -> dict[str, Any]:
    name = s.text("data.train.path", "dataset_name")
    is_local = name is not None and (str(name).startswith((".", "/", "~")) or os.path.exists(str(name)))
    on_hub = name is not None and not is_local
    if name is None:
        s.remark("data.train.path", "the arguments name no data set: set data.train.path (docs/data.md)")
    found: dict[str, Any] = {}
    for part, split_name in (("train", "dataset_train_split"), ("eval", "dataset_test_split")):
        found[f"data.{part}.path"] = None if name is None else str(name) if is_local else f"hf:{name}"
        found[f"data.{part}.config"] = s.get("dataset_config") if on_hub else None
        found[f"data.{part}.split"] = s.get(split_name) if on_hub else None
    if name is None or s.get("eval_strategy") in (None, "no", False):
        found |= dict.fromkeys(f"data.eval.{key}" for key in ("path", "config", "split", *COLUMNS))
    return found
