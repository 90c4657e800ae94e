"""Where Python code can go wrong, and how: the bugs that are seeded, and the edits that may fix them.

A place is a token, or a pair of operands, for which others would be valid code, too. The alternatives of a kind stand
for each other: the right text is among the alternatives of a seeded bug. Only tokens are looked at, so a changed place
is still found as a place.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["operator", "comparison", "constant", "name", "swap"]
"""A wrong operator, comparison, number or built-in name, or operands in the wrong order."""
KINDS: tuple[Kind, ...] = get_args(Kind)
GROUPS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("operator", ("+", "-", "*", "//", "%")),
    ("operator", ("and", "or")),
    ("comparison", ("<", "<=", ">", ">=", "==", "!=")),
    ("constant", tuple(map(str, range(10)))),
    ("name", ("min", "max", "sum", "len")),
    ("name", ("upper", "lower", "title", "strip")),
)
"""Texts that can stand for each other."""
SWAPPED = ("-", "//", "%", "<", "<=", ">", ">=", ",")
"""Between two names: operators for which their order matters."""


@dataclass(frozen=True, slots=True)
class Place:
    """A text in a line (from 1) at a column (from 0), and what could stand there instead."""

    kind: Kind
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
        """A script for ``sed`` that makes the change: as short as it is right."""
        line = source.splitlines()[self.place.line - 1]
        start, end, new = self.place.column, self.place.column + len(self.place.text), self.text
        while line.index(line[start:end]) != start:  # sed replaces the first of a line
            start -= 1
            new = line[start] + new
        old, new = _pattern(line[start:end]), new.replace("\\", "\\\\").replace("&", "\\&")
        mark = "|" if "/" in old + new else "/"
        return f"{self.place.line}s{mark}{old}{mark}{new}{mark}"


def places(source: str, kinds: Sequence[Kind] = KINDS) -> list[Place]:
    """The places of a source, from its second line on: the first one is `def`."""
    return [place for place in _places(source) if place.kind in kinds and place.line > 1]


def edits(source: str, kinds: Sequence[Kind] = KINDS) -> list[Edit]:
    """Every single change."""
    return [Edit(place, text) for place in places(source, kinds) for text in place.alternatives]


def _pattern(text: str) -> str:
    """A basic regular expression that matches just this text."""
    escaped = "".join(f"\\{one}" if one in "\\.[*^$" else one for one in text)
    return (
        escaped.removeprefix("\\") if escaped.startswith("\\*") else escaped
    )  # a star that comes first stands for itself


def _places(source: str) -> Iterator[Place]:
    tokens = [*tokenize.generate_tokens(io.StringIO(source).readline)]
    for index, token in enumerate(tokens):
        if token.type not in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            continue
        binary = _ends_operand(tokens[index - 1]) if index else False
        for kind, texts in GROUPS:
            if token.string in texts and (
                binary if kind == "operator" else kind != "name" or _is_called(tokens, index)
            ):
                others = tuple(text for text in texts if text != token.string)
                yield Place(kind, *token.start, token.string, others)
        left, right = tokens[index - 1], tokens[index + 1] if index + 1 < len(tokens) else token
        if token.string in SWAPPED and left.type == right.type == tokenize.NAME and left.string != right.string:
            between = token.line[left.end[1] : right.start[1]]
            text, other = left.string + between + right.string, right.string + between + left.string
            if _is_alone(tokens, index):
                yield Place("swap", *left.start, text, (other,))


def _ends_operand(token: tokenize.TokenInfo) -> bool:
    """Whether an operator after it has a left side."""
    is_word = token.type == tokenize.NAME and token.string not in ("return", "in", "if", "and", "or")
    return is_word or token.type == tokenize.NUMBER or token.string in (")", "]")


def _is_called(tokens: Sequence[tokenize.TokenInfo], index: int) -> bool:
    """Whether the name is a function's: an argument may have the same one."""
    return index + 1 < len(tokens) and tokens[index + 1].string == "("


def _is_alone(tokens: Sequence[tokenize.TokenInfo], index: int) -> bool:
    """Whether the names beside an operator are its whole operands, and no targets of an assignment."""
    before, after = tokens[index - 2], tokens[index + 2]
    return before.string in ("(", "return", "if", ",") and after.string in (")", ":", "", "\n", ",")
