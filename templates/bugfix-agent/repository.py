"""Make one repository: a module with a seeded bug, hidden tests, and the change that repairs it.

A bug is another token where Python code can go wrong. All tokens that can stand for each other are known, so the right
one is always among the alternatives of a wrong one.

Invariant: the tests pass with the functions as they are in functions.py, and the broken functions' tests fail as the
files are; both are tried when a repository is made. The same random numbers and shape make the same repository.
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
"""Calls of each function in the hidden tests."""
TRIES = 20
"""Sets of arguments that are tried to show a bug."""
LETTERS = "abcdefghijkmnopqrstuvwxyz"
"""Names of arguments in terse code; without `l`, which looks like 1."""
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
"""Texts that can stand for each other."""
SWAPPED = ("-", "//", "%", "<", "<=", ">", ">=", ",")
"""Operators between two names that depend on their order."""


# Random arguments, and the names that they may have in a repository.


def _number(rng: random.Random) -> int:
    # Small ones are often equal, and only then `<` and `<=` differ.
    return rng.randint(0, 3) if rng.random() < 0.5 else rng.randint(-9, 20)


def _numbers(rng: random.Random) -> list[int]:
    return [_number(rng) for _ in range(rng.randint(3, 6))]  # functions may ask for the third


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
"""For each argument in functions.py: how a value is drawn, and the names that it may have in a repository."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of functions.py. ``lines``: of its body, without the docstring."""

    name: str
    source: str
    arguments: tuple[str, ...]
    lines: int

    def calls(self, rng: random.Random, count: int) -> list[tuple[Any, ...]]:
        """Arguments of ``count`` random calls."""
        return [tuple(KINDS[argument][0](rng) for argument in self.arguments) for _ in range(count)]

    def written(self, rng: random.Random, terse: bool) -> str:
        """Its source with other names for its arguments; ``terse``: letters for them, and no docstring."""
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
    """The function ``name`` of a source of the library, or of a change of one; it keeps nothing between calls."""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


def passes(source: str, name: str, calls: Sequence[tuple[Any, ...]], expected: Sequence[Any]) -> bool:
    """Whether a function returns what is expected. It runs here, as no model has written it."""
    try:
        return all(callable_of(source, name)(*call) == value for call, value in zip(calls, expected, strict=True))
    except Exception:
        return False


# Places where code can go wrong, and the edits of them.


@dataclass(frozen=True, slots=True)
class Place:
    """A text in a line (from 1) at a column (from 0), and what could stand there instead."""

    kind: BugKind
    line: int
    column: int
    text: str
    alternatives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one line of a source."""

    place: Place
    text: str

    def applied(self, source: str) -> str:
        """The source with the change."""
        lines = source.splitlines(keepends=True)
        before, column = lines[self.place.line - 1], self.place.column
        lines[self.place.line - 1] = before[:column] + self.text + before[column + len(self.place.text) :]
        return "".join(lines)

    def sed(self, source: str) -> str:
        """The shortest script for ``sed`` that makes the change."""
        line = source.splitlines()[self.place.line - 1]
        start, end, new = self.place.column, self.place.column + len(self.place.text), self.text
        while line.index(line[start:end]) != start:  # sed replaces the first of a line
            start -= 1
            new = line[start] + new
        old = "".join(f"\\{one}" if one in "\\.[*^$" else one for one in line[start:end])
        old = old.removeprefix("\\") if old.startswith("\\*") else old  # a star that comes first stands for itself
        new = new.replace("\\", "\\\\").replace("&", "\\&")
        mark = "|" if "/" in old + new else "/"
        return f"{self.place.line}s{mark}{old}{mark}{new}{mark}"


def edits(source: str, kinds: Sequence[BugKind] = BUG_KINDS) -> list[Edit]:
    """Every single change of a source, from its second line on: the first one is `def`."""
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
            "name": right.string == "(",  # a function's: an argument may have the same one
        }
        for kind, texts in GROUPS:
            if token.string in texts and fits.get(kind, True):
                others = tuple(text for text in texts if text != token.string)
                yield Place(kind, *token.start, token.string, others)
        if token.string in SWAPPED and left.type == right.type == tokenize.NAME and left.string != right.string:
            between = token.line[left.end[1] : right.start[1]]
            text, other = left.string + between + right.string, right.string + between + left.string
            # The names are the whole operands, and no targets of an assignment.
            before, after = tokens[index - 2].string, tokens[index + 2].string
            if before in ("(", "return", "if", ",") and after in (")", ":", "", "\n", ","):
                yield Place("swap", *left.start, text, (other,))


def _ends_operand(token: tokenize.TokenInfo) -> bool:
    """Whether an operator after it has a left side."""
    is_word = token.type == tokenize.NAME and token.string not in ("return", "in", "if", "and", "or")
    return is_word or token.type == tokenize.NUMBER or token.string in (")", "]")


# A repository.


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
    """Texts by name, as the policy finds them."""
    tests: dict[str, str]
    """For each function, named as in ``calc.add``, hidden assertions."""
    fixes: dict[str, Edit]
    """The change of the module that repairs each broken function, by its name."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A function in a repository, and what is wrong with it."""

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
    """A random repository of this shape. Raises ``ValueError`` if the library has too few functions for it."""
    known = library(shape.max_lines)
    if shape.functions > len(known):
        raise ValueError(f"{shape.functions} functions are wanted, and there are {len(known)}")
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
        # The examples, the first call of each function, may pass in spite of a bug.
        examples = [one for member in members for one in member.assertions(1)]
        files |= {
            README: "".join(lines),
            EXAMPLES: "".join(["import calc\n\n", *examples, 'print("all examples pass")\n']),
        }
    return Repository(files, {f"calc.{one.name}": "".join(one.assertions(CALLS)) for one in members}, fixes)


def _member(rng: random.Random, function: Function, shape: Shape, broken: bool) -> _Member | None:
    """One function, with a bug if ``broken``; None if it can have none of these kinds."""
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
