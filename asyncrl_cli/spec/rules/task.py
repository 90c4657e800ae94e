"""Rules of the task, or a mix of tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.spec.base import MODULE_NAME
from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import rule
from asyncrl_cli.spec.sections import ExperimentSpec

READY_TASKS = (
    *("chain_sum", "spell_backward", "calculator"),
    *("math", "exact", "regex", "unit_tests", "judge", "verifiers", "command"),
)
"""``tasks.load.READY`` says what they are."""
GYM = "gym/"
"""Begins the name of a reasoning-gym data set."""


@rule
def one_task_or_mix(spec: ExperimentSpec) -> Iterator[Problem]:
    """There is one task, `task.use`, or a `task.mix` of several with names of their own, not both.

    The prompts of a mix come from its members.
    """
    task = spec.task
    if task.use is None and not task.mix:
        yield Problem("task", "says no task", "give task.use (one task) or task.mix (several)")
    if task.mix and task.use is not None:
        yield Problem("task.use", "is given, and task.mix too", "set one of the two to null")
    if task.mix and task.options:
        yield Problem("task.options", "belongs to task.use, and this is a mix", "give options to its members")
    names = [member.name for member in task.mix]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"task.mix.{index}.name", f"`{name}` names another task of the mix too", "use another name")
        if name in ("mean", "correct"):
            message = f"`{name}` would give it the metric of all tasks together, reward/{name}"
            yield Problem(f"task.mix.{index}.name", message, "use another name")
    for split_name, split in (("train", spec.data.train), ("eval", spec.data.eval)):
        if task.mix and split.path is not None:
            hint = f"give the file to a member, as task.mix.0.{split_name}.path; here only `size` counts"
            yield Problem(f"data.{split_name}.path", "is given, and the prompts of a mix come from its members", hint)


@rule
def task_name(spec: ExperimentSpec) -> Iterator[Problem]:
    """`use` is a ready task or a well-formed `module:name`; the module is imported at launch."""
    named = [("task.use", spec.task.use)] if spec.task.use is not None else []
    named += [(f"task.mix.{index}.use", member.use) for index, member in enumerate(spec.task.mix)]
    for path, use in named:
        if ":" in use:
            if not re.fullmatch(MODULE_NAME, use):
                module, _, name = use.partition(":")
                dotted = module.removesuffix(".py").strip("./").replace("/", ".")
                yield Problem(path, f"`{use}` is no module:name", f"write it like an import, as `{dotted}:{name}`")
        elif use not in READY_TASKS and not use.startswith(GYM):
            known = f"ready tasks are {', '.join(READY_TASKS)} and {GYM}<data set>; yours is `module:name`"
            yield Problem(path, f"there is no ready task `{use}`", did_you_mean(use, READY_TASKS, known))
