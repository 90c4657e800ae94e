"""Rules for lengths, counts and intervals, and for the limits that staleness sets."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import divisors, rule, warning
from asyncrl_cli.spec.sections import ExperimentSpec, needs_no_mask, why_rows_are_separate


@rule
def lengths(spec: ExperimentSpec) -> Iterator[Problem]:
    """The longest prompt and the longest response together fit into `model.max_length`."""
    rollout, limit, total = spec.rollout, spec.model.max_length, spec.rollout.longest_rollout
    if total > limit:
        sum_ = f"{rollout.max_prompt_tokens} prompt + {rollout.max_response_tokens} response tokens"
        hint = f"raise model.max_length to {total}"
        if limit > rollout.max_prompt_tokens:
            hint += f", or lower rollout.max_response_tokens to {limit - rollout.max_prompt_tokens}"
        yield Problem("model.max_length", f"{limit} is less than {sum_}", hint)


@rule
def microbatch(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.tokens_per_microbatch` has room for the longest rollout."""
    total, budget = spec.rollout.longest_rollout, spec.trainer.tokens_per_microbatch
    if budget != "auto" and total > budget:
        message = f"{budget} is less than the {total} tokens that a rollout may have"
        yield warning("trainer.tokens_per_microbatch", message, f"raise it to {total} or more")


@rule
def whole_versions(spec: ExperimentSpec) -> Iterator[Problem]:
    """A run ends, evaluates and writes checkpoints at a published version: these steps are multiples of
    `publish_every`."""
    every, evaluation = spec.pipeline.publish_every, spec.evaluation
    steps_of = {"stop.steps": spec.stop.steps or 0, "checkpoints.every": spec.checkpoints.every}
    steps_of["evaluation.every"] = evaluation.every
    steps_of |= {f"evaluation.sets.{name}.every": each.every or 0 for name, each in evaluation.sets.items()}
    for path, steps in steps_of.items():
        if steps % every:
            near = max(every, steps // every * every)
            yield Problem(path, f"{steps} is not a multiple of pipeline.publish_every {every}", f"use {near}")


@rule
def end(spec: ExperimentSpec) -> Iterator[Problem]:
    """`stop` has `steps`, `epochs`, or both. `steps: 0` needs `model.warm_start`."""
    if spec.stop.steps is None and spec.stop.epochs is None:
        yield Problem("stop", "has neither steps nor epochs", "set steps, or epochs (passes over the prompts)")
    if spec.stop.steps == 0 and spec.model.warm_start is None:
        yield Problem("stop.steps", "nothing is trained in 0 steps", "raise it, or give model.warm_start")


@rule
def critic_warmup(spec: ExperimentSpec) -> Iterator[Problem]:
    """`algorithm.critic.warmup_steps` is less than `stop.steps`."""
    warmup_steps, steps = spec.algorithm.critic.warmup_steps, spec.stop.total
    if spec.algorithm.needs_critic and warmup_steps >= steps > 0:
        message = f"{warmup_steps} steps train only the critic, so the policy is never trained in {steps}"
        yield Problem("algorithm.critic.warmup_steps", message, "lower it, or raise stop.steps")


@rule
def group_fits_engine(spec: ExperimentSpec) -> Iterator[Problem]:
    """An engine can run all rollouts of a group at the same time."""
    group, running = spec.rollout.group_size, spec.rollout.max_running_rollouts
    if running != "auto" and group > running:
        message = f"{running} is less than rollout.group_size {group}"
        yield Problem("rollout.max_running_rollouts", message, f"raise it to {group} or more")


@rule
def engine_range(spec: ExperimentSpec) -> Iterator[Problem]:
    """`rollout.engines.min` is at most `rollout.engines.max`."""
    low, high = spec.rollout.min_engines, spec.rollout.max_engines
    if low > high:
        yield Problem(
            "rollout.engines.max",
            f"{high} is less than rollout.engines.min {low}",
            f"use {low} or more",
        )


@rule
def minibatches(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.minibatches` divides `pipeline.groups_per_step`."""
    minibatch_count, groups = spec.trainer.minibatches, spec.pipeline.groups_per_step
    if groups % minibatch_count:
        message = f"{minibatch_count} does not divide pipeline.groups_per_step {groups}"
        yield Problem("trainer.minibatches", message, f"use one of {divisors(groups)}")


@rule
def ranks_have_work(spec: ExperimentSpec) -> Iterator[Problem]:
    """Every minibatch has at least one rollout for each rank or group of `trainer.sequence_parallel` ranks."""
    rollouts = spec.pipeline.groups_per_step * spec.rollout.group_size // spec.trainer.minibatches
    ranks, size = spec.trainer.ranks, spec.trainer.sequence_parallel
    if 0 < rollouts < ranks // size:
        groups = f" / trainer.sequence_parallel {size}" if size > 1 else ""
        message = f"{ranks}{groups} is more than the {rollouts} rollouts of a minibatch"
        yield Problem("trainer.ranks", message, f"lower it to {rollouts * size}, or use fewer minibatches")


@rule
def sequence_parallel(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.sequence_parallel` divides `trainer.ranks`, and needs `trainer.attention` to be `sdpa` or flash
    attention."""
    trainer = spec.trainer
    size = trainer.sequence_parallel
    if trainer.ranks % size:
        message = f"{size} does not divide trainer.ranks {trainer.ranks}"
        yield Problem("trainer.sequence_parallel", message, f"use one of {divisors(trainer.ranks)}")
    if size == 1:
        return
    if trainer.attention == "eager":
        message = "eager cannot be divided among the ranks of trainer.sequence_parallel"
        yield Problem("trainer.attention", message, "use sdpa, or set trainer.sequence_parallel to 1")
    elif trainer.packing and trainer.attention == "sdpa":
        message = "with sdpa every rank has a mask of the full packed sequence, which sequence_parallel does not divide"
        yield warning("trainer.packing", message, "set it to false, or use flash attention")


@rule
def expert_parallel(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.expert_parallel` divides `trainer.ranks`, and needs ZeRO-3. It excludes adapters
    and `trainer.offload`."""
    trainer = spec.trainer
    size, key = trainer.expert_parallel, "trainer.expert_parallel"
    if trainer.ranks % size:
        message = f"{size} does not divide trainer.ranks {trainer.ranks}"
        yield Problem(key, message, f"use one of {divisors(trainer.ranks)}")
    if size == 1:
        return
    for setting, excluded, hint in (
        (f"trainer.zero_stage {trainer.zero_stage}", trainer.zero_stage != 3, "set trainer.zero_stage to 3"),
        ("model.lora", spec.model.lora is not None, "train all weights"),
        ("trainer.offload", trainer.offload != "none", "set trainer.offload to none"),
    ):
        if excluded:
            yield Problem(key, f"does not work with {setting}", f"{hint}, or set {key} to 1")


@rule
def offload(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.offload` needs GPU ranks; `optimizer` needs ZeRO-1 or higher, and `all` needs ZeRO-3."""
    trainer = spec.trainer
    min_stage = {"none": 0, "optimizer": 1, "all": 3}[trainer.offload]
    if min_stage and not trainer.gpus_per_rank:
        message = f"`{trainer.offload}` has no effect: ranks without a GPU are in CPU memory anyway"
        yield Problem("trainer.offload", message, "set it to none")
    elif trainer.zero_stage < min_stage:
        message = f"`{trainer.offload}` needs ZeRO {min_stage}, and trainer.zero_stage is {trainer.zero_stage}"
        yield Problem("trainer.offload", message, f"raise trainer.zero_stage to {min_stage}, or offload less")


@rule
def attention(spec: ExperimentSpec) -> Iterator[Problem]:
    """Flash attention (`trainer.attention`) needs GPU ranks and bfloat16."""
    trainer = spec.trainer
    if needs_no_mask(trainer.attention) and not (trainer.gpus_per_rank and trainer.dtype == "bfloat16"):
        where = "GPU" if trainer.gpus_per_rank else "CPU"
        message = f"{trainer.attention} needs a GPU and bfloat16, and the trainer is on {where} in {trainer.dtype}"
        yield Problem("trainer.attention", message, "use sdpa")


@rule
def share_prefixes(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.share_prefixes: true` needs `trainer.attention` to be `sdpa` or `varlen`, and excludes
    `trainer.sequence_parallel`."""
    if spec.trainer.share_prefixes and (setting := why_rows_are_separate(spec.trainer)) is not None:
        yield Problem("trainer.share_prefixes", f"does not work with {setting}", "remove it, or change that setting")


@rule
def mode_presets(spec: ExperimentSpec) -> Iterator[Problem]:
    """Mode `sync` has staleness 0 (except with `partial_rollouts`), `one_step_off` staleness 1, and both have
    `weight_update: drain`."""
    pipeline = spec.pipeline
    preset = {"sync": 0, "one_step_off": 1}.get(pipeline.mode)
    if preset is None:
        return
    if pipeline.max_staleness != preset and not pipeline.partial_rollouts:
        message = f"mode {pipeline.mode} means {preset}, not {pipeline.max_staleness}"
        yield Problem("pipeline.max_staleness", message, f"set it to {preset}, remove it, or use mode: async")
    if pipeline.weight_update != "drain":
        message = f"mode {pipeline.mode} means drain, not {pipeline.weight_update}"
        yield Problem("pipeline.weight_update", message, "set it to drain, remove it, or use mode: async")


@rule
def partial_rollouts(spec: ExperimentSpec) -> Iterator[Problem]:
    """`partial_rollouts` needs mode `sync`, and a `max_staleness` of 1 or more."""
    pipeline = spec.pipeline
    if pipeline.partial_rollouts and pipeline.mode != "sync":
        message = f"needs mode sync: mode {pipeline.mode} never stops generating"
        yield Problem("pipeline.partial_rollouts", message, "remove it, or use mode: sync")
    elif pipeline.partial_rollouts and pipeline.max_staleness == 0:
        message = "with 0 no rollout can continue under the next weights, as partial_rollouts requires"
        yield Problem("pipeline.max_staleness", message, "set it to 1, or remove it")


TRIAL_STEPS = 8
"""A run of fewer steps is a trial: it gets no warning about asynchrony."""


@rule
def versions(spec: ExperimentSpec) -> Iterator[Problem]:
    """New weights are published before the run ends."""
    steps, every = spec.stop.total, spec.pipeline.publish_every
    if every >= steps >= TRIAL_STEPS:
        message = f"{every} is not less than stop.steps {steps}: all steps train on rollouts of the initial weights"
        yield warning("pipeline.publish_every", message, "lower it")


@rule
def upload(spec: ExperimentSpec) -> Iterator[Problem]:
    """`checkpoints.upload` is a URL, not a folder or a command."""
    if "://" not in (spec.checkpoints.upload or "://"):
        hint = "write file:///FOLDER for a folder; no command is run, so let a program of yours watch the run's folder"
        yield Problem("checkpoints.upload", "is not a URL", hint)


@rule
def warmup(spec: ExperimentSpec) -> Iterator[Problem]:
    """The learning rate's warm-up fits into its schedule."""
    schedule = spec.trainer.schedule
    updates = (schedule.steps or spec.stop.total) * spec.trainer.epochs * spec.trainer.minibatches
    if schedule.warmup_updates > updates > 0:
        message = f"longer than the schedule, which has {updates} updates"
        yield warning("trainer.schedule.warmup_updates", message, f"use fewer than {updates}")
