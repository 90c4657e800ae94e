r"""Read and compare written answers without a computer algebra system.

``read`` splits a text into the items of a list, set or union. ``same`` compares two answers item by item: numbers as
exact fractions, tuples and intervals bracket by bracket, words letter by letter. Other expressions go to the function
that its caller passes (math-verify). All code here passes over a text a fixed number of times.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

EqualExpressions = Callable[[str, str], bool]

OPENERS, CLOSERS = "([{", ")]}"
LONGEST = 5_000
"""Limit on the characters of an answer."""
DEEPEST = 50
"""Limit on nested brackets, because tuples of tuples are read recursively."""
LONGEST_NUMBER = 500
FACTORS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SHORT_UNIT = re.compile(r"[cdmk]?m|[mk]?g|[cdm]?l|in|ft|yd|mi|sq|cu|lbs?|oz|[pq]t|gal|ms|sec|min|hrs?|[mk]ph|rpm", re.I)
LETTER_UNIT = re.compile(r"[mghlstnjwvcfk]", re.I)
r"""A letter counts as a unit only in `\text{}` or with another unit, as in "m/s"."""
JOINING_WORD = re.compile(r"an?|the|of|per", re.I)
NO_UNIT = re.compile(
    r"and|n?or|not|but|maybe|more|less|fewer|least|most|than|about|around|(?:near|exact)ly|almost|approximately|roughly"
    r"|over|under|above|below|before|after|plus|minus|squared|cubed|(?:north|south)?(?:east|west)?|left|right|down"
    r"|hal(?:f|ves)|(?:third|quarter|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)th)s?"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|base|modulo|radix|negative|positive|ago|later|early|late",
    re.I,
)
"""Words that change the meaning of a number."""
TOLERANCE = Fraction(1, 1_000_000)
"""Relative error allowed for a decimal number if the value has no exact decimal form, such as a third."""
MOST_ALTERNATIVES = 8
r"""Limit on the combinations of signs for the ``\pm`` in one item."""
EMPHASIS = re.compile(r"(?<![\w*])(\*{1,3}|_{1,2}|`)(?=[^\s*_`])([^*`\n]+)(?<=[^\s_])\1(?![\w*])")
"""Markdown's bold, italic and code."""
_WRAPPER = re.compile(
    r"\\(?:boxed|fbox|framebox|text(?:bf|it|rm|normal)?|underline"
    r"|(?:math(?:bf|rm|it|sf)|bm|boldsymbol)(?=\s*\{(?![a-zA-Z]\})))\s*\{"
)
r"""Commands around an answer that do not change it. ``\mathbf{i}`` is a vector, so it is not one of them."""
_REPLACED = {
    **dict.fromkeys(("\\!", "\\,", "\\;", "\\:", "~", "\\left", "\\right", "\\displaystyle", ",\\!", "{,}"), ""),
    **dict.fromkeys(("\\$", "$", "\\(", "\\)", "\\[", "\\]"), ""),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("°", "^{\\circ}", "\\degree"), "^\\circ"),
    **dict.fromkeys(("−", "–", "‑"), "-"),
    **dict.fromkeys(("⁄", "÷"), "/"),
    **dict.fromkeys("€£¥₹", ""),
    **{f"\\{command}{{{letter}}}": f" {letter}" for command in ("text", "mathrm") for letter in "ei"},  # no units
    **dict.fromkeys(("≤", "\\leq"), "\\le "),
    **dict.fromkeys(("≥", "\\geq"), "\\ge "),
    "\\\\": "\\\\",  # ends a matrix's row, and takes no letters with it
    **dict.fromkeys(("\\ ", "\\quad", "\\qquad"), " "),
    "≈": "\\approx ",
    **dict.fromkeys(("≡", "\\equiv"), "="),
    "\\%": "%",
    "\\sqrt{-1}": " i",
    "\\{": "\\lbrace ",
    "\\}": "\\rbrace ",
    "\\varnothing": "\\emptyset",
    "×": "\\times ",
    **dict.fromkeys("·⋅", "\\cdot "),
    "∗": "*",
    "**": "^",
    "π": "\\pi ",
    "∞": "\\infty ",
    "∪": "\\cup ",
    "±": "\\pm ",
}
# A command ends where its letters do: `\left` is not part of `\leftarrow`.
_REPLACE = re.compile(
    "|".join(
        re.escape(old) + ("(?![a-zA-Z])" if old[-1].isalpha() and old[0] == "\\" else "")
        for old in sorted(_REPLACED, key=len, reverse=True)
    )
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|hbox|mathrm(?=\{ *[a-zA-Z]{2}))\s*\{([^{}]*)\}(\^\{?[23]\}?)?")
_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile("[¼-¾⅐-⅞↉]"), lambda found: f" {unicodedata.normalize('NFKC', found[0])} "),
    (re.compile("[⁰¹²³⁴-⁹⁺⁻]+"), lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}"),
    (re.compile("[₀-₉]+"), lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}"),
    (re.compile(r"\\(?:text)?color\s*\{\w*\}|^(?:option|choice)\s+(?=\(?[A-Z]\b)", re.IGNORECASE), ""),
    (
        re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]))|(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)"),
        lambda found: f"\\sqrt{{{found[1] or found[2] or found[3]}}}",
    ),
    (re.compile(r"^([A-J])\)"), r"\1: "),  # before brackets are counted
    (re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])"), r"\\pi "),
    (_REPLACE, lambda found: _REPLACED[found[0]]),
    (re.compile(r"\\frac\s*\\pi\s*(\d|\{)"), r"\\frac{\\pi}\1"),
    (_TEXT, lambda found: f"\\text{{{found[1]}}}{found[2] or ''}"),
    (
        re.compile(r"[(\[]\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[)\]]", re.DOTALL),
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    (re.compile(r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}$"), r"\\text{\1/\2}"),
)
"""Replacements that leave one notation for each command, applied in this order."""
_SEPARATOR = re.compile(r"\\text\{ *,? *(?:and|or) *\}|,? +(?:and|or) +|(?<=\))(?:and|or)(?=\()|\\cup(?![a-zA-Z])|[,;]")
_COMMA, _EQUALS = re.compile(","), re.compile("=")
_BRACKETS = re.compile(r"\\(?:begin|end|[lr]brace)|[()\[\]{}]")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?(?![\d,])")
_VARIABLE = r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?'?"
_NAME = re.compile(
    rf"{_VARIABLE}(?:\({_VARIABLE}(?:,{_VARIABLE})*\))?|{_VARIABLE}:{_VARIABLE}|\({_VARIABLE}(?:,{_VARIABLE})+\)"
    r"|\|[A-Z]{2}\|"
)
_RELATION = re.compile(r"<|>|\\(?:le|ge|lt|gt|neq|ne|in|cap|cup|setminus)(?![a-zA-Z])")
_SET = re.compile(rf"{_RELATION.pattern}|\\cup(?![a-zA-Z])")
_UNIT_END = re.compile(r"\^\{?[23]\}?$")
_BARE_UNIT = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z][a-zA-Z./ -]*$")
_FUNCTIONS = "sqrt|a?(?:rc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|mod|max|min|gcd|lcm|det|abs"
# Prose, times, ratios, primes, numerals with a base, dots and geometric names. Algebra would read them as products of
# letters or as quotients, or read only a part.
_LITERAL = re.compile(
    rf"\\text\{{|(?:(?<![\\a-zA-Z{{])(?=[a-zA-Z]{{4}})|(?<= )(?=[a-zA-Z]{{3}}))(?!(?:{_FUNCTIONS})(?![a-zA-Z]))"
    r"|\d ?[:|] ?\d|\d ?[aApP]\.?[mM](?![a-zA-Z])|'|\\prime|\d\"|\d_[\d{]|(?<![\w^])(?<!frac )\d+ \d"
    r"|\?|\.\.|…|\\[lc]?dots|\\(?:angle|triangle|measuredangle)(?![a-zA-Z])"
    r"|\\(?:overline|widehat|over\w+arrow)\{ *[a-zA-Z]{2}"
)
# Dates, telephone numbers, versions, ranges of years. Algebra would subtract or divide.
_CODE = re.compile(
    r"(?:[a-zA-Z]{1,3}|[A-Z]{1,3}-)?(?:\+\d+[ -])?"
    r"(?:\(\d{2,}\)[ -]?\d+(?:[-/.:]\d+)+|\d+(?:[-/.:]\d+){2,}|\d{3,}-\d{3,})(?:-?[a-zA-Z])?"
)
_RANGE = re.compile(r"\d+-\d+")
_NO_VARIABLE = re.compile(rf"\\(?:begin|end|mathbb|operatorname)\{{[^{{}}]*\}}|\\[a-zA-Z]+|{_FUNCTIONS}|pi")
_PRODUCT = re.compile(r"-?\d+[a-zA-Z]{2,3}")
_BARE_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,} | [a-zA-Z]{2,}$")
_NUMERAL = re.compile(r"([-+]?[0-9a-zA-Z]+)_(?:\{(\d{1,2})\}|(\d{1,2}))")
_OPTION = re.compile(r"\(?([a-zA-Z])\)?")
_LABEL = re.compile(r"(?:\(([A-J])\)|([A-J])[:.)])\s*(\S.*)")
_OTHER_LABEL = re.compile(r"^\W*[A-J]\W*$|\([A-J]\)|\b[A-J][:.)]|(?:\b(?:or|and|not)|[,;/])\s*\(?[A-J]\b")
_DIGITS = r"\d+(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)(?:
        (?:(?P<whole>\d+)\s*)?\\frac\s*(?:\{{(?P<top>-?\d+)\}}|(?P<top1>\d))\s*(?:\{{(?P<bottom>\d+)\}}|(?P<bottom1>\d))
        |(?:(?P<whole2>\d+)\ +)?(?P<top2>\d+)\s*/\s*(?P<bottom2>\d+)
        |(?P<head>\d*\.\d*)\\overline\{{(?P<period>\d+)\}}
        |(?P<plain>{_DIGITS})(?:\s*(?:\\times|\\cdot|\*)\s*10\^(?:\{{(?P<power>[-+]?\d{{1,4}})\}}|(?P<power1>\d))
            |[eE](?P<power2>[-+]?\d{{1,4}}))?
    )\s*(?P<percent>%|percent)?""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value. ``decimal``: it was written with a decimal point; ``percent``: with a percent sign."""

    value: Fraction
    decimal: bool = False
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """True if the values are equal. 50 % equals 50 and 0.5; 0.333333 equals a third, within ``TOLERANCE``."""
        one, two = self.value, other.value
        pairs = [(one, two)]
        if self.percent != other.percent:
            pairs.append((one / 100, two) if self.percent else (one, two / 100))
        rounds = (self.decimal and other._has_no_end) or (other.decimal and self._has_no_end)
        return any(
            left == right or (rounds and abs(left - right) <= TOLERANCE * max(abs(left), abs(right)))
            for left, right in pairs
        )

    @property
    def _has_no_end(self) -> bool:
        """True if no finite decimal number equals the value."""
        rest = self.value.denominator
        for prime in (2, 5):
            while rest % prime == 0:
                rest //= prime
        return rest > 1


@dataclass(frozen=True, slots=True)
class Item:
    """One item of the list in an answer."""

    text: str
    """The normalized text."""
    name: str = ""
    """The variable that has this value."""
    brackets: str = ""
    """The brackets around a tuple or an interval."""
    parts: tuple[Item, ...] = ()
    """The items between the brackets."""
    number: Number | None = None
    """The value, if the text is a number."""


Reading = tuple[Item, ...]
"""A text as a list. The order does not matter, repetitions do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A normalized text and its possible readings: ``1,200`` is one number, or two."""

    text: str
    readings: tuple[Reading, ...]


class Unreadable(ValueError):
    """The text is not an answer; the message says why."""


def read(text: str) -> Answer:
    """Read a text that has an answer and nothing else. Raises ``Unreadable``."""
    if len(text) > LONGEST:
        raise Unreadable(f"it has more than {LONGEST} characters")
    tidy = tidied(text)
    if not tidy:
        raise Unreadable("it is empty")
    _check_balance(tidy)
    readings: list[Reading] = []
    if found := _THOUSANDS.match(tidy):
        number = _item(found[0].replace(",", "").replace(" ", "") + tidy[found.end() :])
        if number.number is not None:
            readings.append((number,))
            if ",0" in found[0]:  # no list has elements with leading zeros
                return Answer(tidy, tuple(readings))
    items = (one for part in _split(_without_braces(tidy)) for one in _alternatives(part))
    readings.append(tuple(map(_item, items)))
    return Answer(tidy, tuple(readings))


def same(one: Answer, other: Answer, equal: EqualExpressions) -> bool:
    """True if two answers are equal in one of their readings. ``equal`` compares expressions."""
    pairs = product(one.readings, other.readings)
    if any(len(left) == len(right) and _same_lists(left, right, equal) for left, right in pairs):
        return True
    left, right = _labelled(one), _labelled(other)
    if left and right:
        return left[0] == right[0] and same(left[1], right[1], equal)
    for choice, plain in ((left, other), (right, one)):
        if choice:
            option = _OPTION.fullmatch(plain.text)
            return option[1].upper() == choice[0] if option else same(choice[1], plain, equal)
    # Relations and unions of intervals may describe one set in different pieces.
    sets = any(_SET.search(answer.text) for answer in (one, other))
    equations = all(answer.text.count("=") == 1 for answer in (one, other))
    return (sets or equations) and equal(one.text, other.text)


def _labelled(answer: Answer) -> tuple[str, Answer] | None:
    """Split an option with its text, as in "E: a score" or "(E) 72", into the letter and the text."""
    found = _LABEL.fullmatch(" ".join(_TEXT.sub(r" \1 ", answer.text).split()))
    if found is None or _OTHER_LABEL.search(found[3]):
        return None
    try:
        return found[1] or found[2], read(found[3])
    except Unreadable:
        return None


def is_prose(answer: Answer) -> bool:
    """True if an answer has words that are not units."""
    return any(
        _LITERAL.search(item.text) or _BARE_WORD.search(item.text) for reading in answer.readings for item in reading
    )


def tidied(text: str) -> str:
    r"""Remove dollars, spacing commands, ``\boxed`` and a full stop, and use one notation for each command."""
    text = text.strip()
    if emphasis := EMPHASIS.fullmatch(text.rstrip(". ")):
        text = emphasis[2]
    while wrapper := _WRAPPER.match(inside := text.strip("$. ")):
        if closing(inside, wrapper.end() - 1) != len(inside) - 1:
            break
        text = inside[wrapper.end() : -1].strip()
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return " ".join(text.split()).rstrip(".;,: ").lstrip(",= ")


def closing(text: str, opening: int, openers: str = "{", closers: str = "}") -> int | None:
    """Index at which the bracket at ``opening`` is closed, by default a brace; None if it is not closed."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] in openers) - (text[index] in closers)
        if depth == 0:
            return index
    return None


def words(text: str) -> str:
    """The letters and digits of words, in lower case; "" for mathematics."""
    plain = _TEXT.sub(lambda found: f" {found[1]} ", text).strip()
    if option := _OPTION.fullmatch(plain):
        return option[1].casefold()
    plain = plain.replace(".", "")
    if not all(char.isalnum() or char in " :'-" for char in plain) or not re.search(r"[^\W\d_]{2}", plain):
        return ""
    return "".join(char for char in plain if char.isalnum() or char in ":-'").casefold()


def _same_lists(left: Reading, right: Reading, equal: EqualExpressions) -> bool:
    rest = list(right)
    for item in left:
        found = next((index for index, other in enumerate(rest) if _same(item, other, equal)), None)
        if found is None:
            return False
        del rest[found]
    return True


def _same(left: Item, right: Item, equal: EqualExpressions) -> bool:
    if left.name and right.name and left.name != right.name:
        return False
    one_word, other_word = words(left.text), words(right.text)
    if left.text == right.text or (one_word and one_word == other_word):
        return True
    if left.number is not None and right.number is not None:
        return left.number.equals(right.number)
    if left.parts and right.parts:
        return (
            left.brackets == right.brackets
            and len(left.parts) == len(right.parts)
            and all(_same(one, other, equal) for one, other in zip(left.parts, right.parts, strict=True))
        )
    if ("=" in left.text) != ("=" in right.text):
        return False  # an equation is not a value; the name in "x = 3" was removed before
    both = (left.text, right.text)
    if any(map(_LITERAL.search, both)) or any(map(_CODE.fullmatch, both)) or all(map(_RANGE.fullmatch, both)):
        return left.text.replace(" ", "") == right.text.replace(" ", "")
    if one_word and other_word and not all(map(_PRODUCT.fullmatch, both)):
        return False  # as products of letters, "east" and "seat" would be equal
    if not any(map(_RELATION.search, both)) and _variables(left.text) != _variables(right.text):
        return False  # math-verify takes "10m" for 10 with a unit
    return equal(left.text, right.text)


def _variables(text: str) -> set[str]:
    return set(re.findall("[a-df-hj-zA-Z]", _NO_VARIABLE.sub("", text)))


def _item(text: str) -> Item:
    name, value = _named(text.strip())
    value, factor = _without_unit(value)
    if (numeral := _NUMERAL.fullmatch(value)) is not None and (base := int(numeral[2] or numeral[3])) > 0:
        with suppress(ValueError):  # "x_2" is a variable, because "x" is not a digit of base 2
            int(numeral[1], base)
            value = numeral[1] if base == 10 else f"{numeral[1].upper()} base {base}"
    number = _number(value)
    if factor != 1 and number is not None:
        number = replace(number, value=number.value * factor)
        return Item(str(number.value), name, number=number)
    brackets = value[:1] + value[-1:]
    if re.fullmatch(r"[(\[][)\]]", brackets) and closing(value, 0, openers=OPENERS, closers=CLOSERS) == len(value) - 1:
        inner = value[1:-1]
        parts = list(_split(inner, _COMMA))
        if len(parts) > 1:
            return Item(value, name, brackets=brackets, parts=tuple(map(_item, parts)))
        if brackets == "()" and (in_brackets := _number(inner.strip())) is not None:
            return Item(inner.strip(), name, number=in_brackets)
    return Item(value, name, number=number)


def _named(text: str) -> tuple[str, str]:
    """Split into the name before the first equals sign ("" without one) and the value after the last one.

    If a value is given exactly and approximately, only the exact value is kept.
    """
    exact, _, approximate = (part.strip() for part in text.partition("\\approx"))
    if approximate:
        is_name = _NAME.fullmatch(exact.replace(" ", ""))
        text = f"{exact}={approximate}" if is_name else exact or approximate
    if "=" not in text or _RELATION.search(text) or "\\ne" in text:
        return "", text
    parts = list(_split(text, _EQUALS))
    name = parts[0].replace(" ", "") if len(parts) > 1 else ""
    return (name, parts[-1]) if _NAME.fullmatch(name) else ("", text)


def _without_unit(text: str) -> tuple[str, int]:
    """Split off a unit and a degree sign, and return the unit's factor: "5 million dollars" is 5 and 1,000,000.

    "am" and "pm", directions, "or more", and letters that may be variables are not units, and stay.
    """
    factor = 1
    # Only the `\text{}` at the end.
    while (found := _TEXT.fullmatch(text, max(0, text.rfind("\\text{")))) and (value := text[: found.start()].strip()):
        is_number = _number(value.removesuffix("^\\circ").strip()) is not None
        scale = _unit(found[1], letters=is_number)
        if scale is None or value[-1] in "+-*/^=_({[," or (scale > 1 and not is_number):
            return text, factor
        text, factor = value, factor * scale
    without_power = _UNIT_END.sub("", text)
    if (bare := _BARE_UNIT.search(without_power)) is not None and (value := without_power[: bare.start()].strip()):
        is_number = _number(value) is not None
        after_space = without_power[bare.start() - 1] == " "
        scale = _unit(bare[0], words=after_space)
        if scale is not None and value[-1] not in ".+-*/^=_({[," and (is_number or (after_space and scale == 1)):
            text, factor = value, factor * scale
    if text.endswith("^\\circ") and "\\" not in text[: -len("^\\circ")].replace("\\frac", ""):
        text = text[: -len("^\\circ")]
    return text.strip(), factor


def _unit(text: str, words: bool = True, letters: bool = False) -> int | None:
    """The factor of a unit, usually 1; None for other texts. ``words``, ``letters``: these may be units."""
    parts = [part for part in re.split(r"[\s./-]+", _UNIT_END.sub("", text.strip())) if part]
    factor = 1
    if words and parts and (name := parts[0].casefold().removesuffix("s")) in FACTORS:
        factor = FACTORS[name]
        if len(parts) == 1:
            return factor
        del parts[0]
    found = False
    for part in parts:
        name = part.casefold()
        is_word = words and len(name) > 2 and name.isalpha() and name not in string.ascii_lowercase
        is_letter = LETTER_UNIT.fullmatch(name) and (letters or "/" in text)
        is_unit = (
            (len(name) > 1 and SHORT_UNIT.fullmatch(name))
            or is_letter
            or (is_word and not NO_UNIT.fullmatch(name) and name not in FACTORS)
        )
        if not is_unit and not JOINING_WORD.fullmatch(name):
            return None
        found = found or bool(is_unit)
    return factor if found else None


def _number(text: str) -> Number | None:
    if thousands := _THOUSANDS.fullmatch(text.rstrip("% ")):
        text = thousands[0].replace(",", "").replace(" ", "") + ("%" if text.endswith("%") else "")
    found = _NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if found is None:
        return None
    group = found.groupdict()
    top, bottom = (group[key] or group[f"{key}1"] or group[f"{key}2"] for key in ("top", "bottom"))
    decimal = False
    if top is not None:
        if int(bottom) == 0:
            return None
        value = int(group["whole"] or group["whole2"] or 0) + Fraction(int(top), int(bottom))
    elif (period := group["period"]) is not None:
        digits = len(group["head"].partition(".")[2])
        repeated = Fraction(int(period), 10**digits * (10 ** len(period) - 1))
        value = Fraction(group["head"].rstrip(".") or 0) + repeated
    else:
        value = Fraction(group["plain"].rstrip("."))
        decimal = "." in group["plain"]
        value *= Fraction(10) ** int(group["power"] or group["power1"] or group["power2"] or 0)
    return Number(-value if group["sign"] == "-" else value, decimal, group["percent"] is not None)


def _alternatives(text: str) -> list[str]:
    r"""The item once for each combination of signs of its ``\pm``. ``\mp`` takes the opposite of the first sign."""
    parts = re.split(r"\\pm(?![a-zA-Z])", text)
    if len(parts) == 1 or 2 ** (len(parts) - 1) > MOST_ALTERNATIVES:
        return [text]
    found = []
    for signs in product("+-", repeat=len(parts) - 1):
        joined = parts[0] + "".join(sign + part for sign, part in zip(signs, parts[1:], strict=True))
        found.append(re.sub(r"\\mp(?![a-zA-Z])", "-" if signs[0] == "+" else "+", joined).strip().removeprefix("+"))
    return found


def _without_braces(text: str) -> str:
    """Remove the braces around a set."""
    start, end = "\\lbrace", "\\rbrace"
    if text.startswith(start) and text.endswith(end) and text.count(start) == 1:
        return text[len(start) : -len(end)].strip()
    if text.startswith("{") and closing(text, 0) == len(text) - 1:
        return text[1:-1].strip()
    return text


def _split(text: str, separator: re.Pattern[str] = _SEPARATOR) -> Iterator[str]:
    """Split a text at the separators outside brackets and environments."""
    ends = [found.span() for found in separator.finditer(text)]
    marks = ((found.start(), found[0]) for found in _BRACKETS.finditer(text))
    mark = next(marks, None)
    depth = start = 0
    for index, end in ends:
        while mark is not None and mark[0] < index:
            depth += 1 if mark[1] in ("\\begin", "\\lbrace", *OPENERS) else -1
            mark = next(marks, None)
        if depth == 0:
            if text[start:index].strip():
                yield text[start:index].strip()
            start = end
    if text[start:].strip():
        yield text[start:].strip()


def _check_balance(text: str) -> None:
    """Raise ``Unreadable`` unless braces are balanced, and brackets, of which an interval may mix two kinds."""
    depth = brackets = 0
    for char in text:
        depth += (char == "{") - (char == "}")
        brackets += (char in "([") - (char in ")]")
        if depth < 0:
            raise Unreadable("a brace is closed that was not opened")
        if max(depth, brackets) > DEEPEST:
            raise Unreadable(f"brackets are nested more than {DEEPEST} deep")
    if depth:
        raise Unreadable("a brace is not closed")
    if brackets:
        raise Unreadable("brackets do not match")
