"""What several of TRL's arguments mean together. The table is in ``trl.py``.

TRL counts completions per device and optimizer updates; asyncrl counts groups and steps. One of its generation batches
is a step here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from asyncrl_cli.convert.common import PLACEHOLDER_STEPS, Devices, divided, multiple, run_name, running_rollouts, split
from asyncrl_cli.convert.source import Source

METHOD = "method"
"""Not an argument: `grpo`, `rloo`, `ppo` or `async_grpo`, from the command or the default."""
PROMPT_TOKENS = 1024
"""`rollout.max_prompt_tokens` where TRL has no limit."""


def method(source: Source) -> str:
    """Which of TRL's trainers the arguments are for."""
    return str(source.get(METHOD))


def processes(source: Source) -> int:
    """Training processes: a number of Accelerate's, not of TRL's."""
    return max(source.count("num_processes"), 1)


def per_update(source: Source) -> int:
    """Completions of an optimizer update, over all processes."""
    each = max(source.count("per_device_train_batch_size"), 1) * max(source.count("gradient_accumulation_steps"), 1)
    updates = max(source.count("num_mini_batches"), 1) if method(source) == "ppo" else 1
    return max(each * processes(source) // updates, 1)


def per_generation(source: Source) -> int:
    """Completions of a generation batch, over all processes."""
    if method(source) == "ppo":
        return per_update(source) * max(source.count("num_mini_batches"), 1)
    if source.count("generation_batch_size"):
        return source.count("generation_batch_size")
    steps = source.count("steps_per_generation")
    if not steps:
        return per_update(source)
    return max(source.count("per_device_train_batch_size"), 1) * processes(source) * steps


def group_size(source: Source) -> int:
    """`rollout.group_size`."""
    return 1 if method(source) == "ppo" else max(source.count("num_generations"), 1)


def groups_per_step(source: Source) -> int:
    """`pipeline.groups_per_step`: the prompts of a generation batch."""
    completions, size = per_generation(source), group_size(source)
    if completions % size:
        source.remark(
            f"{completions} completions (per device · processes · accumulation) are not divisible by num_generations "
            f"{size}: TRL would refuse it, so processes may be missing; add --num_processes"
        )
    elif "num_processes" not in source.given:
        source.remark("the number of processes is Accelerate's: add --num_processes N, or --accelerate_config FILE")
    return max(completions // size, 1)


def minibatches(source: Source) -> int:
    """`trainer.minibatches`: updates per pass over a generation batch."""
    updates = max(per_generation(source) // per_update(source), 1)
    groups = max(per_generation(source) // group_size(source), 1)
    if groups % updates:
        source.remark(f"{groups} groups are not divisible into {updates} updates: choose the number of updates")
        return 1
    return updates


def updates_per_step(source: Source) -> int:
    """Optimizer updates of one step here, which TRL's step counters count."""
    return max(per_generation(source) // per_update(source), 1) * max(
        source.count("num_iterations", "num_ppo_epochs"), 1
    )


def steps(source: Source) -> int:
    """`stop.steps`."""
    updates = updates_per_step(source)
    if source.number("max_steps") > 0:
        return max(multiple(source.number("max_steps"), updates) // updates, 1)
    if source.number("total_episodes") > 0:
        return max(source.count("total_episodes") // per_generation(source), 1)
    epochs = source.number("num_train_epochs")
    # Long enough for the intervals, or the spec would be warned about our own number.
    counted = [
        "warmup_steps",
        *(f"{kind}_steps" for kind in ("save", "eval") if source.get(f"{kind}_strategy") == "steps"),
    ]
    versions = (source.count("max_staleness") + 1) * max(source.count("weight_sync_steps"), 1) + 1
    longest = multiple(max(map(source.number, counted)), updates) // updates
    placeholder = max(PLACEHOLDER_STEPS, longest, versions if method(source) == "async_grpo" else 0)
    source.remark(
        f"{placeholder} is a placeholder: TRL counts {epochs:g} epochs, which is "
        f"epochs · prompts / {max(per_generation(source) // group_size(source), 1)} steps"
    )
    return placeholder


def interval(strategy: str, name: str) -> Callable[[Source], int]:
    """An interval in steps; TRL counts optimizer updates, a share of all of them, or epochs."""

    def value(source: Source) -> int:
        kind = str(source.get(strategy))
        if kind in ("no", "False", "None"):
            return 0
        count = source.number(name) or (source.number("logging_steps") if name == "eval_steps" else 0)
        if kind != "steps" or not count:
            source.remark("TRL counts epochs here: choose an interval in steps")
            return 0
        if count < 1:
            return max(round(count * steps(source.quiet())), 1)
        return multiple(count, updates_per_step(source)) // updates_per_step(source)

    return value


def warmup_updates(source: Source) -> int:
    """`trainer.schedule.warmup_updates`. A `warmup_steps` below 1 is a share, as `warmup_ratio` is."""
    count = source.number("warmup_steps")
    ratio = count if 0 < count < 1 else 0.0 if count else source.number("warmup_ratio")
    return round(ratio * steps(source.quiet()) * updates_per_step(source)) if ratio else int(count)


SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
SCHEDULES |= {"cosine_with_min_lr": "cosine"}


def schedule(source: Source) -> str:
    """`trainer.schedule.kind`."""
    name = str(source.get("lr_scheduler_type"))
    if name not in SCHEDULES:
        source.remark(f"lr_scheduler_type={name} has no counterpart: `constant` is used instead")
    return SCHEDULES.get(name, "constant")


def devices(source: Source) -> Devices:
    """How GPUs are distributed."""
    per_engine = max(source.count("vllm_tensor_parallel_size"), 1)
    separate = method(source) == "async_grpo" or (source.flag("use_vllm") and source.get("vllm_mode") == "server")
    return Devices(processes(source), 1, per_engine) if separate else split(processes(source), per_engine)


def gpus_per_engine(source: Source) -> float:
    """`rollout.gpus_per_engine`."""
    return 0 if source.flag("use_cpu") else devices(source).per_engine


def gpus_per_rank(source: Source) -> float:
    """`trainer.gpus_per_rank`."""
    return 0 if source.flag("use_cpu") else devices(source).per_rank


def ranks(source: Source) -> int:
    """`trainer.ranks`."""
    found = devices(source)
    if not source.flag("use_cpu") and (found.ranks != processes(source) or found.per_rank < 1):
        divided(source, found, processes(source))
    return found.ranks


def max_running_rollouts(source: Source) -> int:
    """`rollout.max_running_rollouts`: 256, or what a step (of each version in the bound) has to generate."""
    versions = (source.count("max_staleness") + 1) * max(source.count("weight_sync_steps"), 1)
    return running_rollouts(256, group_size(source), groups_per_step(source.quiet()) * versions, devices(source))


def max_prompt_tokens(source: Source) -> int:
    """`rollout.max_prompt_tokens`."""
    if source.count("max_prompt_length"):
        return source.count("max_prompt_length")
    if source.count("vllm_max_model_length") > response_tokens(source):
        return source.count("vllm_max_model_length") - response_tokens(source)
    source.remark(f"TRL does not limit prompts; {PROMPT_TOKENS} is a placeholder. Longer prompts are skipped")
    return PROMPT_TOKENS


def response_tokens(source: Source) -> int:
    """`rollout.max_response_tokens`."""
    return max(source.count("response_length" if method(source) == "ppo" else "max_completion_length"), 1)


def max_length(source: Source) -> int:
    """`model.max_length`."""
    return max_prompt_tokens(source.quiet()) + response_tokens(source)


def tokens_per_microbatch(source: Source) -> int:
    """`trainer.tokens_per_microbatch`: as many of the longest rollouts as TRL has completions on a device."""
    return max(source.count("per_device_train_batch_size"), 1) * max_length(source)


def zero_stage(source: Source) -> int:
    """`trainer.zero_stage`."""
    named = {"zero1": 1, "zero2": 2, "zero3": 3}.get(str(source.get("accelerate_config")))
    stage = source.get("deepspeed_config.zero_stage")
    return named or (source.count("deepspeed_config.zero_stage") if stage is not None else 3)


def offload(source: Source) -> str:
    """`trainer.offload`."""
    if source.get("deepspeed_config.offload_param_device") == "cpu" and zero_stage(source) == 3:
        return "all"
    return "optimizer" if source.get("deepspeed_config.offload_optimizer_device") == "cpu" else "none"


def dtype(source: Source) -> str:
    """`trainer.dtype` and `rollout.dtype`."""
    if source.flag("fp16"):
        source.remark("float16 is not supported: bfloat16 is used")
    wide = source.get("bf16") is not None and not source.flag("bf16") and not source.flag("fp16")
    return "float32" if wide else "bfloat16"


def advantage(source: Source) -> str:
    """`algorithm.advantage`."""
    if method(source) == "ppo":
        return "gae"
    if method(source) == "rloo":
        return "leave_one_out"
    scale = str(source.get("scale_rewards")).lower()
    if scale == "batch":
        source.remark("scaling by the deviation of the batch has no counterpart: rewards are not scaled")
    return "group_norm" if scale in ("group", "true") else "group_mean"


def preset(source: Source) -> str:
    """`algorithm.preset`. All keys that a preset decides are written, so it is only a label here."""
    if method(source) in ("ppo", "rloo"):
        return method(source)
    if loss(source.quiet()) != "clip":
        return loss(source.quiet())
    return "dr_grpo" if source.get("loss_type") == "dr_grpo" else "grpo"


def loss(source: Source) -> str:
    """`algorithm.loss`."""
    name = str(source.get("loss_type"))
    if name in ("cispo", "sapo"):
        return name
    if method(source) in ("grpo", "async_grpo") and name not in AGGREGATIONS:
        source.remark(f"loss_type={name} has no counterpart: `clip` is used instead")
    if method(source) == "rloo" and updates_per_step(source) > 1:
        source.remark("TRL's RLOO clips the ratio of a whole sequence, and this one that of each token")
    return "gspo" if source.get("importance_sampling_level") == "sequence" else "clip"


def dual_clip(source: Source) -> float | None:
    """`algorithm.dual_clip`, of `clip` only."""
    return source.number("delta") or None if loss(source.quiet()) == "clip" else None


AGGREGATIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "sequence_sum",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
}


def aggregation(source: Source) -> str:
    """`algorithm.aggregation`."""
    if method(source) == "ppo":
        return "token_mean"
    return "sequence_sum" if method(source) == "rloo" else AGGREGATIONS.get(str(source.get("loss_type")), "token_mean")


def clip_low(source: Source) -> float:
    """`algorithm.clip_low`."""
    return (
        1.0
        if source.get("loss_type") == "cispo"
        else source.number("cliprange" if method(source) == "ppo" else "epsilon")
    )


def clip_high(source: Source) -> float:
    """`algorithm.clip_high`. In TRL's cispo `epsilon_high` is the upper edge itself."""
    if method(source) == "ppo":
        return source.number("cliprange")
    high = source.number("epsilon_high") if source.get("epsilon_high") is not None else source.number("epsilon")
    if source.get("loss_type") == "cispo":
        if high <= 1:
            source.remark("TRL's cispo takes the upper edge itself (5 in its paper), and this one is below 1")
            return 4.0
        return high - 1
    return high


CORRECTION = "vllm_importance_sampling_"


def corrects(source: Source) -> bool:
    """Whether TRL weighs tokens by the ratio of trainer and engine."""
    return method(source) != "ppo" and source.flag(f"{CORRECTION}correction")


def level(source: Source) -> str | None:
    """`algorithm.correction.level`."""
    return str(source.get(f"{CORRECTION}mode")).partition("_")[0] if corrects(source) else None


def weight_bound(key: str) -> Callable[[Source], float | None]:
    """`cap`, `mask_low` or `mask_high`."""

    def value(source: Source) -> float | None:
        if not corrects(source):
            return None
        masks = str(source.get(f"{CORRECTION}mode")).endswith("_mask")
        high = source.number(f"{CORRECTION}clip_max", f"{CORRECTION}cap") or None
        low = source.number(f"{CORRECTION}clip_min") or None
        return {"cap": None if masks else high, "mask_low": low, "mask_high": high if masks else None}[key]

    return value


def kl_coef(source: Source) -> float:
    """`algorithm.kl_coef`."""
    return source.number("kl_coef" if method(source) == "ppo" else "beta")


def kl_estimator(source: Source) -> str:
    """`algorithm.kl_estimator`."""
    if method(source) == "ppo":
        return str(source.get("kl_estimator"))
    return "k1" if method(source) == "rloo" else "k3"


def reference_update_every(source: Source) -> int:
    """`algorithm.reference_update_every`."""
    if not source.flag("sync_ref_model"):
        return 0
    if source.number("ref_model_mixup_alpha") != 1.0:
        source.remark("TRL mixes reference and policy; here the reference becomes the policy")
    return multiple(source.number("ref_model_sync_steps"), updates_per_step(source)) // updates_per_step(source)


def pipeline_mode(source: Source) -> str:
    """`pipeline.mode`."""
    if method(source) == "async_grpo":
        return "async"
    source.remark(
        "TRL generates and trains in turn, and so does `sync`: one part of the GPUs waits for the other. "
        "`mode: async` with `max_staleness: 1` uses all of them"
    )
    return "sync"


def in_async(name: str) -> Callable[[Source], Any]:
    """An argument of the asynchronous trainer."""
    return lambda source: source.count(name) if method(source) == "async_grpo" else None


BUILT_IN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")


def reward_names(source: Source) -> list[str]:
    """The reward functions of the arguments."""
    names = source.get("reward_funcs")
    return [str(name) for name in names] if isinstance(names, list) else [str(names)] if names else []


def is_math(source: Source) -> bool:
    """Whether the only reward is TRL's comparison of mathematical answers, which the task `math` has, too."""
    return reward_names(source) == ["accuracy_reward"]


def task(source: Source) -> str:
    """`task.use`, with an adapter for TRL's reward functions."""
    if is_math(source):
        return "math"
    if source.get("reward_model_name_or_path", "reward_model_path"):
        source.remark("there is no reward model: call one from a reward function, or use the task `judge`")
    names = reward_names(source) or ["my_reward"]
    imports = [
        f"from {name.rpartition('.')[0] if '.' in name else 'trl.rewards' if name in BUILT_IN else 'my_rewards'} "
        f"import {name.rpartition('.')[2]}"
        for name in names
    ]
    weights = source.get("reward_weights")
    weights = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    functions = ", ".join(f"({name.rpartition('.')[2]}, {weight})" for name, weight in zip(names, weights, strict=True))
    source.remark(
        "write rewards.py beside this file; TRL's functions get lists, and these one response:\n"
        + "\n".join(f"    {line}" for line in dict.fromkeys(imports))
        + "\n\n    def reward(prompt, response):\n"
        '        columns = {name: [value] for name, value in prompt.items() if name != "prompt"}\n'
        '        completions = [[{"role": "assistant", "content": response}]]\n'
        f"        functions = [{functions}]\n"
        '        scores = [(weight, f(prompts=[prompt["prompt"]], completions=completions, **columns)[0])\n'
        "                  for f, weight in functions]\n"
        "        return sum(weight * score for weight, score in scores if score is not None)"
    )
    return "rewards:reward"


def dataset(source: Source) -> str | None:
    """`data.train.path`."""
    name = source.get("dataset_name")
    if name is None:
        source.remark("the arguments name no data set: set data.train.path (docs/data.md)")
        return None
    return str(name) if is_local(str(name)) else f"hf:{name}"


def held_out(source: Source) -> str | None:
    """`data.eval.path`."""
    if source.get("dataset_name") is None:
        source.remark("the arguments name no data set: set data.eval.path (docs/data.md)")
        return None
    if source.get("eval_strategy") in (None, "no", False):
        source.remark("TRL does not evaluate here; asyncrl does, so name held-out prompts that exist")
    return dataset(source)


def is_local(name: str) -> bool:
    """Whether a data set is a file or folder."""
    return name.startswith((".", "/", "~")) or os.path.exists(name)


def on_hub(name: str) -> Callable[[Source], Any]:
    """An argument about a data set of the hub."""

    def value(source: Source) -> Any:
        found = source.get("dataset_name")
        return source.get(name) if found is not None and not is_local(str(found)) else None

    return value


def name(source: Source) -> str | None:
    """`name`: that of the run, or of the output folder."""
    return run_name(source.get("run_name") or PurePath(str(source.get("output_dir") or "")).name)
