r"""The ready task ``math``: answers with equal values are equal, as math-verify and SymPy decide (decision 0083).

The row's ``answer`` is a number, an expression, LaTeX, a worked solution that ends as in GSM8K (``#### 42``) or MATH
(``\boxed{42}``), or a list of correct answers.

Invariant: a response has one answer. It is at the last mark (``_MARKS``) after the last closed thought. If this mark is
cut off or empty, the answer is wrong; earlier marks do not count.

math-verify limits its time by SIGALRM, which works only in a main thread; rewards run in one.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, Literal, get_args

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.ready.matching import texts_field
from asyncrl_cli.tasks.ready.math_forms import (
    CODE,
    EMPHASIS,
    OTHER_SCRIPT,
    TOLERANCE,
    Answer,
    NumericValue,
    Unreadable,
    closing,
    equal_answers,
    in_ascii,
    is_prose,
    parse_answer,
    tidied,
)

Extract = Literal["any", "boxed", "last_number", "answer_tag"]
_BOX = r"(?P<box>\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*)"
_LINE = r"(?P<line>####)"
_TAG = r"(?P<tag><answer>)"
_PHRASE = (
    r"(?P<phrase>(?<![a-zA-Z])(?<!this )(?<!that )(?:answers?|correct option|correct choice)[*_]*"
    r"(?:\s+(?:is|are)\b(?!\s+(?:correct|right|consistent|reasonable|valid|verified|confirmed|clear)\b)|\s*[:=])"
    r"|(?<![a-zA-Z])final:|final answer[*_]*\n)"
)
_MARKS = {
    extract: re.compile("|".join(marks), re.IGNORECASE)
    for extract, marks in {
        "any": (_BOX, _LINE, _TAG, _PHRASE),
        "boxed": (_BOX,),
        "last_number": (_LINE,),
        "answer_tag": (_LINE, _TAG),
        "truth": (_BOX, _LINE),
    }.items()
}
MAX_MARKS = 100
"""After so many marks without an answer, a response counts as having none: headings look like marks."""
_THINKING = r"(?:\w{1,20}[:|_])?(?:think|thought|reason|reflection|scratchpad|inner_prefix)[\w:-]{0,20}\|?[>▷]"
_THOUGHT_BEGIN = (
    rf"[<◁]\|?{_THINKING}|\[THINK\]|<\|channel\|?>(?!\s*final)|\A\s*(?-i:analysis(?=[A-Z$\\\"']))"
    r"|<unused94>|here(?:'s| is) my thought process:"
)
_THOUGHT_END = (
    rf"[<◁]\|?(?:/\|?|end_(?:of_)?){_THINKING}|\[/THINK\]|<channel\|>|<\|inner_suffix\|>|assistantfinal"
    r"|<\|channel\|>\s*final[^<]{0,20}(?:<\|constrain\|>[^<]{0,20})?<\|message\|>"
    r"|<unused95>|here(?:'s| is) my response:"
)
_THOUGHT_MARK = re.compile(rf"(?P<end>{_THOUGHT_END})|{_THOUGHT_BEGIN}", re.IGNORECASE)
"""The formats of known models; gpt-oss's also as its text is without special tokens."""
_CONTROL = re.compile(r"<\|\w{1,30}\|>|</?(?:output|response|solution)>", re.IGNORECASE)
_TAG_END = re.compile("</answer>", re.IGNORECASE)
_TAGS = re.compile("</?answer>", re.IGNORECASE)
_BOX_END = re.compile(r"\$|\n|\\[)\]]|\Z")
"""The end of a box without braces."""
_BETWEEN = re.compile(
    r"(?:[\s$,;&.]|\\[()\[\]]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|and|or)*(?:\\?[a-zA-Z]\w{0,20}\s{0,9}=\s*\$?)?"
)
# A minus after a digit, a letter or a bracket subtracts; it is not a sign.
_LOOSE_NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-−])?\$?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?")
_SENTENCE_END = re.compile(
    r"\n|</|[.!?]\s+(?=\S)|,?\s(?:because|since|as)\s|,?\si\.e\.|,\s(?!(?:and|or)\s+[^a-z])(?=[a-z]{2})"
)
"""The end of a stated answer: the end of the sentence, or a comma and a word, but not in "1, 2, and 3"."""
_UNCLEAR = re.compile(
    r"(?i)\b(?:not|either|neither|or|between|no es|nicht|kein\w*|n'est pas|não|не)\b|n't|不|并非|並非|では|じゃ|아니"
    r"|아닙|ليس|नहीं|ไม่|δεν|לא|\d(?:\s+[^\W\d_]{1,6}\s+|\s*[^\W\d_a-zA-Z]{1,6}\s*)\$?\d[\d.,]*(?:[^\w.,]\W*)?$"
)
"""Words of negation and doubt, and two numbers joined by one word: "18 или 20"."""
_LAST_LINE = re.compile(
    r"[^\d:\\$={}]{1,40}:\s*(?P<value>.+)"
    rf"|.*{OTHER_SCRIPT}(?<![À-ɏḀ-ỿ])\s*(?P<tail>(?=\W*[a-zA-Z0-9])[\x20-\x7e]+)"
)
"""The last line as "Ответ: 18" or "答案是18"."""
_BEFORE_ANSWER = re.compile(r"^(?:[\s*_:=$]|\\[\[(])+")
_REMARK = re.compile(r"(?<=\d)\.?\s+\([^()a-zA-Z\\]*\)[\s.]*$")
"""A calculation after a number: "9 (3*3)"."""
_TAKEN_BACK = re.compile(r"\s(?:wait|hmm+|actually|sorry|correction|instead|no(?=\s*[,:;.]))(?!\w)", re.IGNORECASE)
SEARCHED_CHARACTERS = 10_000
"""An expression without a mark is searched for in so many characters at the end."""
_NO_TRUTH = {"nan", "inf", "nat", "<na>", "n/a", "na", "#n/a", "none", "null"}
"""Missing and infinite values as people, pandas, NumPy and JSON write them."""
_DECIMAL = re.compile(r"(?<![\d.^_])(?:\d*\.\d+|\d+(?=[eE][-+]?\d))(?:[eE][-+]?\d{1,3})?(?!\d|\\overline)")
_NEGATIVE_POWER = re.compile(r"\^(-\d+)")
MAX_DIGITS = 200_000
"""Limit on the digits of the numbers that arise when an expression is computed."""
MAX_DIGITS_IN_SETS = 50
"""The same limit in sets and relations, which math-verify compares to 100 decimal places."""
_GROWING = {"factorial", "factorial2", "subfactorial", "gamma", "binomial", "Product", "fibonacci", "RisingFactorial"}


class MathAnswers:
    """The task ``math``."""

    def __init__(self, field: str = "answer", extract: Extract = "any", timeout_s: int = 5) -> None:
        """docs/tasks.md describes the options. An answer is wrong if it takes more than ``timeout_s`` to parse and
        compare.

        Raises ``TaskError`` if math-verify is not installed, ``ValueError`` for invalid options.
        """
        if extract not in get_args(Extract):
            raise ValueError(f"extract must be one of {', '.join(get_args(Extract))}, not {extract!r}")
        if timeout_s < 1:
            raise ValueError(f"timeout_s must be 1 or more, not {timeout_s}")
        self._field = field
        self._extract = extract
        self._timeout_s = timeout_s
        _math_verify()

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``MissingField`` or ``Unreadable`` for a row with an answer that no response can match."""
        self._truths(prompt)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """1.0 if the response's answer equals the row's, else 0.0. Raises like ``check_prompt``."""
        truths = self._truths(prompt)
        algebra = _Algebra(time.monotonic() + self._timeout_s)
        for text in self._answers(response, finished, algebra):
            try:
                answer = parse_answer(text)
            except Unreadable:
                continue
            if any(equal_answers(truth, answer, algebra.equal) for truth in truths):
                return 1.0
        return 0.0

    def _truths(self, prompt: Prompt) -> list[Answer]:
        texts = texts_field(prompt, self._field)
        try:
            return [parse_answer(_answer_of_row(text)) for text in _listed_texts(texts)]
        except Unreadable as error:
            raise Unreadable(f"the field {self._field!r} is not a readable answer: {error}") from None

    def _answers(self, response: str, finished: bool, algebra: _Algebra) -> Iterator[str]:
        """Yield the possible readings of the response's answer; nothing if it has none."""
        text = in_ascii(_after_thoughts(response))
        if finished and len(_TAGS.findall(text)) == 1:
            text += "</answer>"  # it was the stop string, which a response does not contain
        marks = list(deque(_MARKS[self._extract].finditer(text), maxlen=MAX_MARKS))
        boxes = any(mark.lastgroup == "box" for mark in marks)
        for index in reversed(range(len(marks))):
            mark = marks[index]
            if mark.lastgroup == "phrase":
                yield from _stated_answers(text[mark.end() :], algebra)
            elif (answer := _marked_answer(text, marks, index, alone=not boxes)) is not None:
                yield answer
            else:
                continue
            return
        if len(marks) == MAX_MARKS:
            return
        if self._extract == "last_number":
            yield from deque(_LOOSE_NUMBER.findall(text), maxlen=1)
        elif self._extract == "any":
            plain = EMPHASIS.sub(r"\2", text[-SEARCHED_CHARACTERS:]).strip()
            last_sentence = re.split(r"\n|[.!?]\s", plain)[-1]
            unclear = bool(_UNCLEAR.search(last_sentence))
            if not unclear and (statement := _LAST_LINE.fullmatch(last_sentence)):
                plain = statement["value"] or statement["tail"]
            yield from _loose_answers(plain, unclear, algebra)


def _after_thoughts(response: str) -> str:
    """The response after its last closed thought, without control tokens; "" if a thought is not closed."""
    marks = deque(_THOUGHT_MARK.finditer(response), maxlen=1)
    if marks and not marks[0]["end"]:
        return ""
    return _CONTROL.sub("", response[marks[0].end() :] if marks else response)


def _listed_texts(texts: Sequence[str]) -> Iterator[str]:
    """The texts; a JSON list of texts as its elements. ``[1, 2]`` is an interval, not such a list."""
    for text in texts:
        try:
            values = json.loads(text) if text.lstrip().startswith(("[", "{")) else None
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and values:
            raise Unreadable(f"it is an object; name one of its keys, such as {next(iter(values))}")
        if values is not None and any(value is None or value != value for value in values):
            raise Unreadable(f"{text.strip()} has no value")
        yield from values if values and all(isinstance(value, str) for value in values) else [text]


def _answer_of_row(truth: str) -> str:
    """The answer in the row's text: its last box or marked line, or the whole text."""
    marks = list(deque(_MARKS["truth"].finditer(truth), maxlen=MAX_MARKS))
    answer = _marked_answer(truth, marks, len(marks) - 1, alone=True) if marks else None
    text = (truth if answer is None else answer).strip()
    if text.casefold().lstrip("+-") in _NO_TRUTH:
        raise Unreadable(f"{text} is not a value")
    return text


def _marked_answer(text: str, marks: Sequence[re.Match[str]], index: int, alone: bool) -> str | None:
    """The answer in a box, tag or marked line; "" if it is cut off, None for a heading.

    Words on a marked line are an answer only if they end the text and are ``alone``, without a box in the response.
    """
    mark = marks[index]
    if mark.lastgroup != "line":
        return _enclosed(text, marks, index)
    line = text[mark.end() :].split("\n", 1)[0]
    if not text[mark.end() :].strip():
        return ""
    try:
        prose = is_prose(parse_answer(line.strip(" *_")))
    except Unreadable:
        return None
    ends = not text[mark.end() + len(line) :].strip()
    return None if prose and not (alone and ends) else line.strip(" *_")


def _enclosed(text: str, marks: Sequence[re.Match[str]], index: int) -> str:
    r"""The text in a box or tag, joined with those directly before it: ``\boxed{3} and \boxed{4}`` is a list."""
    answers: list[str] = []
    start = len(text)
    for mark in reversed(marks[: index + 1]):
        enclosed = _text_inside(text, mark) if mark.lastgroup == marks[index].lastgroup else None
        if enclosed is None or (
            answers and not (enclosed[1] <= start and _BETWEEN.fullmatch(text, enclosed[1], start))
        ):
            break
        if not re.search(r"\w", tidied(enclosed[0])):
            break  # an empty box at the end has the answer, so it is wrong
        if enclosed[0] not in answers:
            answers.append(enclosed[0])
        start = mark.start()
    return ", ".join(reversed(answers))


def _text_inside(text: str, mark: re.Match[str]) -> tuple[str, int] | None:
    """The text in a box or tag, and the index after its end; None if it is cut off."""
    start = mark.end()
    if mark.lastgroup == "box" and text.startswith("{", start):
        end = closing(text, start)
        return None if end is None else (text[start + 1 : end].strip(), end + 1)
    end_mark = (_TAG_END if mark.lastgroup == "tag" else _BOX_END).search(text, start)
    return None if end_mark is None else (text[start : end_mark.start()].strip(), end_mark.end())


def _stated_answers(text: str, algebra: _Algebra) -> Iterator[str]:
    """Yield the possible readings of the text after "the answer is"; nothing if the response takes it back."""
    text = _BEFORE_ANSWER.sub("", text.replace("**", ""), count=1)
    if _TAKEN_BACK.search(text):
        return
    sentence = _REMARK.sub("", _SENTENCE_END.split(text, maxsplit=1)[0].strip(" *_"))
    yield from _loose_answers(sentence, bool(_UNCLEAR.search(sentence)), algebra)


def _loose_answers(text: str, unclear: bool, algebra: _Algebra) -> Iterator[str]:
    """Yield the text if it is an answer, and the last expression in prose that is not ``unclear``."""
    try:
        answer = parse_answer(text)
    except Unreadable:
        answer = None
    if answer is not None:
        yield answer.text
    if (answer is None or is_prose(answer)) and not unclear:
        yield from algebra.last_expression(text[-SEARCHED_CHARACTERS:])


class _Algebra:
    """Parses expressions with math-verify and compares them with SymPy, until a deadline. Then nothing is equal."""

    def __init__(self, deadline: float) -> None:
        """``deadline``: in terms of ``time.monotonic``."""
        self._deadline = deadline

    def last_expression(self, prose: str) -> list[str]:
        """The last expression in a text, in math-verify's alternative readings."""
        prose = re.sub(rf"({OTHER_SCRIPT}+)", r" \1 ", prose)
        numeric_words = [word for word in re.split(r"[\s$()]+", prose) if re.search(r"\d", word)]
        if numeric_words and CODE.fullmatch(code := numeric_words[-1].rstrip(".,;!?")):
            return [code]
        return [reading for reading in self._parsed(prose) if isinstance(reading, str)]

    def equal(self, truth: str, answer: str) -> bool:
        """True if two expressions have the same value."""
        # The whole text must be LaTeX. Otherwise math-verify takes only the last number of `3 \\to 4`.
        latex = {"extraction_config": [_math_verify().LatexExtractionConfig()], "fallback_mode": "no_fallback"}
        values = [self._parsed(f"${_exact(text)}$", **latex) for text in (truth, answer)]
        if not all(values) or (seconds := self._seconds()) is None:
            return False
        decimals = [re.search(r"\.\d", text) is not None for text in (truth, answer)]
        limited = _math_verify().utils.timeout(timeout_seconds=seconds)(_equal_values)
        try:
            return bool(limited(values[0][0], values[1][0], decimals=decimals, seconds=seconds))
        except (_math_verify().errors.TimeoutException, Exception):  # SymPy may raise anything for odd expressions
            return False

    def _parsed(self, text: str, **options: Any) -> Any:
        seconds = self._seconds()
        return [] if seconds is None else _math_verify().parse(text, parsing_timeout=seconds, **options)

    def _seconds(self) -> int | None:
        """Seconds left, rounded up because SIGALRM takes whole seconds; None after the deadline."""
        remaining_s = self._deadline - time.monotonic()
        return math.ceil(remaining_s) if remaining_s > 0 else None


def _exact(text: str) -> str:
    """Replace decimal numbers by fractions, because math-verify rounds decimals to six places."""
    fraction = "\\frac{{{}}}{{{}}}".format
    text = _NEGATIVE_POWER.sub(r"^{\1}", text)
    return _DECIMAL.sub(lambda decimal: fraction(*Fraction(decimal[0]).as_integer_ratio()), text)


def _equal_values(truth: Any, answer: Any, decimals: Sequence[bool], seconds: int) -> bool:
    """True if two SymPy values are equal; ``decimals``: which were written with a decimal point."""
    sympy = importlib.import_module("sympy")
    if isinstance(truth, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        pairs = zip(truth.flat(), answer.flat(), strict=False)
        return bool(truth.shape == answer.shape and all(_equal_values(*pair, decimals, seconds) for pair in pairs))
    simple = isinstance(truth, sympy.Expr) and isinstance(answer, sympy.Expr)
    is_statement = any(value in (sympy.true, sympy.false) for value in (truth, answer))
    if is_statement or max(_digits(truth), _digits(answer)) > (MAX_DIGITS if simple else MAX_DIGITS_IN_SETS):
        return False
    if isinstance(truth, sympy.Eq) and isinstance(answer, sympy.Eq):
        # math-verify compares solutions, so all equations without a real solution would be equal.
        ratio = sympy.simplify((truth.lhs - truth.rhs) / (answer.lhs - answer.rhs))
        return bool(truth.free_symbols and ratio.is_number and ratio.is_finite and ratio != 0)
    if not simple:
        verify = _math_verify().verify
        return bool(verify(truth, answer, numeric_precision=100, allow_set_relation_comp=True, timeout_seconds=seconds))
    truth, answer = truth.doit(), answer.doit()
    if truth == answer:
        return truth not in (sympy.nan, sympy.zoo)
    if truth.is_Rational and answer.is_Rational:
        fractions = (Fraction(int(value.p), int(value.q)) for value in (truth, answer))
        truth_value, answer_value = map(NumericValue, fractions, decimals)
        return truth_value.equals(answer_value)
    difference = truth - answer
    if difference.free_symbols:
        return bool(truth.equals(answer))
    error = difference.evalf()
    # With a precision of 1, SymPy reports that 100 digits do not distinguish the number from zero.
    if all(size == 0 or size._prec == 1 for size in error.as_real_imag()):
        return True
    rounded = any(decimal and value.is_Rational for value, decimal in zip((truth, answer), decimals, strict=True))
    return bool(rounded and abs(error) <= TOLERANCE * abs(answer.evalf()))


def _digits(value: Any) -> float:
    """An upper bound on the digits of a SymPy value once it is computed, from the logarithms of its parts."""
    if value.is_Rational:
        return math.log10(2) * max(int(value.p).bit_length(), int(value.q).bit_length())
    sizes = [_digits(argument) for argument in value.args] or [1.0]
    if value.is_Pow:
        return math.inf if sizes[1] > 300 else max(sizes[0], 1.0) * 10 ** sizes[1]
    if type(value).__name__ in _GROWING:
        return math.inf if max(sizes) > 300 else max(sizes) * 10 ** max(sizes)
    return sum(sizes)


@cache
def _math_verify() -> Any:
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise TaskError(
            f"the task math needs math-verify: {error}", location="task.use", hint="pip install 'asyncrl[math]'"
        ) from error
