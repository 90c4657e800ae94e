r"""Read and compare written answers without a computer algebra system.

``parse_answer`` splits a text into the items of a list, set or union. ``equal_answers`` compares two answers item by
item: numbers as exact fractions, tuples and intervals bracket by bracket, words letter by letter. Other expressions go
to the function that its caller passes (math-verify). All code here passes over a text a fixed number of times.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod

EqualExpressions = Callable[[str, str], bool]

OPENERS, CLOSERS = "([{", ")]}"
MAX_CHARACTERS = 5_000
"""Limit on the characters of an answer."""
MAX_NESTING = 50
"""Limit on nested brackets, because tuples of tuples are read recursively."""
MAX_NUMBER_CHARACTERS = 500
OTHER_SCRIPT = r"(?:(?![ªºͰ-Ͽ℀-⅏])[^\W\d_a-zA-Z]|[Ͱ-Ͽ]{2})"
"""A letter of words in other scripts; Greek letters and signs like ℝ are mathematics."""
SHORT_UNIT = re.compile(r"[cdmk]?m|[mk]?g|[cdm]?l|in|ft|yd|mi|sq|cu|lbs?|oz|[pq]t|gal|ms|sec|min|hrs?|[mk]ph|rpm", re.I)
LETTER_UNIT = re.compile(r"[mghlstnjwvcfk]", re.I)
r"""A letter counts as a unit only in `\text{}` or with another unit, as in "m/s"."""
JOINING_WORD = re.compile(r"an?|the|of|per", re.I)
NO_UNIT = re.compile(
    r"(?i)and|n?or|not|but|maybe|more|less|fewer|least|most|than|about|around|(?:near|exact)ly|almost|approximately|roughly"
    r"|over|under|above|below|before|after|plus|minus|squared|cubed|(?:north|south)?(?:east|west)?|left|right|down"
    r"|hal(?:f|ves)|(?:third|quarter|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)th)s?"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|base|modulo|radix|negative|positive|ago|later|early|late"
    r"|(?:бол|мен)(?:ее|ьше)|утра|вечера|полов\w*|(?:以|未|超).*|左右|多|余|半|이상|이하|미만|초과|반|(?:では|じゃ|아니).*"
)
"""Words that change the meaning of a number."""
TOLERANCE = Fraction(1, 1_000_000)
"""Relative error allowed for a decimal number if the value has no exact decimal form, such as a third."""
MAX_ALTERNATIVES = 8
r"""Limit on the combinations of signs for the ``\pm`` in one item."""
EMPHASIS = re.compile(r"(?<![\w*])(\*{1,3}|_{1,2}|`)(?=[^\s*_`])([^*`\n]+)(?<=[^\s_])\1(?![\w*])")
"""Markdown's bold, italic and code."""
_TEXT_FONT = r"text(?:bf|it|rm|tt|sf|normal)?"
_MATH_FONT = r"(?:math(?:bf|rm|it|sf|tt|normal)|bm|boldsymbol)"
_WRAPPER = re.compile(
    rf"\\(?:boxed|fbox|framebox|{_TEXT_FONT}|emph|underline|{_MATH_FONT}(?=\s*\{{(?![a-zA-Z]\}})))\s*\{{"
)
r"""Commands around an answer that do not change it. ``\mathbf{i}`` is a vector, so it is not one of them."""
_SIGNS = ("times", "cdot", "cdot", "pi", "infty", "cup", "pm", "emptyset", "approx", "le", "ge")
_REPLACED = {
    **dict.fromkeys(("\\!", "\\,", "\\;", "\\:", "~", "\\left", "\\right", "\\displaystyle", ",\\!", "{,}"), ""),
    **dict.fromkeys(("\\$", "$", "\\(", "\\)", "\\[", "\\]"), ""),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("°", "^{\\circ}", "\\degree"), "^\\circ"),
    **dict.fromkeys(("⁄", "÷"), "/"),
    **{f"\\{command}{{{letter}}}": f" {letter}" for command in ("text", "mathrm") for letter in "ei"},  # no units
    **{f"\\{sign}q": f"\\{sign} " for sign in ("le", "ge")},
    "\\\\": "\\\\",  # ends a matrix's row, and takes no letters with it
    **dict.fromkeys(("\\ ", "\\quad", "\\qquad"), " "),
    **dict.fromkeys(("≡", "\\equiv"), "="),
    "\\%": "%",
    "\\sqrt{-1}": " i",
    "\\{": "\\lbrace ",
    "\\}": "\\rbrace ",
    "\\varnothing": "\\emptyset",
    **{sign: f"\\{command} " for sign, command in zip("×·⋅π∞∪±∅≈≤≥", _SIGNS, strict=True)},
    "**": "^",
}
# A command ends where its letters do: `\left` is not part of `\leftarrow`.
_REPLACE = re.compile(
    "|".join(
        re.escape(notation) + ("(?![a-zA-Z])" if notation[-1].isalpha() and notation[0] == "\\" else "")
        for notation in sorted(_REPLACED, key=len, reverse=True)
    )
)
_TEXT = re.compile(
    rf"(?i:\\(?:{_TEXT_FONT}|mbox|hbox|mathrm(?=\{{ *(?:[a-zA-Z]{{2}}|[mghlsnjwvcfk]\b(?! *\()))"
    rf"|{_MATH_FONT}(?=\{{ *\([A-J]\)))\s*\{{((?:[^{{}}]|\^\{{-?\d\}})*)\}}(\^\{{?-?[1-3]\}}?)?)"
)
_PUNCTUATION = {"。": ". ", "।": ". ", "！": "! ", "？": "? ", "、": ",", "،": ",", "٫": ".", "٬": ",", "՝": ":"}
_PUNCTUATION |= {"∗": "*", **dict.fromkeys("−–‑～〜", "-")}
_PUNCTUATION |= dict.fromkeys("€£¥₩₪₫₱₴₸₹₺₽₾₿\u200b\u200e\u200f\u2066\u2067\u2068\u2069\ufeff", "")
_NOT_ASCII = re.compile(f"(?![0-9])\\d|[！-｝𝐀-𝟿{''.join(_PUNCTUATION)}]")
_SCALES = {"dozen": 12, "hundred": 100, "billion": 10**9, "миллиард": 10**9, "trillion": 10**12}
_SCALES |= dict.fromkeys(("thousand", "тысяч", "천", "हज़ार", "ألف", "พัน", "אלף"), 10**3)
_SCALES |= dict.fromkeys(("million", "миллион", "مليون", "ล้าน", "מיליון"), 10**6)
_SCALES |= {"만": 10**4, "หมื่น": 10**4, "लाख": 10**5, "แสน": 10**5, "करोड़": 10**7, "억": 10**8}
_SCALE = re.compile(rf"(?:{'|'.join(_SCALES)})|[百万萬亿億兆]|千(?![克米瓦])", re.IGNORECASE)
_SCALED = re.compile(
    rf"(?i:(?<![\d.,/}}])(\d[\d,]*(?:\.\d+)?)(\s?(?:\\text\{{ *)?)((?:{_SCALE.pattern})+)(?:а|и|ов|s?(?![a-zA-Z])))"
)


def in_ascii(text: str) -> str:
    """Write the digits and the punctuation of every script in ASCII, and ``18万`` as ``180000``."""
    return _SCALED.sub(_scaled, _NOT_ASCII.sub(_ascii, text))


def _ascii(match: re.Match[str]) -> str:
    char = match[0]
    return _PUNCTUATION.get(char, str(unicodedata.decimal(char, unicodedata.normalize("NFKC", char))))


def _scaled(match: re.Match[str]) -> str:
    scales = (_SCALES.get(scale.casefold()) or int(unicodedata.numeric(scale)) for scale in _SCALE.findall(match[3]))
    return f"{prod(scales, start=Fraction(match[1].replace(',', '')))}{match[2] or ' '}"


_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile("[¼-¾⅐-⅞↉]"), lambda match: f" {unicodedata.normalize('NFKC', match[0])} "),
    (re.compile("[⁰¹²³⁴-⁹⁺⁻]+"), lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}"),
    (re.compile("[₀-₉]+"), lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}"),
    (re.compile(r"\\(?:text)?color(?:box)?\s*\{\w*\}|^(?:option|choice)\s+(?=\(?[A-Z]\b)", re.IGNORECASE), ""),
    (re.compile(r"\\(?:bf|rm|it|tt|sf|large|huge|textstyle)(?![a-zA-Z])", re.IGNORECASE), ""),
    (
        re.compile(
            r"(?<=[\d.])\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))(?:(\d*)\\dot\s*\{?(\d)\}?)?|(?<=\d\.)\((\d+)\)"
        ),
        r"\\overline{\1\2\3\4\5}",
    ),
    (
        re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]))|(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)"),
        lambda match: f"\\sqrt{{{match[1] or match[2] or match[3]}}}",
    ),
    (re.compile(r"^([A-J])\)"), r"\1: "),  # before brackets are counted
    (re.compile(r"(?<![^\W\d_])(?<!\\)pi(?![^\W\d_])"), r"\\pi "),
    (_REPLACE, lambda match: _REPLACED[match[0]]),
    (re.compile(r"\\frac\s*\\pi\s*(\d|\{)"), r"\\frac{\\pi}\1"),
    (_TEXT, lambda match: "%" if match[1].strip() == "%" else f"\\text{{{match[1]}}}{match[2] or ''}"),
    (
        re.compile(r"[(\[]\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[)\]]", re.DOTALL),
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    (
        re.compile(rf"(?:\\frac\s*\{{\s*)?{_TEXT.pattern}\s*(?:\}}\s*\{{|/|\\cdot)\s*{_TEXT.pattern}(?:\s*\}})?$"),
        r"\\text{\1/\3}",
    ),
    (_SCALED, _scaled),
)
"""Replacements that leave one notation for each command, applied in this order."""
_SEPARATOR = re.compile(r"\\text\{ *,? *(?:and|or) *\}|,? +(?:and|or) +|(?<=\))(?:and|or)(?=\()|\\cup(?![a-zA-Z])|[,;]")
_COMMA, _EQUALS, _FREE_SPACE = re.compile(","), re.compile("="), re.compile(r"(?<!\d) | (?!\d)")
_BRACKETS = re.compile(r"\\(?:begin|end|[lr]brace)|[()\[\]{}]")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?(?![\d,])")
_FUNCTIONS = "sqrt|a?(?:rc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|mod|max|min|gcd|lcm|det|abs"
_VARIABLE = rf"(?:\\(?!{_FUNCTIONS}))?[^\W\d_]+(?:_\{{?\w+\}}?)?'?"
_NAME = re.compile(
    rf"{_VARIABLE}(?:\((?:\d+|{_VARIABLE}(?:,{_VARIABLE})*)\))?|{_VARIABLE}:{_VARIABLE}"
    rf"|\({_VARIABLE}(?:,{_VARIABLE})+\)|\|[A-Z]{{2}}\||\\text\{{\D*\}}"
)
_RELATION = re.compile(r"<|>|\\(?:le|ge|lt|gt|neq|ne|in|cap|cup|setminus)(?![a-zA-Z])")
_SET = re.compile(rf"{_RELATION.pattern}|\\cup(?![a-zA-Z])")
_UNIT_GAP = re.compile(r"(?:[\s./()-]|\\cdot(?![a-zA-Z])|\^\{?-?[1-3]\}?)+")
_BARE_UNIT = re.compile(rf"(?<![\\a-zA-Z])(?:[a-zA-Z][a-zA-Z./ -]*|[a-zA-Z]*{OTHER_SCRIPT}[^\s\x00-.:-@\\^{{}}|]*)$")
# Prose, times, ratios, primes, numerals with a base, dots and geometric names. Algebra would read them as products of
# letters or as quotients, or read only a part.
_LITERAL = re.compile(
    rf"{OTHER_SCRIPT}|\\text\{{"
    rf"|(?:(?<![\\a-zA-Z{{])(?=[a-zA-Z]{{4}})|(?<= )(?=[a-zA-Z]{{3}}))(?!(?:{_FUNCTIONS})(?![a-zA-Z]))"
    r"|\d ?[:|] ?\d|\d ?[aApP]\.?[mM](?![a-zA-Z])|'|\\prime|\d\"|\d_[\d{]|(?<![\w^])(?<!frac )\d+ \d"
    r"|\?|\.\.|…|\\[lc]?dots|\\(?:angle|triangle|measuredangle)(?![a-zA-Z])"
    r"|\\(?:overline|widehat|over\w+arrow)\{ *[a-zA-Z]{2}"
)
# Dates, telephone numbers, versions, ranges, scores. Algebra would subtract or divide.
CODE = re.compile(
    r"(?:[a-zA-Z]{1,3}|[A-Z]{1,3}-)?(?:\+\d+[ -])?"
    r"(?:\(\d{2,}\)[ -]?\d+(?:[-/.:]\d+)+|\d+(?:[-/.:]\d+){2,}|\d+ ?[/:] ?0\d+|0\d+ ?[/:] ?\d+)(?:-?[a-zA-Z])?"
    r"|[(\[]?\d[\d.]* ?[-:] ?\d[\d.]*[)\]]?"
)
_NO_VARIABLE = re.compile(rf"\\(?:begin|end|mathbb|operatorname)\{{[^{{}}]*\}}|\\[a-zA-Z]+|{_FUNCTIONS}|pi")
_PRODUCT = re.compile(r"-?\d+[a-zA-Z]{2,3}")
_BARE_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,} | [a-zA-Z]{2,}$")
_NUMERAL = re.compile(r"([-+]?[0-9a-zA-Z]+)_(?:\{(\d{1,2})\}|(\d{1,2}))")
_OPTION = re.compile(r"\(?([a-zA-Z])\)?")
_LABEL = re.compile(r"(?:\(([A-J])\)|([A-J])[:.)])\s*(\S.*)")
_OTHER_LABEL = re.compile(r"^\W*[A-J]\W*$|\([A-J]\)|\b[A-J][:.)]|(?:\b(?:or|and|not)|[,;/])\s*\(?[A-J]\b")
_DIGITS = r"\d+(?:\.\d*)?|\.\d+"
_NUMBER_FORM = re.compile(
    rf"""(?P<sign>[-+]?)(?:
        (?:(?P<whole>\d+)\s*)?\\frac\s*(?:\{{(?P<top>-?\d+)\}}|(?P<top1>\d))\s*(?:\{{(?P<bottom>\d+)\}}|(?P<bottom1>\d))
        |(?:(?P<whole2>\d+)\ +)?(?P<top2>(?!0\d)\d+)\s*/\s*(?P<bottom2>(?!0\d)\d+)
        |(?P<head>\d*\.\d*)\\overline\{{(?P<period>\d+)\}}
        |(?P<plain>{_DIGITS})(?:\s*(?:\\times|\\cdot|\*)\s*10\^(?:\{{(?P<power>[-+]?\d{{1,4}})\}}|(?P<power1>\d))
            |[eE](?P<power2>[-+]?\d{{1,4}}))?
    )\s*(?P<percent>%|percent)?""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class NumericValue:
    """An exact value. ``decimal``: it was written with a decimal point; ``percent``: with a percent sign."""

    value: Fraction
    decimal: bool = False
    percent: bool = False

    def equals(self, candidate: NumericValue) -> bool:
        """True if the values are equal. 50 % equals 50 and 0.5; 0.333333 equals a third, within ``TOLERANCE``."""
        pairs = [(self.value, candidate.value)]
        if self.percent != candidate.percent:
            pairs.append((self.value / 100, candidate.value) if self.percent else (self.value, candidate.value / 100))
        rounds = (self.decimal and candidate._has_no_end) or (candidate.decimal and self._has_no_end)
        return any(
            value == other_value
            or (rounds and abs(value - other_value) <= TOLERANCE * max(abs(value), abs(other_value)))
            for value, other_value in pairs
        )

    @property
    def _has_no_end(self) -> bool:
        """True if no finite decimal number equals the value."""
        denominator = self.value.denominator
        return pow(10, denominator.bit_length(), denominator) != 0


@dataclass(frozen=True, slots=True)
class Item:
    """One item of the list in an answer."""

    text: str
    """The normalized text."""
    name: str = ""
    """The variable that has this value."""
    brackets: str = ""
    """The brackets around a tuple or an interval."""
    elements: tuple[Item, ...] = ()
    """The items between the brackets."""
    numeric: NumericValue | None = None
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


def parse_answer(text: str) -> Answer:
    """Read a text that has an answer and nothing else. Raises ``Unreadable``."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"it has more than {MAX_CHARACTERS} characters")
    tidy = tidied(text)
    _check_balance(tidy)
    if not re.search(r"[\w<>+*/]", tidy):
        raise Unreadable("it is empty, or has no letter, digit or operator")
    readings: list[Reading] = []
    if thousands := _THOUSANDS.match(tidy):
        numeric_item = _parse_item(thousands[0].replace(",", "").replace(" ", "") + tidy[thousands.end() :])
        if numeric_item.numeric is not None:
            readings.append((numeric_item,))
            if ",0" in thousands[0]:  # no list has elements with leading zeros
                return Answer(tidy, tuple(readings))
    texts = (alternative for text in _split(_without_braces(tidy)) for alternative in _alternatives(text))
    readings.append(tuple(map(_parse_item, texts)))
    return Answer(tidy, tuple(readings))


def equal_answers(truth: Answer, answer: Answer, equal: EqualExpressions) -> bool:
    """True if two answers are equal in one of their readings. ``equal`` compares expressions."""
    readings = product(truth.readings, answer.readings)
    if any(
        len(items) == len(other_items) and _equal_lists(items, other_items, equal) for items, other_items in readings
    ):
        return True
    truth_option, answer_option = _split_option(truth), _split_option(answer)
    if truth_option and answer_option:
        return truth_option[0] == answer_option[0] and equal_answers(truth_option[1], answer_option[1], equal)
    for option, plain in ((truth_option, answer), (answer_option, truth)):
        if option:
            letter = _OPTION.fullmatch(plain.text)
            return letter[1].upper() == option[0] if letter else equal_answers(option[1], plain, equal)
    # Relations and unions of intervals may describe one set in different pieces.
    sets = any(_SET.search(text) for text in (truth.text, answer.text))
    equations = all(text.count("=") == 1 for text in (truth.text, answer.text))
    return (sets or equations) and equal(truth.text, answer.text)


def _split_option(answer: Answer) -> tuple[str, Answer] | None:
    """Split an option with its text, as in "E: a score" or "(E) 72", into the letter and the text."""
    label = _LABEL.fullmatch(" ".join(_TEXT.sub(r" \1 ", answer.text).split()))
    if label is None or _OTHER_LABEL.search(label[3]):
        return None
    try:
        return label[1] or label[2], parse_answer(label[3])
    except Unreadable:
        return None


def is_prose(answer: Answer) -> bool:
    """True if an answer has words that are not units."""
    return any(
        _LITERAL.search(item.text) or _BARE_WORD.search(item.text) for reading in answer.readings for item in reading
    )


def tidied(text: str) -> str:
    r"""Remove dollars, spacing commands, ``\boxed`` and a full stop, and use one notation for each command."""
    text = in_ascii(text).strip()
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
    plain = _TEXT.sub(lambda match: f" {match[1]} ", text).strip()
    if option := _OPTION.fullmatch(plain):
        return option[1].casefold()
    plain = plain.replace(".", "")
    if not all(char.isalnum() or char in " :'-" for char in plain) or not re.search(r"[^\W\d_]{2}", plain):
        return ""
    return "".join(char for char in plain if char.isalnum() or char in ":-'").casefold()


def _equal_lists(items: Reading, other_items: Reading, equal: EqualExpressions) -> bool:
    unmatched = list(other_items)
    for item in items:
        match_index = next((i for i, candidate in enumerate(unmatched) if _equal_items(item, candidate, equal)), None)
        if match_index is None:
            return False
        del unmatched[match_index]
    return True


def _equal_items(item: Item, candidate: Item, equal: EqualExpressions) -> bool:
    if item.name and candidate.name and item.name != candidate.name:
        return False
    item_words, candidate_words = words(item.text), words(candidate.text)
    if item.text == candidate.text or (item_words and item_words == candidate_words):
        return True
    if item.numeric is not None and candidate.numeric is not None:
        return item.numeric.equals(candidate.numeric)
    if item.elements and candidate.elements:
        return (
            item.brackets == candidate.brackets
            and len(item.elements) == len(candidate.elements)
            and all(_equal_items(*pair, equal) for pair in zip(item.elements, candidate.elements, strict=True))
        )
    if ("=" in item.text) != ("=" in candidate.text):
        return False  # an equation is not a value; the name in "x = 3" was removed before
    texts = (item.text, candidate.text)
    if any(map(_LITERAL.search, texts)) or any(map(CODE.fullmatch, texts)):
        return _FREE_SPACE.sub("", item.text) == _FREE_SPACE.sub("", candidate.text)
    if item_words and candidate_words and not all(map(_PRODUCT.fullmatch, texts)):
        return False  # as products of letters, "east" and "seat" would be equal
    if not any(map(_RELATION.search, texts)) and _variables(item.text) != _variables(candidate.text):
        return False  # math-verify takes "10m" for 10 with a unit
    return equal(item.text, candidate.text)


def _variables(text: str) -> set[str]:
    return set(re.findall("[a-df-hj-zA-Z]", _NO_VARIABLE.sub("", text)))


def _parse_item(text: str) -> Item:
    name, value = _split_name(text.strip())
    value = _without_unit(value)
    if (numeral := _NUMERAL.fullmatch(value)) is not None and (base := int(numeral[2] or numeral[3])) > 0:
        with suppress(ValueError):  # "x_2" is a variable, because "x" is not a digit of base 2
            int(numeral[1], base)
            value = numeral[1] if base == 10 else f"{numeral[1].upper()} base {base}"
    brackets = value[:1] + value[-1:]
    if re.fullmatch(r"[(\[][)\]]", brackets) and closing(value, 0, openers=OPENERS, closers=CLOSERS) == len(value) - 1:
        elements = list(_split(value[1:-1], _COMMA))
        if len(elements) > 1:
            return Item(value, name, brackets=brackets, elements=tuple(map(_parse_item, elements)))
        if brackets == "()" and (numeric := _parse_number(value[1:-1].strip())) is not None:
            return Item(value[1:-1].strip(), name, numeric=numeric)
    return Item(value, name, numeric=_parse_number(value))


def _split_name(text: str) -> tuple[str, str]:
    """Split into the name before the first equals sign ("" without one) and the value after the last one.

    If a value is given exactly and approximately, only the exact value is kept.
    """
    exact, _, approximate = map(str.strip, text.partition("\\approx"))
    if approximate:
        is_name = _NAME.fullmatch(exact.replace(" ", ""))
        text = f"{exact}={approximate}" if is_name else exact or approximate
    if "=" not in text or _RELATION.search(text) or "\\ne" in text:
        return "", text
    terms = list(_split(text, _EQUALS))
    if not any(_variables(term) or _LITERAL.search(term) for term in terms[:-1]):
        return "", terms[-1]
    name = terms[0].replace(" ", "") if len(terms) > 1 else ""
    return (name.partition("\\text")[0], terms[-1]) if _NAME.fullmatch(name) else ("", text)


def _without_unit(text: str) -> str:
    """Split off a unit and a degree sign.

    "am" and "pm", directions, "or more", and letters that may be variables are not units, and stay.
    """
    # Only the `\text{}` at the end.
    while (unit := _TEXT.fullmatch(text, max(0, text.rfind("\\text{")))) and (value := text[: unit.start()].strip()):
        is_number = _parse_number(value.removesuffix("^\\circ").strip()) is not None
        if value[-1] in "+-*/^=_({[," or not _is_unit(unit[1], letters=is_number):
            return text
        text = value
    without_power = re.sub(r"\^\{?-?[1-3]\}?$", "", text)
    if (bare := _BARE_UNIT.search(without_power)) is not None and (value := without_power[: bare.start()].strip()):
        after_space = without_power[bare.start() - 1] == " "
        is_unit = value[-1] not in ".+-*/^=_({[," and _is_unit(bare[0], words=after_space or not bare[0].isascii())
        if is_unit and (after_space or _parse_number(value) is not None):
            text = value
    if (degrees := re.search(r"\^\\circ\s*[CF]?$", text)) and "\\" not in text[: degrees.start()].replace("\\frac", ""):
        text = text[: degrees.start()]
    return text.strip()


def _is_unit(text: str, words: bool = True, letters: bool = False) -> bool:
    """True if a text is a unit, or empty. ``words``, ``letters``: these may be units."""
    names = [name.casefold() for name in _UNIT_GAP.split(text) if name]
    units = [name for name in names if not JOINING_WORD.fullmatch(name)]
    letters = letters or "/" in text

    def is_unit(name: str) -> bool:
        if (len(name) > 1 and SHORT_UNIT.fullmatch(name)) or (letters and LETTER_UNIT.fullmatch(name)):
            return True
        if not words or NO_UNIT.fullmatch(name) or name.removesuffix("s") in _SCALES:
            return False
        # A word in another script may be "or", so it must be alone.
        if not name.isascii():
            return " " not in text.strip()
        return len(name) > 2 and name.isalpha() and name not in string.ascii_lowercase

    return all(map(is_unit, units)) and (bool(units) or not names)


def _parse_number(text: str) -> NumericValue | None:
    if thousands := _THOUSANDS.fullmatch(text.rstrip("% ")):
        text = thousands[0].replace(",", "").replace(" ", "") + ("%" if text.endswith("%") else "")
    match = _NUMBER_FORM.fullmatch(text) if len(text) <= MAX_NUMBER_CHARACTERS else None
    if match is None:
        return None
    group = match.groupdict()
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
    return NumericValue(-value if group["sign"] == "-" else value, decimal, group["percent"] is not None)


def _alternatives(text: str) -> list[str]:
    r"""The item once for each combination of signs of its ``\pm``. ``\mp`` takes the opposite of the first sign."""
    operands = re.split(r"\\pm(?![a-zA-Z])", text)
    if len(operands) == 1 or 2 ** (len(operands) - 1) > MAX_ALTERNATIVES:
        return [text]
    alternatives = []
    for signs in product("+-", repeat=len(operands) - 1):
        joined = operands[0] + "".join(map("".join, zip(signs, operands[1:], strict=True)))
        joined = re.sub(r"\\mp(?![a-zA-Z])", "-" if signs[0] == "+" else "+", joined)
        alternatives.append(joined.strip().removeprefix("+"))
    return alternatives


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
    separators = [match.span() for match in separator.finditer(text)]
    marks = ((match.start(), match[0]) for match in _BRACKETS.finditer(text))
    mark = next(marks, None)
    depth = start = 0
    for index, end in separators:
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
        if max(depth, brackets) > MAX_NESTING:
            raise Unreadable(f"brackets are nested more than {MAX_NESTING} deep")
    if depth:
        raise Unreadable("a brace is not closed")
    if brackets:
        raise Unreadable("brackets do not match")
