"""What must agree between fields: a small function each, yielding problems with the field to blame.

A rule sees a spec whose fields are each right by themselves. A mend names the numbers that would work. The
docstrings are the sentences that docs/spec.md shows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches

from asyncrl_cli.data.rows import template_columns
from asyncrl_cli.data.sources import kind_of, names_a_file
from asyncrl_cli.spec.algorithm import GAE, AlgorithmSpec
from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.sections import CHARACTERS, ExperimentSpec, SplitSpec

Rule = Callable[[ExperimentSpec], Iterator[Problem]]
RULES: list[Rule] = []

READY_TASKS = (
    *("chain_sum", "spell_backward", "calculator"),
    *("math", "exact", "regex", "unit_tests", "judge", "verifiers", "command"),
)
"""``tasks.load.READY`` says what they are."""
GYM = "gym/"
"""Begins the name of a reasoning-gym data set."""

SOURCES = (
    "Name a .jsonl, .parquet or .csv file, or a folder that `datasets` saved; a relative path starts from the spec's "
    "folder. `hf:owner/name` is a data set of the hub, `module:function` a function."
)
SAVED_MARKS = ("dataset_info.json", "dataset_dict.json")
"""One of these lies in a folder that `datasets` saved."""

OWN_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "max_model_len": "model.max_length",
    "max_num_seqs": "rollout.max_running_rollouts",
    "dtype": "rollout.dtype",
    "seed": "seed",
    "tensor_parallel_size": "rollout.gpus_per_engine",
    "data_parallel_size": "rollout.engines",
    "worker_extension_cls": None,
    "weight_transfer_config": None,
    "logprobs_mode": None,
    "enable_chunked_prefill": None,
    "async_scheduling": None,
}
"""vLLM arguments that asyncrl sets itself, each with the key to use instead; every `schedul…` argument is one too."""


def rule(check: Rule) -> Rule:
    RULES.append(check)
    return check


def warning(path: str, message: str, mend: str = "") -> Problem:
    return Problem(path, message, mend, "warning")


def longest_rollout(spec: ExperimentSpec) -> int:
    return spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens


# The model and the task.


@rule
def one_model(spec: ExperimentSpec) -> Iterator[Problem]:
    """The model has one source: `model.path` or `model.init`, not both."""
    if spec.model.path is None and spec.model.init is None:
        yield Problem("model", "says no model", "Give model.path (a saved one) or model.init (a new one).")
    if spec.model.path is not None and spec.model.init is not None:
        yield Problem("model.path", "is given, and model.init too", "Set one of the two to null.")


@rule
def saved_model_exists(spec: ExperimentSpec) -> Iterator[Problem]:
    """A `model.path` or `model.init.tokenizer` that is a path exists and is a folder."""
    if spec.model.path is not None and os.path.isabs(spec.model.path) and not os.path.isdir(spec.model.path):
        mend = "Name a saved model's folder, or a hub id."
        yield Problem("model.path", f"there is no folder {spec.model.path}", mend)
    tokenizer = spec.model.init.tokenizer if spec.model.init else CHARACTERS
    if tokenizer != CHARACTERS and not os.path.isdir(tokenizer):
        mend = f"Name a saved tokenizer's folder, or `{CHARACTERS}`."
        yield Problem("model.init.tokenizer", f"there is no folder {tokenizer}", mend)


@rule
def chat_template_exists(spec: ExperimentSpec) -> Iterator[Problem]:
    """A `model.chat_template` is a file."""
    if spec.model.chat_template is not None and not os.path.isfile(spec.model.chat_template):
        mend = "Name a Jinja file, or leave it out to use the tokenizer's own template."
        yield Problem("model.chat_template", f"there is no file {spec.model.chat_template}", mend)


@rule
def attention_heads(spec: ExperimentSpec) -> Iterator[Problem]:
    """In `model.init.config`, heads divide the hidden size (or `head_dim` is given), key-value heads divide heads."""
    config = spec.model.init.config if spec.model.init else {}

    def number(name: str) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and value > 0 else 0

    size, heads, kv_heads = map(number, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if size and heads and size % heads and not number("head_dim"):
        mend = f"Use a multiple of {heads}, such as {size - size % heads + heads}, or give head_dim."
        yield Problem("model.init.config.hidden_size", f"{size} cannot be split over {heads} heads", mend)
    if heads and kv_heads and heads % kv_heads:
        message = f"{kv_heads} key-value heads cannot share {heads} heads"
        yield Problem("model.init.config.num_key_value_heads", message, f"Use one of {divisors(heads)}.")


@rule
def positions(spec: ExperimentSpec) -> Iterator[Problem]:
    """`model.max_length` is within `max_position_embeddings`, where the config has it."""
    limit = spec.model.init.config.get("max_position_embeddings") if spec.model.init else None
    if isinstance(limit, int) and limit < spec.model.max_length:
        message = f"{spec.model.max_length} tokens are more than the model's {limit} positions"
        yield Problem("model.max_length", message, f"Lower it to {limit}, or raise max_position_embeddings.")


@rule
def one_task_or_mix(spec: ExperimentSpec) -> Iterator[Problem]:
    """There is one task, `task.use`, or a `task.mix` of several with names of their own, not both.

    The prompts of a mix come from its members.
    """
    task = spec.task
    if task.use is None and not task.mix:
        yield Problem("task", "says no task", "Give task.use (one task) or task.mix (several).")
    if task.mix and task.use is not None:
        yield Problem("task.use", "is given, and task.mix too", "Set one of the two to null.")
    if task.mix and task.options:
        yield Problem("task.options", "belongs to task.use, and this is a mix", "Give options to its members.")
    names = [member.name for member in task.mix]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"task.mix.{index}.name", f"`{name}` names another task of the mix too", "Use another name.")
        if name in ("mean", "correct"):
            message = f"`{name}` would give it the metric of all tasks together, reward/{name}"
            yield Problem(f"task.mix.{index}.name", message, "Use another name.")
    for split_name, split in (("train", spec.data.train), ("eval", spec.data.eval)):
        if task.mix and split.path is not None:
            mend = f"Give the file to a member, as task.mix.0.{split_name}.path; here only `size` counts."
            yield Problem(f"data.{split_name}.path", "is given, and the prompts of a mix come from its members", mend)


@rule
def task_name(spec: ExperimentSpec) -> Iterator[Problem]:
    """`use` is a ready task or a well-formed `module:name`; the module is imported at launch."""
    named = [("task.use", spec.task.use)] if spec.task.use is not None else []
    named += [(f"task.mix.{index}.use", member.use) for index, member in enumerate(spec.task.mix)]
    for path, use in named:
        if ":" in use:
            if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", use):
                module, _, name = use.partition(":")
                dotted = module.removesuffix(".py").strip("./").replace("/", ".")
                yield Problem(path, f"`{use}` is no module:name", f"Write it like an import, as `{dotted}:{name}`.")
        elif use not in READY_TASKS and not use.startswith(GYM):
            close = get_close_matches(use, READY_TASKS, n=1)
            known = f"Ready tasks: {', '.join(READY_TASKS)}, {GYM}<data set>. Your own is `module:name`."
            yield Problem(path, f"there is no ready task `{use}`", f"Did you mean `{close[0]}`?" if close else known)


@rule
def splits(spec: ExperimentSpec) -> Iterator[Problem]:
    """Each split has a `path` or a `size`, its file or folder exists, and `data.eval` is not `data.train`."""
    for key, split in all_splits(spec):
        path = split.path
        if path is None and split.size is None and not key.startswith("task.mix."):
            yield Problem(key, "has neither path nor size", "Give a file, or how many prompts the task makes.")
        if path is None or not names_a_file(path):
            continue
        kind = kind_of(path)
        found = "is a folder" if os.path.isdir(path) else "is no folder" if os.path.exists(path) else "does not exist"
        if kind is None and found != "does not exist":
            yield Problem(f"{key}.path", f"the name {os.path.basename(path)} does not say what it is", SOURCES)
        elif not (os.path.isdir if kind == "saved" else os.path.isfile)(path):
            yield Problem(f"{key}.path", f"{path} {found}", SOURCES)
        elif kind == "saved" and not any(os.path.exists(os.path.join(path, name)) for name in SAVED_MARKS):
            yield Problem(f"{key}.path", f"{path} is a folder that `datasets` has not saved", SOURCES)
    train, held_out = spec.data.train, spec.data.eval
    same = (train.path, train.config, train.split) == (held_out.path, held_out.config, held_out.split)
    if train.path is not None and same:
        yield warning("data.eval.path", "the held-out prompts are trained on", "Use a file of its own.")


@rule
def rows_to_prompts(spec: ExperimentSpec) -> Iterator[Problem]:
    """A split's `template` names columns; `config` and `split` belong to data sets, and a hub id needs its `split`."""
    for key, split in all_splits(spec):
        kind = None if split.path is None else kind_of(split.path)
        if split.template is not None:
            try:
                template_columns(split.template)
            except ValueError as error:
                mend = 'Write columns in braces, as in "Q: {question}"; `{{` is a brace.'
                yield Problem(f"{key}.template", f"is no template: {error}", mend)
        if kind == "hub" and split.split is None:
            yield Problem(f"{key}.split", "a hub data set needs its split", "Set it, for example to `train`.")
        if kind != "hub" and split.config is not None:
            yield Problem(f"{key}.config", "belongs to hub ids (`hf:owner/name`)", "Leave it out.")
        own = key.startswith("evaluation.") and split.path is None
        if own and split.split not in (None, "train", "eval"):
            yield Problem(f"{key}.split", f"a task has no split `{split.split}`", "Use `train` or `eval`.")
        elif not own and kind not in ("hub", "saved") and split.split is not None:
            yield Problem(f"{key}.split", "belongs to data sets of `datasets`", "Leave it out.")


@rule
def curriculum_stages(spec: ExperimentSpec) -> Iterator[Problem]:
    """Stages of a curriculum end one after another, each below its `max`; only the last may have no end."""
    stages = spec.data.curriculum.stages if spec.data.curriculum else []
    before = 0
    for index, stage in enumerate(stages):
        key = f"data.curriculum.stages.{index}"
        if stage.until_prompt is None:
            if index < len(stages) - 1:
                mend = "Only the last stage may leave it out."
                yield Problem(f"{key}.until_prompt", "is missing, so the later stages never come", mend)
        elif stage.until_prompt <= before:
            mend = f"It counts from the run's first prompt: use more than {before}."
            yield Problem(f"{key}.until_prompt", f"the stage before ends at {before} already", mend)
        else:
            before = stage.until_prompt
        if stage.min is not None and stage.max is not None and stage.min > stage.max:
            yield Problem(f"{key}.min", f"{stage.min:g} is more than the stage's max {stage.max:g}", "Lower it.")


@rule
def evaluation_samples(spec: ExperimentSpec) -> Iterator[Problem]:
    """Several `samples` of an evaluation set mean `greedy: false`: greedy responses are all the same."""
    for name, chosen in spec.evaluation.sets.items():
        if chosen.greedy and chosen.samples > 1:
            mend = "Set greedy to false, or leave samples out."
            yield Problem(f"evaluation.sets.{name}.samples", "greedy responses are all the same", mend)


def all_splits(spec: ExperimentSpec) -> Iterator[tuple[str, SplitSpec]]:
    """Every split of a spec, by its key."""
    yield "data.train", spec.data.train
    yield "data.eval", spec.data.eval
    for index, member in enumerate(spec.task.mix):
        for name, split in (("train", member.train), ("eval", member.eval)):
            if split is not None:
                yield f"task.mix.{index}.{name}", split
    for name, chosen in spec.evaluation.sets.items():
        yield f"evaluation.sets.{name}.data", chosen.data


# Lengths and counts.


@rule
def lengths(spec: ExperimentSpec) -> Iterator[Problem]:
    """A longest prompt and a longest response fit into `model.max_length`."""
    rollout, limit, total = spec.rollout, spec.model.max_length, longest_rollout(spec)
    if total > limit:
        sum_ = f"{rollout.max_prompt_tokens} prompt + {rollout.max_response_tokens} response tokens"
        mend = f"Raise model.max_length to {total}"
        if limit > rollout.max_prompt_tokens:
            mend += f", or lower rollout.max_response_tokens to {limit - rollout.max_prompt_tokens}"
        yield Problem("model.max_length", f"{sum_} are {total}, more than {limit}", f"{mend}.")


@rule
def microbatch(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.tokens_per_microbatch` has room for a longest rollout."""
    total, budget = longest_rollout(spec), spec.trainer.tokens_per_microbatch
    if total > budget:
        message = f"a rollout may have {total} tokens, more than the {budget} of a micro-batch"
        yield warning("trainer.tokens_per_microbatch", message, f"Raise it to {total} or more.")


@rule
def group_has_advantage(spec: ExperimentSpec) -> Iterator[Problem]:
    """A group has two rollouts or more: alone, a rollout equals its group's mean and teaches nothing."""
    if spec.rollout.group_size < 2:
        yield Problem("rollout.group_size", "a group of one has no advantage", "Use 2 or more; 8 is usual.")


@rule
def whole_versions(spec: ExperimentSpec) -> Iterator[Problem]:
    """A run ends, and is checkpointed, at a published version: these steps are multiples of `publish_every`."""
    every = spec.pipeline.publish_every
    for path, steps in (("stop.steps", spec.stop.steps), ("checkpoints.every", spec.checkpoints.every)):
        if steps % every:
            near = max(every, steps // every * every)
            yield Problem(path, f"{steps} is not a multiple of pipeline.publish_every {every}", f"Make it {near}.")


@rule
def group_fits_engine(spec: ExperimentSpec) -> Iterator[Problem]:
    """A group fits into what an engine runs at once."""
    group, running = spec.rollout.group_size, spec.rollout.max_running_rollouts
    if group > running:
        message = f"an engine runs {running} rollouts at once, fewer than one group of {group}"
        yield Problem("rollout.max_running_rollouts", message, f"Raise it to {group} or more.")


@rule
def minibatches(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.minibatches` divides `pipeline.groups_per_step`."""
    parts, groups = spec.trainer.minibatches, spec.pipeline.groups_per_step
    if groups % parts:
        message = f"{groups} groups per step cannot be split into {parts} equal minibatches"
        yield Problem("trainer.minibatches", message, f"Use one of {divisors(groups)}.")


@rule
def ranks_have_work(spec: ExperimentSpec) -> Iterator[Problem]:
    """Every minibatch has a rollout for every rank."""
    rollouts = spec.pipeline.groups_per_step * spec.rollout.group_size // spec.trainer.minibatches
    if 0 < rollouts < spec.trainer.ranks:
        message = f"a minibatch of {rollouts} rollouts leaves some of {spec.trainer.ranks} ranks without any"
        yield Problem("trainer.ranks", message, f"Use {rollouts} ranks at most, or fewer minibatches.")


@rule
def offload(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.offload` is for GPU ranks; `optimizer` takes ZeRO 1 or more, `all` takes ZeRO 3."""
    trainer = spec.trainer
    least = {"none": 0, "optimizer": 1, "all": 3}[trainer.offload]
    if least and not trainer.gpus_per_rank:
        message = f"`{trainer.offload}` moves nothing: ranks without a GPU have all in the CPU's memory"
        yield Problem("trainer.offload", message, "Set it to none.")
    elif trainer.zero_stage < least:
        message = f"`{trainer.offload}` takes ZeRO {least}, and trainer.zero_stage is {trainer.zero_stage}"
        yield Problem("trainer.offload", message, f"Raise trainer.zero_stage to {least}, or offload less.")


@rule
def attention(spec: ExperimentSpec) -> Iterator[Problem]:
    """`trainer.attention` `flash_attention_2` takes GPU ranks and bfloat16."""
    trainer = spec.trainer
    if trainer.attention == "flash_attention_2" and not (trainer.gpus_per_rank and trainer.dtype == "bfloat16"):
        where = "GPU" if trainer.gpus_per_rank else "CPU"
        message = f"flash_attention_2 takes a GPU and bfloat16, and the trainer is on {where} in {trainer.dtype}"
        yield Problem("trainer.attention", message, "Use sdpa.")


# Staleness.


@rule
def mode_presets(spec: ExperimentSpec) -> Iterator[Problem]:
    """`sync` means staleness 0 (unless with `partial_rollouts`), `one_step_off` staleness 1, and both
    `weight_update: drain`."""
    pipeline = spec.pipeline
    preset = {"sync": 0, "one_step_off": 1}.get(pipeline.mode)
    if preset is None:
        return
    if pipeline.max_staleness != preset and not pipeline.partial_rollouts:
        message = f"mode {pipeline.mode} means {preset}, not {pipeline.max_staleness}"
        mend = f"Set it to {preset} or leave it out, or use mode: async."
        yield Problem("pipeline.max_staleness", message, mend)
    if pipeline.weight_update != "drain":
        message = f"mode {pipeline.mode} means drain, not {pipeline.weight_update}"
        yield Problem("pipeline.weight_update", message, "Set it to drain or leave it out, or use mode: async.")


@rule
def partial_rollouts(spec: ExperimentSpec) -> Iterator[Problem]:
    """`partial_rollouts` is for mode `sync`, with a `max_staleness` of 1 or more."""
    pipeline = spec.pipeline
    if pipeline.partial_rollouts and pipeline.mode != "sync":
        message = f"is for mode sync; mode {pipeline.mode} goes on generating while the trainer trains"
        yield Problem("pipeline.partial_rollouts", message, "Leave it out, or use mode: sync.")
    elif pipeline.partial_rollouts and pipeline.max_staleness == 0:
        message = "0 lets no rollout go on after the batch it began with, as partial_rollouts wants"
        yield Problem("pipeline.max_staleness", message, "Set it to 1 or leave it out.")


@rule
def useful_concurrency(spec: ExperimentSpec) -> Iterator[Problem]:
    """Engines run no more rollouts than staleness admits: (S + 1) · publish_every · groups_per_step · group_size."""
    pipeline, rollout = spec.pipeline, spec.rollout
    capacity = rollout.engines * rollout.max_running_rollouts
    admitted = (pipeline.max_staleness + 1) * pipeline.publish_every * pipeline.groups_per_step * rollout.group_size
    if capacity > admitted:
        message = f"the engines could run {capacity} rollouts, but staleness admits {admitted} at most"
        share = -(-admitted // rollout.engines)
        staleness = -(-capacity * (pipeline.max_staleness + 1) // admitted) - 1
        mend = f"Lower it to {max(share, rollout.group_size)}"
        mend += f", or raise pipeline.max_staleness to {staleness}." if pipeline.mode == "async" else "."
        yield warning("rollout.max_running_rollouts", message, mend)


# The objective.


@rule
def correction(spec: ExperimentSpec) -> Iterator[Problem]:
    """Stale rollouts are corrected: by weights, masks or rejection, or by the clipped ratio being to the policy that
    sampled them."""
    algorithm, staleness = spec.algorithm, spec.pipeline.max_staleness
    chosen = algorithm.correction
    key = "algorithm.correction"
    corrects = chosen.level is not None or chosen.reject_by is not None
    if chosen.proximal != "behaviour" and not corrects and staleness > 0:
        message = f"stale rollouts (up to {staleness} versions) are trained on without correction"
        yield warning(f"{key}.level", message, "Use the preset truncated.")
    if chosen.proximal == "behaviour" and chosen.level is not None:
        message = "the clipped ratio is to the behaviour policy already; weights correct for the same twice"
        yield Problem(f"{key}.level", message, f"Set it to null, or {key}.proximal to recomputed.")
    bounds = [bound for bound in ("cap", "mask_low", "mask_high") if getattr(chosen, bound) is not None]
    if bounds and chosen.level is None:
        yield Problem(f"{key}.{bounds[0]}", "bounds weights, and level says there are none", f"Set {key}.level.")
    if chosen.level is not None and not bounds:
        message = "weights have no bound, so one token can outweigh a batch"
        yield warning(f"{key}.cap", message, "Set it to 2.0.")
    if chosen.mask_low is not None and chosen.mask_high is not None and chosen.mask_low >= chosen.mask_high:
        yield Problem(f"{key}.mask_low", f"is not below mask_high ({chosen.mask_high})", "Lower it.")
    if chosen.reject_by is not None and chosen.reject_high is None:
        yield Problem(f"{key}.reject_by", "rejects nothing without a bound", f"Set {key}.reject_high.")
    if chosen.reject_by == "k1" and chosen.reject_over == "sequence_max":
        yield Problem(f"{key}.reject_over", "k1 has both signs and no maximum", "Set reject_by to k2 or k3.")
    if chosen.reject_by in ("k2", "k3") and chosen.reject_low is not None:
        yield Problem(f"{key}.reject_low", f"{chosen.reject_by} has no lower bound: it is 0 or more", "Remove it.")
    if chosen.reject_by is None and (chosen.reject_low is not None or chosen.reject_high is not None):
        bound = "reject_high" if chosen.reject_low is None else "reject_low"
        yield Problem(f"{key}.{bound}", "bounds nothing without reject_by", f"Set {key}.reject_by, or remove it.")
    if chosen.reject_by == "k1" and chosen.reject_high is not None:
        low = chosen.reject_low or 1.0 / chosen.reject_high
        if low >= chosen.reject_high:
            yield Problem(f"{key}.reject_high", f"is not above the lower bound, {low:g}", "Raise it above 1.")


@rule
def uniform_groups_teach(spec: ExperimentSpec) -> Iterator[Problem]:
    """Groups whose rewards are all equal are left out only where they teach nothing: with a group as the baseline."""
    algorithm = spec.algorithm
    if algorithm.advantage in ("none", GAE) and algorithm.uniform_groups == "skip":
        message = f"with advantage {algorithm.advantage}, groups with equal rewards teach, and skip leaves them out"
        yield warning("algorithm.uniform_groups", message, "Set it to train.")


@rule
def group_baseline(spec: ExperimentSpec) -> Iterator[Problem]:
    """An advantage relative to a group takes groups of two rollouts or more."""
    if spec.algorithm.advantage in ("group_norm", "group_mean", "leave_one_out") and spec.rollout.group_size < 2:
        message = f"one rollout has nothing to be compared with, as advantage {spec.algorithm.advantage} does"
        yield Problem("rollout.group_size", message, "Raise it to 2 or more, or set algorithm.advantage to none.")


@rule
def kl_penalty(spec: ExperimentSpec) -> Iterator[Problem]:
    """A KL penalty in the loss has a gradient, and a reference is refreshed only where there is one."""
    algorithm = spec.algorithm
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        message = "k1 in the loss has a gradient of zero in expectation"
        yield warning("algorithm.kl_estimator", message, "Use k2 or k3, or kl_in: reward.")
    if algorithm.reference_every and not algorithm.kl_coef:
        message = "has no effect: kl_coef is 0, so there is no reference"
        yield warning("algorithm.reference_every", message, "Set algorithm.kl_coef, or remove it.")


@rule
def choices_of_another(spec: ExperimentSpec) -> Iterator[Problem]:
    """Keys that belong to one loss, aggregation or advantage are given only with it."""
    algorithm = spec.algorithm
    for key, belongs, there in (
        ("dual_clip", "loss: clip or gspo", algorithm.loss not in ("cispo", "sapo")),
        ("sapo_temperatures", "loss: sapo", algorithm.loss not in ("clip", "gspo", "cispo")),
        ("sequence_divisor", "aggregation: sequence_sum", algorithm.aggregation == "sequence_sum"),
        ("critic", f"advantage: {GAE}", algorithm.advantage == GAE),
        ("gae_lambda", f"advantage: {GAE}", algorithm.advantage == GAE),
    ):
        default = AlgorithmSpec.model_fields[key].get_default(call_default_factory=True)
        if not there and getattr(algorithm, key) != default:
            yield warning(f"algorithm.{key}", f"has no effect: it belongs to {belongs}", "Remove it.")


# What happens when.


@rule
def intervals(spec: ExperimentSpec) -> Iterator[Problem]:
    """What happens every so many steps happens before `stop.steps`."""
    steps = spec.stop.steps
    for path, every, event in (
        ("evaluation.every", spec.evaluation.every, "nothing is evaluated while training"),
        ("checkpoints.every", spec.checkpoints.every, "no checkpoint is written before the end"),
    ):
        if every > steps:
            yield warning(path, f"{event}: {every} is more than the run's {steps} steps", f"Use {steps} or less.")


@rule
def warmup(spec: ExperimentSpec) -> Iterator[Problem]:
    """The learning rate's warm-up ends within the run."""
    updates = spec.stop.steps * spec.trainer.epochs * spec.trainer.minibatches
    if spec.trainer.schedule.warmup_updates > updates:
        message = f"the run ends after {updates} updates, before the warm-up does"
        yield warning("trainer.schedule.warmup_updates", message, f"Use fewer than {updates}.")


@rule
def evaluation_prompts(spec: ExperimentSpec) -> Iterator[Problem]:
    """`evaluation.prompts` are there in `data.eval`."""
    wanted, there = spec.evaluation.prompts, spec.data.eval.size
    if wanted is not None and there is not None and wanted > there:
        mend = f"Raise data.eval.size to {wanted}, or lower this."
        yield warning("evaluation.prompts", f"there are only {there} held-out prompts, not {wanted}", mend)


# Hardware and engines.


@rule
def one_dtype(spec: ExperimentSpec) -> Iterator[Problem]:
    """Trainer and engines compute in one dtype; two widen the gap between their log-probs."""
    if spec.trainer.dtype != spec.rollout.dtype:
        message = f"engines in {spec.rollout.dtype} and trainer in {spec.trainer.dtype} widen the log-prob gap"
        yield warning("rollout.dtype", message, f"Use {spec.trainer.dtype} in both, if memory allows.")


@rule
def one_kind_of_device(spec: ExperimentSpec) -> Iterator[Problem]:
    """Trainer and engines both run on GPUs, or both on CPUs."""
    if bool(spec.trainer.gpus_per_rank) != bool(spec.rollout.gpus_per_engine):
        trainer, engines = ("GPU", "CPU") if spec.trainer.gpus_per_rank else ("CPU", "GPU")
        slow = "rollout.gpus_per_engine" if engines == "CPU" else "trainer.gpus_per_rank"
        yield warning(slow, f"the trainer is on {trainer} and the engines are on {engines}", "Set it to 1.")


@rule
def cpu_cache(spec: ExperimentSpec) -> Iterator[Problem]:
    """`rollout.kv_cache_mb` is for CPU engines."""
    if spec.rollout.kv_cache_mb is not None and spec.rollout.gpus_per_engine:
        mend = "Use rollout.engine_args.gpu_memory_utilization."
        yield warning("rollout.kv_cache_mb", "has no effect on GPU engines", mend)


@rule
def threads(spec: ExperimentSpec) -> Iterator[Problem]:
    """On this machine's CPUs, ranks and engines have a core for every thread."""
    trainer, rollout, cores = spec.trainer, spec.rollout, os.cpu_count()
    if spec.cluster.address is not None or trainer.gpus_per_rank or rollout.gpus_per_engine or cores is None:
        return
    parts = (trainer.ranks * trainer.threads_per_rank, rollout.engines * rollout.threads_per_engine)
    needed = max(parts) if spec.pipeline.mode == "sync" else sum(parts)
    if needed > cores:
        message = f"trainer and engines want {parts[0]} + {parts[1]} threads, and this machine has {cores} cores"
        path = "trainer.threads_per_rank" if parts[0] > parts[1] else "rollout.threads_per_engine"
        yield warning(path, message, f"Lower threads, ranks or engines until they want {cores} in all.")


@rule
def engine_arguments(spec: ExperimentSpec) -> Iterator[Problem]:
    """`rollout.engine_args` leaves alone what asyncrl sets itself."""
    for argument in spec.rollout.engine_args:
        name = argument.strip("-").replace("-", "_").lower()
        if name in OWN_ENGINE_ARGS or name.startswith("schedul"):
            key = OWN_ENGINE_ARGS.get(name)
            mend = f"Use {key} instead." if key else "Remove it; the pipeline depends on its own value."
            yield Problem(f"rollout.engine_args.{argument}", "asyncrl sets this itself", mend)


def divisors(number: int) -> str:
    """The divisors of a number as text; the largest twelve of many."""
    found = [part for part in range(1, min(number, 100_000) + 1) if number % part == 0]
    return ", ".join(map(str, found[-12:]))
