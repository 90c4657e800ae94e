"""The functions that repositories are made of.

A function is plain code without recursion and without `while`, so that every mutation of it ends. The names of its
arguments say what they can be (``KINDS``): random calls, and other names for them, follow from that.
"""

from __future__ import annotations

import ast
import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUMBERS_LENGTH = (3, 6)
"""Lists have at least three elements: functions may ask for the third."""
LETTERS = "abcdefghijkmnopqrstuvwxyz"
"""Names of arguments in terse code; without `l`, which looks like 1."""

Draw = Callable[[random.Random], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """What an argument can be: how one is drawn, and the names that it may have in a repository."""

    draw: Draw
    names: tuple[str, ...]


def _number(rng: random.Random) -> int:
    # Small ones are often equal, and only then `<` and `<=` differ.
    return rng.randint(0, 3) if rng.random() < 0.5 else rng.randint(-9, 20)


def _numbers(rng: random.Random) -> list[int]:
    return [_number(rng) for _ in range(rng.randint(*NUMBERS_LENGTH))]


def _text(rng: random.Random) -> str:
    letters = (rng.choice("aabbcdeABC ") for _ in range(rng.randint(1, 8)))
    return "".join(letters)


_NUMBER = Kind(_number, ("number", "value", "amount", "first_value", "score"))
_OTHER = Kind(_number, ("other", "second_value", "change", "offset", "operand"))
KINDS: dict[str, Kind] = {
    "number": _NUMBER,
    "other": _OTHER,
    "low": Kind(_number, ("low", "least", "minimum", "floor")),
    "high": Kind(_number, ("high", "most", "maximum", "ceiling")),
    "step": Kind(lambda rng: rng.randint(1, 9), ("step", "divisor", "part", "unit")),
    "count": Kind(lambda rng: rng.randint(0, 7), ("count", "times", "limit", "bound")),
    "numbers": Kind(_numbers, ("numbers", "values", "scores", "amounts")),
    "others": Kind(_numbers, ("others", "targets", "prices", "weights")),
    "text": Kind(_text, ("text", "line", "heading", "phrase")),
    "letter": Kind(lambda rng: rng.choice("abcdAB"), ("letter", "character", "mark", "symbol")),
    "flag": Kind(lambda rng: rng.random() < 0.5, ("flag", "ready", "valid", "active")),
    "switch": Kind(lambda rng: rng.random() < 0.5, ("switch", "allowed", "known", "open_now")),
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the library. ``lines`` counts those of its body without the docstring."""

    name: str
    source: str
    arguments: tuple[str, ...]
    lines: int

    def calls(self, rng: random.Random, count: int) -> list[tuple[Any, ...]]:
        """Arguments of ``count`` random calls."""
        return [tuple(KINDS[argument].draw(rng) for argument in self.arguments) for _ in range(count)]

    def written(self, rng: random.Random, terse: bool) -> str:
        """Its source with other names for its arguments; ``terse``: letters for them, and no docstring."""
        if terse:
            names: Sequence[str] = rng.sample(LETTERS, len(self.arguments))
            lines = [line for line in self.source.splitlines() if not line.startswith('    """')]
        else:
            names = [rng.choice(KINDS[argument].names) for argument in self.arguments]
            lines = self.source.splitlines()
        renamed: Mapping[str, str] = dict(zip(self.arguments, names, strict=True))
        return re.sub(r"\w+", lambda match: renamed.get(match[0], match[0]), "\n".join(lines)) + "\n"


@functools.lru_cache(maxsize=4096)
def callable_of(source: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of a source of the library, or of a mutation of one; it keeps nothing between calls."""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


@functools.cache
def library(max_lines: int | None = None) -> tuple[Function, ...]:
    """The functions whose body has at most ``max_lines`` lines."""
    found = []
    for node in ast.parse(_SOURCE).body:
        assert isinstance(node, ast.FunctionDef)
        source = ast.get_source_segment(_SOURCE, node) or ""
        lines = len(source.splitlines()) - 2  # `def`, and a docstring of one line
        if max_lines is None or lines <= max_lines:
            found.append(Function(node.name, source, tuple(one.arg for one in node.args.args), lines))
    return tuple(found)


_SOURCE = '''
def add(number, other):
    """The sum of number and other."""
    return number + other

def sub(number, other):
    """What is left of number without other."""
    return number - other

def mul(number, other):
    """The product of number and other."""
    return number * other

def div(number, step):
    """How many times step goes into number, rounded down."""
    return number // step

def rest(number, step):
    """The remainder of number divided by step."""
    return number % step

def double(number):
    """Twice the number given as number."""
    return number * 2

def triple(number):
    """Three times number."""
    return number * 3

def half(number):
    """One half of number, rounded down."""
    return number // 2

def inc(number):
    """One more than number."""
    return number + 1

def dec(number):
    """One less than number."""
    return number - 1

def even(number):
    """Whether number can be divided by two."""
    return number % 2 == 0

def less(number, other):
    """Whether number is smaller than other."""
    return number < other

def more(number, other):
    """Whether number is larger than other."""
    return number > other

def same(number, other):
    """Whether number and other are equal."""
    return number == other

def differ(number, other):
    """Whether number and other are different."""
    return number != other

def at_most(number, other):
    """Whether number is other or smaller."""
    return number <= other

def at_least(number, other):
    """Whether number is other or larger."""
    return number >= other

def smallest(numbers):
    """The smallest of numbers."""
    return min(numbers)

def largest(numbers):
    """The largest of numbers."""
    return max(numbers)

def total(numbers):
    """The sum of numbers."""
    return sum(numbers)

def size(numbers):
    """How many numbers there are."""
    return len(numbers)

def first(numbers):
    """The first of numbers."""
    return numbers[0]

def second(numbers):
    """The second of numbers."""
    return numbers[1]

def third(numbers):
    """The third of numbers."""
    return numbers[2]

def last(numbers):
    """The last of numbers."""
    return numbers[-1]

def tail(numbers):
    """All of numbers but the first one."""
    return numbers[1:]

def shout(text):
    """The same text in capital letters."""
    return text.upper()

def whisper(text):
    """The same text in small letters."""
    return text.lower()

def both(flag, switch):
    """Whether flag and switch are both true."""
    return flag and switch

def either(flag, switch):
    """Whether flag or switch is true, or both are."""
    return flag or switch

def between(number, low, high):
    """Whether number is at least low and at most high."""
    return low <= number and number <= high

def spread(numbers):
    """The distance of the largest of numbers from the smallest."""
    return max(numbers) - min(numbers)

def ends(numbers):
    """The first of numbers plus the last."""
    return numbers[0] + numbers[-1]

def distance(number, other):
    """How far number is from other; never negative."""
    return abs(number - other)

def round_down(number, step):
    """The largest multiple of step that is not more than number."""
    return number - number % step

def perimeter(number, other):
    """Of a rectangle with the sides number and other."""
    return 2 * (number + other)

def clamp(number, low, high):
    """The low bound if number is smaller, else the high bound if number is larger, else number."""
    if number < low:
        return low
    if number > high:
        return high
    return number

def count_above(numbers, low):
    """How many of numbers are larger than low."""
    found = 0
    for one in numbers:
        if one > low:
            found += 1
    return found

def largest_gap(numbers):
    """The largest distance between neighbours in numbers."""
    best = 0
    for index in range(1, len(numbers)):
        best = max(best, abs(numbers[index] - numbers[index - 1]))
    return best

def running_total(numbers):
    """The sums of the first one, two, three and more of numbers."""
    so_far = 0
    sums = []
    for one in numbers:
        so_far = so_far + one
        sums.append(so_far)
    return sums

def factorial(count):
    """The product of the integers from 1 to count."""
    product = 1
    for one in range(2, count + 1):
        product = product * one
    return product

def sum_to(count):
    """The sum of the integers from 1 to count."""
    result = 0
    for one in range(1, count + 1):
        result = result + one
    return result

def fibonacci(count):
    """The Fibonacci number with the index count: 0, 1, 1, 2, 3, 5, ..."""
    now, following = 0, 1
    for _ in range(count):
        now, following = following, now + following
    return now

def is_sorted(numbers):
    """Whether no one of numbers is smaller than the one before it."""
    for index in range(1, len(numbers)):
        if numbers[index] < numbers[index - 1]:
            return False
    return True

def second_largest(numbers):
    """The second of numbers when they are in falling order."""
    ordered = sorted(numbers)
    return ordered[-2]

def median(numbers):
    """The middle of numbers in rising order; the lower one of the two where there are two."""
    ordered = sorted(numbers)
    middle = (len(ordered) - 1) // 2
    return ordered[middle]

def dot(numbers, others):
    """The sum of the products of numbers and others, pair by pair."""
    result = 0
    for left, right in zip(numbers, others):
        result = result + left * right
    return result

def count_letter(text, letter):
    """How often letter occurs in text, in capital and in small letters."""
    found = 0
    for one in text.lower():
        if one == letter.lower():
            found += 1
    return found

def is_palindrome(text):
    """Whether text is the same from either end; capital letters count as small ones."""
    plain = text.lower()
    for index in range(len(plain) // 2):
        if plain[index] != plain[-1 - index]:
            return False
    return True

def initials(text):
    """The first letters of the words in text, in capital letters."""
    letters = ""
    for word in text.split():
        letters = letters + word[0].upper()
    return letters

def position(numbers, number):
    """The index of the first of numbers that equals number, or -1 if there is none."""
    for index in range(len(numbers)):
        if numbers[index] == number:
            return index
    return -1

def every_other(numbers):
    """Those of numbers with an even index."""
    kept = []
    for index in range(len(numbers)):
        if index % 2 == 0:
            kept.append(numbers[index])
    return kept

def grade(number):
    """`high` from 10 on, `middle` from 5 on, else `low`."""
    if number >= 10:
        return "high grade"
    if number >= 5:
        return "middle grade"
    return "no grade"

def fare(count, flag):
    """3 for each of count, 2 with flag; none is free, and the first 2 cost 1 more each."""
    price = 3
    if flag:
        price = 2
    return count * price + min(count, 2)
'''
