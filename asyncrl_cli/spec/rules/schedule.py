"""Rules of what happens when."""

from __future__ import annotations

import math
from collections.abc import Iterator

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import rule, warning
from asyncrl_cli.spec.sections import ExperimentSpec

TRIAL_STEPS = 8
"""A run of fewer steps is a trial, which nobody expects to show asynchrony."""


@rule
def intervals(spec: ExperimentSpec) -> Iterator[Problem]:
    """What happens every so many steps happens before `stop.steps`."""
    steps = spec.stop.steps
    for path, every, event in (
        ("evaluation.every", spec.evaluation.every, "nothing is evaluated while training"),
        ("checkpoints.every", spec.checkpoints.every, "no checkpoint is written before the end"),
    ):
        if every > steps:
            yield warning(path, f"{event}: {every} is more than the run's {steps} steps", f"use {steps} or less")


@rule
def versions(spec: ExperimentSpec) -> Iterator[Problem]:
    """New weights are published while the run lasts, and `max_staleness` bounds it."""
    steps, every, staleness = spec.stop.steps, spec.pipeline.publish_every, spec.pipeline.max_staleness
    if steps < TRIAL_STEPS:
        return
    if every >= steps:
        message = f"all {steps} steps train on rollouts of the initial weights"
        yield warning("pipeline.publish_every", message, f"lower it: {every} is not less than stop.steps")
    elif staleness * every >= steps:
        message = f"bounds nothing: the run has {steps} steps, and may train all of them on its first rollouts"
        yield warning("pipeline.max_staleness", message, f"use less than {-(-steps // every)}, or more steps")


@rule
def best_checkpoints(spec: ExperimentSpec) -> Iterator[Problem]:
    """`checkpoints.keep_best` needs checkpoints at steps that are evaluated."""
    checkpoints, evaluated = spec.checkpoints, spec.evaluation.every
    if not checkpoints.keep_best:
        return
    for path, every in (("checkpoints.every", checkpoints.every), ("evaluation.every", evaluated)):
        if not every:
            yield warning("checkpoints.keep_best", f"has no effect: {path} is 0", f"set {path}, or remove it")
            return
    common = math.lcm(checkpoints.every, evaluated)
    if common >= spec.stop.steps:
        message = f"no checkpoint before the last is evaluated: every {checkpoints.every} and {evaluated} steps meet "
        hint = "make checkpoints.every a multiple of evaluation.every"
        yield warning("checkpoints.keep_best", f"{message}at step {common}", hint)


@rule
def warmup(spec: ExperimentSpec) -> Iterator[Problem]:
    """The learning rate's warm-up ends within the run."""
    updates = spec.stop.steps * spec.trainer.epochs * spec.trainer.minibatches
    if spec.trainer.schedule.warmup_updates > updates:
        message = f"the run ends after {updates} updates, before the warm-up does"
        yield warning("trainer.schedule.warmup_updates", message, f"use fewer than {updates}")


@rule
def evaluation_prompts(spec: ExperimentSpec) -> Iterator[Problem]:
    """`evaluation.prompts` are there in `data.eval`."""
    wanted, there = spec.evaluation.prompts, spec.data.eval.size
    if wanted is not None and there is not None and wanted > there:
        hint = f"raise data.eval.size to {wanted}, or lower this"
        yield warning("evaluation.prompts", f"there are only {there} held-out prompts, not {wanted}", hint)
