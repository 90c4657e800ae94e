"""One repository: its files with the seeded bugs, and the hidden tests.

Invariant: the tests pass with the functions as they are in the library, and those of each broken function fail as the
files are; both are tried when a repository is made. The same random numbers and settings make the same repository.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.tasks.ready.bugfix.functions import Function, callable_of, library
from asyncrl_cli.tasks.ready.bugfix.mutations import KINDS, Edit, Kind, edits

MODULES = ("calc", "stock", "report", "orders", "checks", "survey", "budget", "series")
"""Names of the modules, in this order."""
README, EXAMPLES = "README.md", "test_examples.py"
CALLS = 12
"""Calls of each function in the hidden tests."""
TRIES = 20
"""Sets of arguments that are tried to show a bug."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What repositories are like: see ``Bugfix``."""

    files: int = 1
    functions: int = 4
    bugs: int = 1
    max_lines: int | None = None
    kinds: tuple[Kind, ...] = KINDS
    terse: bool = False


@dataclass(frozen=True, slots=True)
class Repository:
    """What one episode is about.

    Args:
        files: texts by name, as the policy finds them.
        tests: for each function, named as in ``calc.add``, hidden assertions.
        fixes: what repairs each broken function, by its name; the line is that of its module.
    """

    files: dict[str, str]
    tests: dict[str, str]
    fixes: dict[str, Edit]


@dataclass(frozen=True, slots=True)
class _Member:
    """A function in a repository: its right source, its source in the files, and the change between the two."""

    module: str
    function: Function
    right: str
    written: str
    bug: Edit | None
    calls: list[tuple[Any, ...]]


def make_repository(rng: random.Random, shape: Shape) -> Repository:
    """A random repository of this shape. Raises ``ValueError`` if the library has too few functions for it."""
    count = shape.files * shape.functions
    known = library(shape.max_lines)
    if count > len(known):
        raise ValueError(f"{count} functions are wanted, and there are {len(known)}")
    broken = set(rng.sample(range(count), shape.bugs))
    members: list[_Member] = []
    for function in rng.sample(known, len(known)):
        if len(members) < count:
            module = MODULES[len(members) % shape.files]
            member = _member(rng, function, module, shape, len(members) in broken)
            members += [member] if member is not None else []
    if len(members) < count:
        raise ValueError(f"too few functions can have a bug of the kinds {', '.join(shape.kinds)}")
    return _written(members, shape)


def passes(source: str, function: Function, calls: Sequence[tuple[Any, ...]], expected: Sequence[Any]) -> bool:
    """Whether a source of the function returns what is expected. It runs here, as no model has written it."""
    try:
        found = callable_of(source, function.name)
        return all(found(*call) == value for call, value in zip(calls, expected, strict=True))
    except Exception:
        return False


def _member(rng: random.Random, function: Function, module: str, shape: Shape, broken: bool) -> _Member | None:
    """One function, with a bug if it is to be ``broken``; None if it can have none of these kinds."""
    right = function.written(rng, shape.terse)
    calls = function.calls(rng, CALLS)
    if not broken:
        return _Member(module, function, right, right, None, calls)
    solution = callable_of(right, function.name)
    possible = edits(right, shape.kinds)
    for bug in rng.sample(possible, len(possible)):
        for _ in range(TRIES):
            calls = function.calls(rng, CALLS)
            if not passes(bug.applied(right), function, calls, [solution(*call) for call in calls]):
                return _Member(module, function, right, bug.applied(right), bug, calls)
    return None


def _written(members: Sequence[_Member], shape: Shape) -> Repository:
    files: dict[str, str] = {}
    fixes: dict[str, Edit] = {}
    for member in members:
        name = f"{member.module}.py"
        before = files.get(name, "")
        text = f"{before}\n\n" if before else ""
        if (bug := member.bug) is not None:
            place = bug.place
            undone = type(place)(
                place.kind, place.line + text.count("\n"), place.column, bug.text, _others(place.text, bug)
            )
            fixes[f"{member.module}.{member.function.name}"] = Edit(undone, place.text)
        files[name] = text + member.written
    if not shape.terse:
        files |= {README: _readme(members), EXAMPLES: _examples(members)}
    return Repository(files, {f"{one.module}.{one.function.name}": _tests(one) for one in members}, fixes)


def _others(text: str, bug: Edit) -> tuple[str, ...]:
    """The alternatives of a place that a bug has changed."""
    return tuple(sorted({text, *bug.place.alternatives} - {bug.text}))


def _tests(member: _Member) -> str:
    return "".join(f"assert {one}\n" for one in _assertions(member, member.calls))


def _assertions(member: _Member, calls: Sequence[tuple[Any, ...]]) -> list[str]:
    solution = callable_of(member.right, member.function.name)
    name = f"{member.module}.{member.function.name}"
    return [f"{name}({', '.join(map(repr, call))}) == {solution(*call)!r}" for call in calls]


def _readme(members: Sequence[_Member]) -> str:
    """What each function is for."""
    lines = ["# Functions", ""]
    for member in members:
        doc = callable_of(member.right, member.function.name).__doc__ or ""
        head = member.right.splitlines()[0].removeprefix("def ").removesuffix(":")
        lines.append(f"- `{member.module}.{head}`: {doc}")
    return "\n".join([*lines, ""])


def _examples(members: Sequence[_Member]) -> str:
    """Visible assertions: the first call of each function. They may pass in spite of a bug."""
    modules = sorted({member.module for member in members})
    lines = [f"import {module}" for module in modules]
    checks = [f"assert {one}" for member in members for one in _assertions(member, member.calls[:1])]
    return "\n".join([*lines, "", *checks, 'print("all examples pass")', ""])
