"""Rules of what happens when."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import rule, warning
from asyncrl_cli.spec.sections import ExperimentSpec


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
