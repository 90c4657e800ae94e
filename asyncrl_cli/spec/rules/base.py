"""What a rule is, and what rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.sections import ExperimentSpec

Rule = Callable[[ExperimentSpec], Iterator[Problem]]
RULES: list[Rule] = []


def rule(check: Rule) -> Rule:
    """Have this checked of every spec."""
    RULES.append(check)
    return check


def warning(path: str, message: str, hint: str = "") -> Problem:
    """A problem that refuses nothing."""
    return Problem(path, message, hint, "warning")


def divisors(number: int) -> str:
    """The divisors of a number as text; the largest twelve of many."""
    found = [part for part in range(1, min(number, 100_000) + 1) if number % part == 0]
    return ", ".join(map(str, found[-12:]))
