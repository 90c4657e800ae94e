"""What several of verl's keys mean together. The table is in ``verl.py``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Literal

from asyncrl_cli.convert.common import PLACEHOLDER_STEPS, Devices, data_path, divided, multiple, running_rollouts, split
from asyncrl_cli.convert.source import Source

A = "actor_rollout_ref.actor."
R = "actor_rollout_ref.rollout."
M = "actor_rollout_ref.model."
F = f"{A}fsdp_config."
V1 = "trainer.v1."
CORRECTION = "algorithm.rollout_correction."
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
)

Mode = Literal["sync", "one_step_off", "colocate_async", "separate_async", "fully_async"]


def mode(source: Source) -> Mode:
    """Which of verl's trainers the configuration is for."""
    if any(name.startswith("async_training.") for name in source.given):
        return "fully_async"
    if source.get(f"{V1}trainer_mode") in ("separate_async", "colocate_async"):
        return "separate_async" if source.get(f"{V1}trainer_mode") == "separate_async" else "colocate_async"
    return "one_step_off" if "rollout.nnodes" in source.given else "sync"


def pipeline_mode(source: Source) -> str:
    """`pipeline.mode`."""
    found = mode(source)
    if found == "sync":
        source.remark(
            "this configuration of verl generates and trains in turn, and so does `sync`: half of the GPUs wait. "
            "`mode: async` with `max_staleness: 1` uses all of them"
        )
    return found if found in ("sync", "one_step_off") else "async"


def max_staleness(source: Source) -> int | None:
    """`pipeline.max_staleness`."""
    found = mode(source)
    if found in ("sync", "one_step_off"):
        return None
    if found == "fully_async":
        return math.ceil(source.number("async_training.staleness_threshold"))
    return max(source.count(f"{V1}sampler.max_off_policy_threshold") - 1, 1)


def publish_every(source: Source) -> int:
    """`pipeline.publish_every`."""
    keys = {"fully_async": "async_training.trigger_parameter_sync_step"}
    keys["separate_async"] = f"{V1}separate_async.parameter_sync_step"
    return max(source.count(keys[mode(source)]), 1) if mode(source) in keys else 1


def weight_update(source: Source) -> str | None:
    """`pipeline.weight_update`: verl aborts rollouts, and continues them with a new KV cache, or lets them finish."""
    if mode(source) == "fully_async":
        return "recompute" if source.flag("async_training.partial_rollout") else "drain"
    return "recompute" if mode(source) in ("separate_async", "colocate_async") else None


def groups_per_step(source: Source) -> int:
    """`pipeline.groups_per_step`: the prompts of a step."""
    if mode(source) == "fully_async":
        return max(source.count(f"{A}ppo_mini_batch_size") * source.count("async_training.require_batches"), 1)
    return max(source.count("data.train_batch_size"), 1)


def minibatches(source: Source) -> int:
    """`trainer.minibatches`: updates of a pass. verl gives the prompts of one."""
    groups, prompts = groups_per_step(source), source.count(f"{A}ppo_mini_batch_size")
    if not prompts or groups % prompts:
        source.remark(f"{groups} groups are not divisible into minibatches of {prompts}: choose the number of updates")
        return 1
    return groups // prompts


def updates_per_step(source: Source) -> int:
    """Optimizer updates of a step."""
    groups, prompts = groups_per_step(source), source.count(f"{A}ppo_mini_batch_size")
    return max(source.count(f"{A}ppo_epochs"), 1) * (groups // prompts if prompts and groups % prompts == 0 else 1)


def steps(source: Source) -> int:
    """`stop.steps`."""
    every = publish_every(source)
    if source.number("trainer.total_training_steps") > 0:
        return multiple(source.number("trainer.total_training_steps"), every)
    if mode(source) == "fully_async" and source.number("rollout.total_rollout_steps") > 0:
        return multiple(max(source.count("rollout.total_rollout_steps") // groups_per_step(source), 1), every)
    # Long enough for the intervals, or the spec would be warned about our own number.
    longest = max(interval(name)(source) for name in ("trainer.test_freq", "trainer.save_freq"))
    versions = ((max_staleness(source) or 0) + 1) * every + 1
    placeholder = multiple(max(PLACEHOLDER_STEPS, longest, versions, source.number(f"{A}optim.lr_warmup_steps")), every)
    source.remark(
        f"{placeholder} is a placeholder: verl counts {source.count('trainer.total_epochs')} epochs, "
        f"which is epochs · prompts / {groups_per_step(source)} steps"
    )
    return placeholder


def interval(name: str) -> Callable[[Source], int]:
    """An interval in steps. verl's asynchronous trainers count versions."""

    def value(source: Source) -> int:
        count = max(source.count(name), 0)
        return multiple(
            count * publish_every(source) if mode(source) == "fully_async" else count, publish_every(source)
        )

    return value


def devices(source: Source) -> Devices:
    """How GPUs are distributed. In verl's synchronous trainer all of them generate, and then all of them train."""
    per_engine = max(source.count(f"{R}tensor_model_parallel_size"), 1)
    trainer = source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node")
    if mode(source) in ("sync", "colocate_async"):
        return split(trainer, per_engine)
    prefix = R if mode(source) == "separate_async" else "rollout."
    generating = max(source.count(f"{prefix}nnodes"), 1) * max(source.count(f"{prefix}n_gpus_per_node"), 1)
    return Devices(max(trainer, 1), max(generating // per_engine, 1), per_engine)


def max_running_rollouts(source: Source) -> int:
    """`rollout.max_running_rollouts`: verl's limit, or what the versions in the bound have to generate."""
    versions = ((max_staleness(source) or 0) + 1 + (mode(source) == "one_step_off")) * publish_every(source)
    size = max(source.count(f"{R}n"), 1)
    return running_rollouts(source.count(f"{R}max_num_seqs"), size, groups_per_step(source) * versions, devices(source))


def ranks(source: Source) -> int:
    """`trainer.ranks`."""
    found = devices(source)
    if mode(source) in ("sync", "colocate_async"):
        divided(source, found, source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node"))
    return found.ranks


def gpu_memory(source: Source) -> float | None:
    """vLLM's share of a GPU, where an engine had a GPU for itself."""
    shared = mode(source) in ("sync", "colocate_async")
    value: float | None = (
        None if shared else source.get(f"{R}standalone_gpu_memory_utilization", f"{R}gpu_memory_utilization")
    )
    return value


def sequence_parallel(source: Source) -> int:
    """`trainer.sequence_parallel`."""
    size, found = _gpus_per_sequence(source), devices(source).ranks
    if found % size == 0:
        return size
    source.remark(f"verl divides a sequence over {size} GPUs, which does not divide the {found} ranks here")
    return 1


def _gpus_per_sequence(source: Source) -> int:
    return max(source.count(f"{A}ulysses_sequence_parallel_size"), 1)


def tokens_per_microbatch(source: Source) -> int:
    """`trainer.tokens_per_microbatch`: at least one rollout."""
    longest = source.count("data.max_prompt_length") + source.count("data.max_response_length")
    if source.flag(f"{A}use_dynamic_bsz"):
        return max(_gpus_per_sequence(source) * source.count(f"{A}ppo_max_token_len_per_gpu"), longest)
    return longest * max(source.count(f"{A}ppo_micro_batch_size_per_gpu"), 1)


def lora_rank(source: Source) -> int:
    """The rank of adapters, of FSDP or Megatron; 0: none."""
    return max(source.count(f"{M}lora_rank"), source.count(f"{M}lora.rank"))


def max_prompt_tokens(source: Source) -> int:
    """`rollout.max_prompt_tokens`."""
    if source.get("data.truncation") in ("left", "right", "middle") and not source.flag("data.filter_overlong_prompts"):
        source.remark("verl truncates longer prompts, and trains on them")
    return source.count("data.max_prompt_length")


def temperature(source: Source) -> float:
    """`rollout.sampling.temperature`."""
    if source.get(f"{R}do_sample") is not None and not source.flag(f"{R}do_sample"):
        source.remark("do_sample is false in verl; here rollouts are always sampled")
    value: float = source.get(f"{R}temperature")
    return value


def dtype(key: str) -> Callable[[Source], str]:
    """`trainer.dtype` or `rollout.dtype`."""

    def value(source: Source) -> str:
        if str(source.get(key)) in ("float16", "fp16", "half"):
            source.remark("float16 is not supported: bfloat16 is used")
        return "bfloat16"

    return value


def is_complete(source: Source) -> bool:
    """Whether this is the output of `--cfg job` or a copy of verl's own file, which have keys that no user wrote."""
    return "data.return_raw_input_ids" in source.given or any(name.endswith("_target_") for name in source.given)


def critic_differs(source: Source) -> bool:
    """Whether there is a critic with settings that a user wrote. A complete configuration has all of them."""
    return source.get("algorithm.adv_estimator") == "gae" and not is_complete(source)


def reward_arguments_are_used(source: Source) -> bool:
    """Whether arguments of the reward function matter. The overlong penalty's are converted."""
    return source.get("reward.custom_reward_function.path", "custom_reward_function.path") is not None


def lengths_differ(source: Source) -> bool:
    """Whether rollouts have other limits than the data."""
    return any(
        source.count(f"{R}{name}_length") not in (0, source.count(f"data.max_{name}_length"))
        for name in ("prompt", "response")
    )


def offload(source: Source) -> str:
    """`trainer.offload`."""
    if source.flag(f"{F}param_offload") or source.flag(f"{F}offload_policy"):
        return "all"
    return "optimizer" if source.flag(f"{F}optimizer_offload") else "none"


def warmup_updates(source: Source) -> int:
    """`trainer.schedule.warmup_updates`. verl moves its schedule once per step, not per update."""
    count = source.number(f"{A}optim.lr_warmup_steps")
    if count < 0:
        ratio = source.number(f"{A}optim.lr_warmup_steps_ratio")
        count = ratio * steps(source) if ratio > 0 else 0
    return round(count * updates_per_step(source))


ESTIMATORS = {
    "gae": ("ppo", "gae"),
    "grpo": ("grpo", "group_norm"),
    "grpo_vectorized": ("grpo", "group_norm"),
    "rloo": ("rloo", "leave_one_out"),
    "rloo_vectorized": ("rloo", "leave_one_out"),
    "reinforce_plus_plus": ("reinforce_pp", "none"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "group_mean"),
}
"""verl's advantage estimators: the preset, and `algorithm.advantage`."""
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
"""verl's names of tool formats: vLLM's parsers of them."""
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "sequence_sum",
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def chosen(source: Source, key: str, table: dict[str, Any], fallback: str) -> Any:
    """The table's entry for the value of a key; the fallback's, with a remark, if it has none."""
    value = str(source.get(key))
    if value not in table:
        source.remark(f"{key}={value} has no counterpart: `{fallback}` is used instead")
    return table.get(value, table[fallback])


def tool_parser(source: Source) -> str | None:
    """`rollout.tool_parser`."""
    key = f"{R}multi_turn.format"
    if not source.flag(f"{R}multi_turn.enable") or not source.get(key):
        return None
    name: str = chosen(source, key, TOOL_FORMATS, "hermes")
    return name


def preset(source: Source) -> str:
    """`algorithm.preset`. All keys that a preset decides are written, so it is only a label here."""
    name: str = ESTIMATORS.get(str(source.get("algorithm.adv_estimator")), ESTIMATORS["grpo"])[0]
    other = LOSSES.get(str(source.get(f"{A}policy_loss.loss_mode")), "clip")
    return other if name == "grpo" and other != "clip" else name


def advantage(source: Source) -> str:
    """`algorithm.advantage`."""
    name: str = chosen(source, "algorithm.adv_estimator", ESTIMATORS, "grpo")[1]
    if name == "group_norm" and not source.flag("algorithm.norm_adv_by_std_in_grpo"):
        name = "group_mean"
    if name != "gae" and name != "none" and source.count(f"{R}n") < 2:
        source.remark("an advantage relative to the group needs a rollout.group_size of 2 or more")
    return name


def clip(side: str) -> Callable[[Source], float]:
    """`algorithm.clip_low` or `clip_high`. Ratios are not negative, so a `clip_low` above 1 is none."""

    def value(source: Source) -> float:
        found = source.number(f"{A}clip_ratio_{side}", f"{A}clip_ratio")
        return min(found, 1.0) if side == "low" else found

    return value


def dual_clip(source: Source) -> float | None:
    """`algorithm.dual_clip`, of `vanilla` only."""
    return source.get(f"{A}clip_ratio_c") if source.get(f"{A}policy_loss.loss_mode") == "vanilla" else None


def sequence_divisor(source: Source) -> int | None:
    """`algorithm.sequence_divisor`."""
    found = source.get(f"{A}loss_agg_mode")
    if found == "seq-mean-token-sum":
        return 1
    return source.count(f"{A}loss_scale_factor") or None if found == "seq-mean-token-sum-norm" else None


def kl_coef(source: Source) -> float:
    """`algorithm.kl_coef`."""
    in_loss, in_reward = source.flag(f"{A}use_kl_loss"), source.flag("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        source.remark("a spec has one KL penalty: the one in the loss is used, the one in the reward is not")
    if in_reward and not in_loss and source.get("algorithm.kl_ctrl.type") not in (None, "fixed"):
        source.remark("the coefficient is fixed: there is no adaptive control")
    if in_loss:
        return source.number(f"{A}kl_loss_coef")
    return source.number("algorithm.kl_ctrl.kl_coef") if in_reward else 0.0


def kl_estimator(source: Source) -> str:
    """`algorithm.kl_estimator`."""
    key = f"{A}kl_loss_type" if kl_placement(source) == "loss" else "algorithm.kl_penalty"
    name = str(source.get(key))
    if name.endswith("+"):
        source.remark(f"`{name}` is a value of {name[:-1]} with the gradient of k2: k2 is used")
        return "k2"
    if not kl_coef(source) and name not in KL_ESTIMATORS:
        return "k3"
    found: str = chosen(source, key, KL_ESTIMATORS, "low_var_kl")
    return found


def kl_placement(source: Source) -> str:
    """`algorithm.kl_placement`."""
    in_reward = source.flag("algorithm.use_kl_in_reward") and not source.flag(f"{A}use_kl_loss")
    return "reward" if in_reward else "loss"


def router_replay(source: Source) -> bool | None:
    """`algorithm.router_replay`."""
    mode = source.get(f"{A}router_replay.mode")
    if mode == "R2":
        source.remark("R2 replays the trainer's own choice of experts: there is R3 alone, which replays the engine's")
    return mode == "R3" or None


def correction_preset(source: Source) -> str:
    """`algorithm.correction.preset`: both set no weights."""
    if source.flag(f"{CORRECTION}bypass_mode"):
        if source.get(f"{CORRECTION}loss_type") == "reinforce":
            source.remark("REINFORCE with importance weights has no counterpart: the clipped objective is used")
        return "off"
    return "decoupled"


def bounds(source: Source, key: str) -> tuple[float | None, float | None]:
    """A threshold of verl: a number (the upper one), or a text `lower_upper`."""
    parts = [part for part in str(source.get(key) or "").split("_") if part]
    try:
        numbers = [float(part) for part in parts[:2]]
    except ValueError:
        return None, None
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, numbers[0] if numbers else None)


def level(source: Source) -> str | None:
    """`algorithm.correction.level`. In bypass mode the clipped ratio itself is the correction."""
    if source.flag(f"{CORRECTION}bypass_mode"):
        return None
    found = source.get(f"{CORRECTION}rollout_is")
    if found not in ("token", "sequence", None):
        source.remark(f"rollout_is={found} has no counterpart: there are no weights")
    return found if found in ("token", "sequence") else None


def weight_bound(key: str) -> Callable[[Source], float | None]:
    """`cap`, `mask_low` or `mask_high` of a correction with weights."""

    def value(source: Source) -> float | None:
        if level(source) is None:
            return None
        low, high = bounds(source, f"{CORRECTION}rollout_is_threshold")
        return {"cap": high if low is None else None, "mask_low": low, "mask_high": high if low else None}[key]

    return value


def rejection(key: str) -> Callable[[Source], Any]:
    """`reject_by`, `reject_over`, `reject_low` or `reject_high`."""

    def value(source: Source) -> Any:
        wanted = str(source.get(f"{CORRECTION}rollout_rs") or "")
        if wanted and source.flag(f"{CORRECTION}bypass_mode"):
            if key == "reject_by":
                source.remark("in bypass mode nothing is rejected: set correction.preset: decoupled to reject")
            return None
        found = re.fullmatch(r"(token|seq_(?:sum|mean|max))_(k[123])", wanted)
        if not wanted or not found:
            if wanted and key == "reject_by":
                source.remark(f"rollout_rs={wanted} has no counterpart: nothing is rejected")
            return None
        low, high = bounds(source, f"{CORRECTION}rollout_rs_threshold")
        over = found[1].replace("seq_", "sequence_")
        return {"reject_by": found[2], "reject_over": over, "reject_low": low, "reject_high": high}[key]

    return value


def overlong(key: str) -> Callable[[Source], float | None]:
    """`algorithm.overlong_penalty` or `overlong_buffer` (a fraction; verl counts tokens)."""

    def value(source: Source) -> float | None:
        section = next((name for name in OVERLONG if source.flag(f"{name}enable")), None)
        if section is None:
            return 0.0 if key == "penalty" else None
        if key == "penalty":
            return source.number(f"{section}penalty_factor") or 1.0
        return min(source.number(f"{section}len") / max(source.count("data.max_response_length"), 1), 1.0)

    return value


def task(source: Source) -> str:
    """`task.use`, with an adapter for verl's reward functions."""
    if source.flag(f"{R}multi_turn.enable"):
        source.remark(
            "this configuration has several turns: write an environment or an agent with its tools (docs/agents.md), "
            "and name it here as `module:Class` or `module:function`"
        )
        return "environment:Environment"
    path = source.get("reward.custom_reward_function.path", "custom_reward_function.path")
    name = source.get("reward.custom_reward_function.name", "custom_reward_function.name") or "compute_score"
    stem = re.sub(r"\W", "_", str(path).rpartition("/")[2].removesuffix(".py")) if path else ""
    default = f"from verl.utils.reward_score import default_compute_score as {name}"
    column = source.get("data.reward_fn_key") or "data_source"
    module = f"from {stem} import {name}" if path else default
    source.remark(
        "write rewards.py beside this file; verl's functions have other arguments:\n"
        f"    {module}\n\n"
        "    def reward(prompt, response):\n"
        f'        score = {name}(prompt["{column}"], response, prompt["reward_model"]["ground_truth"], '
        'prompt.get("extra_info"))\n'
        '        return score["score"] if isinstance(score, dict) else score'
    )
    return "rewards:reward"


def held_out_files(source: Source) -> list[str]:
    """The files of held-out prompts."""
    found = source.get("data.val_files")
    return [str(path) for path in found] if isinstance(found, list) else [str(found)] if found else []


def held_out(source: Source) -> str | None:
    """`data.eval.path`: the first file."""
    files = held_out_files(source)
    if not files:
        source.remark("the configuration has no held-out prompts: set data.eval.path")
    return data_path(files[:1], source)


def further_sets(source: Source) -> dict[str, Any] | None:
    """`evaluation.sets`: the other files, each by its folder's name."""
    sets: dict[str, Any] = {}
    for path in held_out_files(source)[1:]:
        *_, folder, file = ["", *path.split("/")]
        name = re.sub(r"\W", "_", folder or file.partition(".")[0])[:28] or "set"
        unique = next(name + suffix for suffix in ("", *map(str, range(2, 99))) if name + suffix not in sets)
        sets[unique] = {"data": {"path": path, "prompt_column": source.get("data.prompt_key")}}
    return sets or None
