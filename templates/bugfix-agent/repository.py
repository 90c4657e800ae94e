"""Make a repository: a module with a seeded bug, hidden tests, and the change that fixes the bug.

A bug replaces a token by another one that fits there. The groups of interchangeable tokens are symmetric, so the right
token is always an alternative of the wrong one.

Invariant: the tests pass with the original functions, and a broken function's tests fail in the repository; both are
checked when it is made. Equal random numbers and shapes make equal repositories.
"""

from __future__ import annotations

import functools
import inspect
import io
import random
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import functions

MODULE, README, EXAMPLES = "calc.py", "README.md", "test_examples.py"
CALLS = 12
"""Number of calls to each function in the hidden tests."""
TRIES = 20
"""Number of argument sets tried to show a bug."""
LETTERS = "abcdefghijkmnopqrstuvwxyz"
"""Argument names in terse code, without `l`, which looks like 1."""
BugKind = Literal["operator", "comparison", "constant", "name", "swap"]
"""A wrong operator, comparison, number or built-in name, or operands in the wrong order."""
BUG_KINDS: tuple[BugKind, ...] = get_args(BugKind)
GROUPS: tuple[tuple[BugKind, tuple[str, ...]], ...] = (
    ("operator", ("+", "-", "*", "//", "%")),
    ("operator", ("and", "or")),
    ("comparison", ("<", "<=", ">", ">=", "==", "!=")),
    ("constant", tuple(map(str, range(10)))),
    ("name", ("min", "max", "sum", "len")),
    ("name", ("upper", "lower", "title", "strip")),
)
"""Interchangeable texts."""
SWAPPED = ("-", "//", "%", "<", "<=", ">", ">=", ",")
"""Operators between two names that depend on their order."""


# -- random arguments, and their possible names in a repository


def _number(rng: random.Random) -> int:
    # Small numbers are often equal, and only then `<` and `<=` differ.
    return rng.randint(0, 3) if rng.random() < 0.5 else rng.randint(-9, 20)


def _numbers(rng: random.Random) -> list[int]:
    return [_number(rng) for _ in range(rng.randint(3, 6))]  # functions may use the third number


def _text(rng: random.Random) -> str:
    return "".join(rng.choice("aabbcdeABC ") for _ in range(rng.randint(1, 8)))


def _flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


KINDS: dict[str, tuple[Callable[[random.Random], Any], tuple[str, ...]]] = {
    "number": (_number, ("number", "value", "amount", "first_value", "score")),
    "other": (_number, ("other", "second_value", "change", "offset", "operand")),
    "low": (_number, ("low", "least", "minimum", "floor")),
    "high": (_number, ("high", "most", "maximum", "ceiling")),
    "step": (lambda rng: rng.randint(1, 9), ("step", "divisor", "part", "unit")),
    "count": (lambda rng: rng.randint(0, 7), ("count", "times", "limit", "bound")),
    "numbers": (_numbers, ("numbers", "values", "scores", "amounts")),
    "text": (_text, ("text", "line", "heading", "phrase")),
    "letter": (lambda rng: rng.choice("abcdAB"), ("letter", "character", "mark", "symbol")),
    "flag": (_flag, ("flag", "ready", "valid", "active")),
    "switch": (_flag, ("switch", "allowed", "known", "open_now")),
}
"""For each argument in functions.py: a function that draws values, and the possible names in a repository."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function in functions.py. ``lines``: number of lines in its body, without the docstring."""

    name: str
    source: str
    arguments: tuple[str, ...]
    lines: int

    def calls(self, rng: random.Random, count: int) -> list[tuple[Any, ...]]:
        """Draw the arguments of ``count`` calls."""
        return [tuple(KINDS[argument][0](rng) for argument in self.arguments) for _ in range(count)]

    def written(self, rng: random.Random, terse: bool) -> str:
        """The source with other argument names. ``terse``: letters as names, and no docstring."""
        if terse:
            names: Sequence[str] = rng.sample(LETTERS, len(self.arguments))
            lines = [line for line in self.source.splitlines() if not line.startswith('    """')]
        else:
            names = [rng.choice(KINDS[argument][1]) for argument in self.arguments]
            lines = self.source.splitlines()
        renamed: Mapping[str, str] = dict(zip(self.arguments, names, strict=True))
        return re.sub(r"\w+", lambda match: renamed.get(match[0], match[0]), "\n".join(lines)) + "\n"


@functools.cache
def library(max_lines: int | None = None) -> tuple[Function, ...]:
    """The functions with at most ``max_lines`` lines in their body."""
    found = []
    for function in filter(inspect.isfunction, vars(functions).values()):
        source = inspect.getsource(function)
        lines = len(source.splitlines()) - 2  # `def`, and a docstring of one line
        if max_lines is None or lines <= max_lines:
            arguments = tuple(inspect.signature(function).parameters)
            found.append(Function(function.__name__, source, arguments=arguments, lines=lines))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def callable_of(source: str, name: str) -> Callable[..., Any]:
    """Execute a function's source, original or changed, and return the function. It keeps no state between calls."""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


def passes(source: str, name: str, calls: Sequence[tuple[Any, ...]], expected: Sequence[Any]) -> bool:
    """True if a function returns the expected values. It runs here, because no model wrote it."""
    try:
        return all(callable_of(source, name)(*call) == value for call, value in zip(calls, expected, strict=True))
    except Exception:
        return False


# -- places for bugs, and their edits


@dataclass(frozen=True, slots=True)
class Place:
    """A text in a line (from 1) at a column (from 0), and the texts that could replace it."""

    kind: BugKind
    line: int
    column: int
    text: str
    alternatives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """One change to one line of a source."""

    place: Place
    text: str

    def applied(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        before, column = lines[self.place.line - 1], self.place.column
        lines[self.place.line - 1] = before[:column] + self.text + before[column + len(self.place.text) :]
        return "".join(lines)

    def sed(self, source: str) -> str:
        """The shortest ``sed`` script for the change."""
        line = source.splitlines()[self.place.line - 1]
        start, end, new = self.place.column, self.place.column + len(self.place.text), self.text
        while line.index(line[start:end]) != start:  # sed replaces the first match in a line
            start -= 1
            new = line[start] + new
        old = "".join(f"\\{one}" if one in "\\.[*^$" else one for one in line[start:end])
        old = old.removeprefix("\\") if old.startswith("\\*") else old  # a star at the beginning is literal
        new = new.replace("\\", "\\\\").replace("&", "\\&")
        mark = "|" if "/" in old + new else "/"
        return f"{self.place.line}s{mark}{old}{mark}{new}{mark}"


def edits(source: str, kinds: Sequence[BugKind] = BUG_KINDS) -> list[Edit]:
    """All single changes to a source, except in the first line, which is `def`."""
    places = [place for place in _places(source) if place.kind in kinds and place.line > 1]
    return [Edit(place, text) for place in places for text in place.alternatives]


def _places(source: str) -> Iterator[Place]:
    tokens = [*tokenize.generate_tokens(io.StringIO(source).readline)]
    for index, token in enumerate(tokens):
        if token.type not in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            continue
        left, right = tokens[index - 1], tokens[index + 1] if index + 1 < len(tokens) else token
        fits = {
            "operator": index > 0 and _ends_operand(left),
            "name": right.string == "(",  # only a function's name: an argument may have the same name
        }
        for kind, texts in GROUPS:
            if token.string in texts and fits.get(kind, True):
                others = tuple(text for text in texts if text != token.string)
                yield Place(kind, *token.start, token.string, others)
        if token.string in SWAPPED and left.type == right.type == tokenize.NAME and left.string != right.string:
            between = token.line[left.end[1] : right.start[1]]
            text, other = left.string + between + right.string, right.string + between + left.string
            # The names must be complete operands, not targets of an assignment.
            before, after = tokens[index - 2].string, tokens[index + 2].string
            if before in ("(", "return", "if", ",") and after in (")", ":", "", "\n", ","):
                yield Place("swap", *left.start, text, (other,))


def _ends_operand(token: tokenize.TokenInfo) -> bool:
    """True if an operator after this token has a left operand."""
    is_word = token.type == tokenize.NAME and token.string not in ("return", "in", "if", "and", "or")
    return is_word or token.type == tokenize.NUMBER or token.string in (")", "]")


# -- a repository


@dataclass(frozen=True, slots=True)
class Shape:
    """Settings of repositories: see ``Bugfix``."""

    functions: int = 4
    bugs: int = 1
    max_lines: int | None = None
    kinds: tuple[BugKind, ...] = BUG_KINDS
    terse: bool = False


@dataclass(frozen=True, slots=True)
class Repository:
    """The material of one episode."""

    files: dict[str, str]
    """Texts by name, for the policy."""
    tests: dict[str, str]
    """Hidden assertions for each function, by names such as ``calc.add``."""
    fixes: dict[str, Edit]
    """The change to the module that fixes each broken function, by its name."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A function in a repository, with its bug, if any."""

    name: str
    right: str
    bug: Edit | None
    calls: list[tuple[Any, ...]]

    def assertions(self, calls: int) -> list[str]:
        solution = callable_of(self.right, self.name)
        shown = (
            f"calc.{self.name}({', '.join(map(repr, call))}) == {solution(*call)!r}" for call in self.calls[:calls]
        )
        return [f"assert {one}\n" for one in shown]


def make_repository(rng: random.Random, shape: Shape) -> Repository:
    """Make a random repository of this shape. Raises ``ValueError`` if the library has too few functions for it."""
    known = library(shape.max_lines)
    if shape.functions > len(known):
        raise ValueError(f"{shape.functions} functions are requested, but there are only {len(known)}")
    broken = set(rng.sample(range(shape.functions), shape.bugs))
    members: list[_Member] = []
    for function in rng.sample(known, len(known)):
        if len(members) < shape.functions:
            member = _member(rng, function, shape, broken=len(members) in broken)
            members += [member] if member is not None else []
    if len(members) < shape.functions:
        raise ValueError(f"too few functions can have a bug of the kinds {', '.join(shape.kinds)}")
    text = ""
    fixes: dict[str, Edit] = {}
    for member in members:
        text += "\n\n" if text else ""
        if (bug := member.bug) is not None:
            place = bug.place
            others = tuple(sorted({place.text, *place.alternatives} - {bug.text}))
            line = place.line + text.count("\n")
            undone = replace(place, line=line, text=bug.text, alternatives=others)
            fixes[f"calc.{member.name}"] = Edit(undone, place.text)
        text += member.right if bug is None else bug.applied(member.right)
    files = {MODULE: text}
    if not shape.terse:
        lines = ["# Functions\n\n"]
        for member in members:
            head = member.right.splitlines()[0].removeprefix("def ").removesuffix(":")
            lines.append(f"- `calc.{head}`: {callable_of(member.right, member.name).__doc__}\n")
        # The examples, one call to each function, may pass in spite of a bug.
        examples = [one for member in members for one in member.assertions(1)]
        files |= {
            README: "".join(lines),
            EXAMPLES: "".join(["import calc\n\n", *examples, 'print("all examples pass")\n']),
        }
    return Repository(files, {f"calc.{one.name}": "".join(one.assertions(CALLS)) for one in members}, fixes)


def _member(rng: random.Random, function: Function, shape: Shape, broken: bool) -> _Member | None:
    """A function, with a bug if ``broken``; None if no bug of these kinds is possible."""
    right = function.written(rng, shape.terse)
    calls = function.calls(rng, CALLS)
    if not broken:
        return _Member(function.name, right, bug=None, calls=calls)
    solution = callable_of(right, function.name)
    possible = edits(right, shape.kinds)
    for bug in rng.sample(possible, len(possible)):
        for _ in range(TRIES):
            calls = function.calls(rng, CALLS)
            expected = [solution(*call) for call in calls]
            if not passes(bug.applied(right), function.name, calls=calls, expected=expected):
                return _Member(function.name, right, bug=bug, calls=calls)
    return None
