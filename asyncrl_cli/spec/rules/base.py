"""The decorator that registers a rule, and helpers that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncrl_cli.spec.inputs import TaskMember, TaskSpec
from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.sections import ExperimentSpec

Rule = Callable[[ExperimentSpec], Iterator[Problem]]
RULES: list[Rule] = []


def rule(check: Rule) -> Rule:
    """Register a rule, which is then checked for every spec."""
    RULES.append(check)
    return check


def warning(path: str, message: str, hint: str = "") -> Problem:
    """Return a problem that does not refuse the spec."""
    return Problem(path, message=message, hint=hint, severity="warning")


def all_tasks(spec: ExperimentSpec) -> dict[str, TaskSpec]:
    """Return the run's task and the tasks of evaluation sets, by key."""
    sets = spec.evaluation.sets.items()
    return {"task": spec.task} | {f"evaluation.sets.{name}.task": each.task for name, each in sets if each.task}


def members(spec: ExperimentSpec) -> dict[str, TaskMember]:
    """Return the members of all mixes, by key."""
    tasks = all_tasks(spec).items()
    return {f"{key}.mix.{index}": member for key, task in tasks for index, member in enumerate(task.mix)}


def argument_name(argument: str) -> str:
    """Return the Python name of a vLLM argument, which may be written as on the command line (`--max-model-len`)."""
    return argument.strip("-").replace("-", "_").lower()


def divisors(dividend: int) -> str:
    """Return the divisors of a number as text; at most the twelve largest."""
    results = [divisor for divisor in range(1, min(dividend, 100_000) + 1) if dividend % divisor == 0]
    return ", ".join(map(str, results[-12:]))
