"""Rules for the algorithm and its corrections."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl_cli.spec.algorithm import (
    GAE,
    GROUP_BASELINES,
    RUNNING_BASELINE,
    TURN_BASELINES,
    AlgorithmSpec,
    CorrectionSpec,
)
from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import rule, warning
from asyncrl_cli.spec.rules.model import MIXTURES
from asyncrl_cli.spec.sections import ExperimentSpec

REPLAYED = MIXTURES
"""Architectures that support `router_replay`, as in ``train.model.router_replay.ROUTERS``."""


@rule
def correction(spec: ExperimentSpec) -> Iterator[Problem]:
    """Stale rollouts are corrected: by weights, masks or rejection, or by a clipped ratio relative to the policy that
    sampled them. A bound is set only together with the key that uses it."""
    algorithm, staleness = spec.algorithm, spec.pipeline.max_staleness
    settings = algorithm.correction
    key = "algorithm.correction"
    corrects = settings.level is not None or settings.reject_by is not None
    if settings.proximal != "behaviour" and not corrects and staleness > 0:
        message = f"no correction for rollouts that are up to {staleness} versions stale"
        yield warning(f"{key}.level", message, "use the preset truncated")
    if settings.proximal == "behaviour" and settings.level is not None:
        message = "the clipped ratio is already relative to the behaviour policy; weights would correct twice"
        yield Problem(f"{key}.level", message, f"set it to null, or {key}.proximal to recomputed")
    bounds = [bound for bound in ("cap", "mask_low", "mask_high") if getattr(settings, bound) is not None]
    if settings.level is not None and not bounds:
        yield warning(f"{key}.cap", "missing: without a bound, one token can dominate a batch", "set it to 2.0")
    if settings.mask_low is not None and settings.mask_high is not None and settings.mask_low >= settings.mask_high:
        yield Problem(f"{key}.mask_low", f"{settings.mask_low} is not below mask_high {settings.mask_high}", "lower it")
    if settings.reject_by is not None and settings.reject_high is None:
        yield Problem(f"{key}.reject_by", "has no effect without a bound", f"set {key}.reject_high")
    if settings.reject_by == "k1" and settings.reject_over == "sequence_max":
        yield Problem(f"{key}.reject_over", "k1 has no maximum: it can be negative", "set reject_by to k2 or k3")
    if settings.reject_by in ("k2", "k3") and settings.reject_low is not None:
        yield Problem(f"{key}.reject_low", f"{settings.reject_by} has no lower bound except 0", "remove it")
    if settings.reject_by == "k1" and settings.reject_high is not None:
        low = settings.reject_low or 1.0 / settings.reject_high
        if low >= settings.reject_high:
            message = f"{settings.reject_high:g} is not above the lower bound {low:g}"
            yield Problem(f"{key}.reject_high", message, "raise it above 1")


@rule
def router_replay(spec: ExperimentSpec) -> Iterator[Problem]:
    """`algorithm.router_replay` needs engines on GPUs, and supports the architecture of `model.init`. A saved model is
    checked before the run."""
    if spec.algorithm.router_replay and not spec.rollout.gpus_per_engine:
        hint = "set it to false, or use engines on GPUs (rollout.gpus_per_engine)"
        yield Problem("algorithm.router_replay", "vLLM records the experts of tokens on GPUs only", hint)
    if spec.algorithm.router_replay and spec.model.init and spec.model.init.architecture not in REPLAYED:
        message = f"the experts of {spec.model.init.architecture} cannot be replayed"
        hint = f"set it to false; it is for mixtures of experts: {', '.join(REPLAYED)}"
        yield Problem("algorithm.router_replay", message, hint)


@rule
def uniform_groups_teach(spec: ExperimentSpec) -> Iterator[Problem]:
    """Groups with equal rewards are excluded only if they have no gradient: their advantages are 0 with a group
    baseline, but a KL penalty and an entropy bonus still have one."""
    algorithm = spec.algorithm
    if algorithm.uniform_groups == "train":
        return
    penalties = [key for key in ("kl_coef", "entropy_coef") if getattr(algorithm, key)]
    if algorithm.advantage in GROUP_BASELINES:
        if penalties and algorithm.uniform_groups == "skip":
            message = f"skip excludes groups with equal rewards, also from {' and '.join(penalties)}"
            hint = "set it to train: otherwise the penalty weakens with every prompt that is solved"
            yield warning("algorithm.uniform_groups", message, hint)
        return
    if spec.rollout.group_size == 1:
        message = f"the rewards of a group of one are always equal, so {algorithm.uniform_groups} excludes every group"
        yield Problem("algorithm.uniform_groups", message, "set it to train, or raise rollout.group_size")
    is_users = ":" in algorithm.advantage
    if (is_users or algorithm.advantage in ("none", GAE, *TURN_BASELINES)) and algorithm.uniform_groups == "skip":
        message = f"with advantage {algorithm.advantage}, skip excludes groups with equal rewards, which have gradients"
        yield warning("algorithm.uniform_groups", message, "set it to train")


@rule
def group_baseline(spec: ExperimentSpec) -> Iterator[Problem]:
    """An advantage relative to the group needs a `group_size` of 2 or more. `running_baseline` needs a `group_size` of
    1, and 2 or more groups per step. `data.filter` does not exclude a prompt after a single rollout."""
    advantage, size, groups = spec.algorithm.advantage, spec.rollout.group_size, spec.pipeline.groups_per_step
    if advantage in (*GROUP_BASELINES, *TURN_BASELINES) and size < 2:
        message = f"advantage {advantage} compares the rollouts of a group, and 1 is too few"
        hint = "raise it to 2 or more (8 is usual), or set algorithm.preset to single_rollout"
        yield Problem("rollout.group_size", message, hint)
    if advantage == RUNNING_BASELINE and size > 1:
        message = (
            f"advantage {advantage} compares a single rollout with the prompt's earlier ones, and a group has {size}"
        )
        hint = f"set it to 1, with pipeline.groups_per_step {groups * size} for as many rollouts, or use group_norm"
        yield Problem("rollout.group_size", message, hint)
    elif advantage == RUNNING_BASELINE and groups < 2:
        message = f"advantage {advantage} is normalized over the groups of a step, and 1 is too few"
        yield Problem("pipeline.groups_per_step", message, "raise it (256 is usual)")
    if size == 1 and spec.data.filter is not None and spec.data.filter.solved_streak == 1:
        message = "1 excludes a prompt after a single correct rollout, because a group has one"
        yield warning("data.filter.solved_streak", message, "raise it to 4 or more, or set revisit_fraction")


@rule
def reward_parts(spec: ExperimentSpec) -> Iterator[Problem]:
    """Reward parts that are normalized separately need `advantage: group_norm`, and exclude settings of a single
    reward."""
    algorithm = spec.algorithm
    key = "algorithm.reward_aggregation"
    for name, weight in algorithm.reward_parts.items():
        if not weight:
            yield Problem(f"algorithm.reward_parts.{name}", "has no effect with weight 0", "raise it, or remove it")
    if not algorithm.parts_apart:
        return
    if algorithm.advantage != "group_norm":
        message = f"normalizes each part within its group, and advantage {algorithm.advantage} does not"
        yield Problem(key, message, "set algorithm.advantage to group_norm, or this to sum_then_normalize")
    single_reward_message = "belongs to a single reward, and normalize_then_sum has several"
    if algorithm.overlong_penalty:
        hint = "set it to 0, and report the length as a metric with its own weight in algorithm.reward_parts"
        yield Problem("algorithm.overlong_penalty", single_reward_message, hint)
    if algorithm.kl_coef and algorithm.kl_placement == "reward":
        hint = "set it to loss, with kl_estimator k2 or k3"
        yield Problem("algorithm.kl_placement", single_reward_message, hint)
    if algorithm.reward_coef != 1:
        hint = "remove it, and change the weights in algorithm.reward_parts"
        yield Problem("algorithm.reward_coef", single_reward_message, hint)


@rule
def kl_penalty(spec: ExperimentSpec) -> Iterator[Problem]:
    """A KL penalty in the loss has a gradient."""
    algorithm = spec.algorithm
    if algorithm.kl_coef and algorithm.kl_placement == "loss" and algorithm.kl_estimator == "k1":
        message = "k1 in the loss has an expected gradient of zero"
        yield warning("algorithm.kl_estimator", message, "use k2 or k3, or kl_placement: reward")


@rule
def teacher(spec: ExperimentSpec) -> Iterator[Problem]:
    """With `distill` and `reward_coef: 0` the policy has something to learn from."""
    algorithm, key = spec.algorithm, "algorithm.reference_path"
    if algorithm.reference_path is None and algorithm.preset == "distill":
        yield Problem(key, "missing: distill learns from a teacher", "name the teacher's folder or hub id")
    if algorithm.reference_path is not None and algorithm.router_replay:
        message = "the model in reference_path cannot use the policy's experts"
        yield Problem("algorithm.router_replay", message, "set it to false")
    uses = {member.use for member in spec.task.mix} | ({spec.task.use} - {None})
    if not algorithm.reward_coef:
        if not algorithm.kl_coef:
            message = "0 leaves nothing to learn from, because kl_coef is 0, too"
            yield Problem("algorithm.reward_coef", message, "raise it, or set algorithm.kl_coef")
        elif algorithm.uniform_groups != "train":
            message = "reject compares rewards, and reward_coef is 0"
            if algorithm.uniform_groups == "skip":
                message = "without rewards every group is uniform"
            yield Problem("algorithm.uniform_groups", message, "set it to train")
    elif "prompts" in uses:
        message, hint = "the task `prompts` has no rewards", "use preset: distill, or a task with rewards"
        report = Problem if uses == {"prompts"} else warning
        yield report("algorithm.reward_coef", message, hint)


@rule
def keys_of_another_choice(spec: ExperimentSpec) -> Iterator[Problem]:
    """Keys that another key makes meaningful are set only with it: of one loss, aggregation or advantage, of a
    correction, of parts of the reward, and of a reference model."""
    algorithm, correction = spec.algorithm, spec.algorithm.correction
    has_parts, has_reference = bool(algorithm.reward_parts), bool(algorithm.kl_coef)
    for key, is_meaningful, required in (
        ("clip_low", algorithm.loss != "sapo", "loss: clip, gspo or cispo"),
        ("clip_high", algorithm.loss != "sapo", "loss: clip, gspo or cispo"),
        ("dual_clip", algorithm.loss not in ("cispo", "sapo"), "loss: clip or gspo"),
        ("sapo_temperatures", algorithm.loss not in ("clip", "gspo", "cispo"), "loss: sapo"),
        ("sequence_divisor", algorithm.aggregation == "sequence_sum", "aggregation: sequence_sum"),
        ("critic", algorithm.advantage == GAE, f"advantage: {GAE}"),
        ("gae_lambda", algorithm.advantage == GAE, f"advantage: {GAE}"),
        ("gamma", algorithm.advantage in ("none", GAE, *TURN_BASELINES), f"advantage: {GAE} or one of turns"),
        ("overlong_buffer", bool(algorithm.overlong_penalty), "overlong_penalty"),
        ("baseline_half_life", algorithm.advantage == RUNNING_BASELINE, f"advantage: {RUNNING_BASELINE}"),
        ("reward_aggregation", has_parts or algorithm.reward_aggregation == "sum_then_normalize", "reward_parts"),
        ("kl_estimator", has_reference, "kl_coef"),
        ("kl_placement", has_reference, "kl_coef"),
        ("reference_path", has_reference, "kl_coef, or preset: distill"),
    ):
        default = AlgorithmSpec.model_fields[key].get_default(
            call_default_factory=True, validated_data={"preset": algorithm.preset}
        )
        if not is_meaningful and getattr(algorithm, key) != default:
            report = Problem if key in ("reward_aggregation", "reference_path") else warning
            yield report(f"algorithm.{key}", f"has no effect without {required}", "set that, or remove this key")
    for choice, keys in {
        "level": ("cap", "mask_low", "mask_high"),
        "reject_by": ("reject_low", "reject_high", "reject_over"),
    }.items():
        for key in keys if getattr(correction, choice) is None else ():
            if getattr(correction, key) not in (None, CorrectionSpec().reject_over):
                message, hint = f"has no effect without {choice}", f"set algorithm.correction.{choice}, or remove it"
                yield Problem(f"algorithm.correction.{key}", message, hint)
