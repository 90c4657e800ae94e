"""The decorator that registers a rule, and helpers that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def argument_name(argument: str) -> str:
    """Return the Python name of a vLLM argument, which may be written as on the command line (`--max-model-len`)."""
    return argument.strip("-").replace("-", "_").lower()


def divisors(dividend: int) -> str:
    """Return the divisors of a number as text; at most the twelve largest."""
    results = [divisor for divisor in range(1, min(dividend, 100_000) + 1) if dividend % divisor == 0]
    return ", ".join(map(str, results[-12:]))
