"""The decorator that registers a rule, and helpers that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.sections import ExperimentSpec

Rule = Callable[[ExperimentSpec], Iterator[Problem]]
RULES: list[Rule] = []


def rule(check: Rule) -> Rule:
    """Decorator: check this rule for every spec."""
    RULES.append(check)
    return check


def warning(path: str, message: str, hint: str = "") -> Problem:
    """A problem that does not refuse the spec."""
    return Problem(path, message=message, hint=hint, severity="warning")


def argument_name(written: str) -> str:
    """The name of a vLLM argument that may be written as on vLLM's command line (`--max-model-len`)."""
    return written.strip("-").replace("-", "_").lower()


def divisors(number: int) -> str:
    """The divisors of a number as text; at most the twelve largest."""
    found = [part for part in range(1, min(number, 100_000) + 1) if number % part == 0]
    return ", ".join(map(str, found[-12:]))
