"""Explains errors of the YAML parser: where the mistake is, and how to write it correctly."""

from __future__ import annotations

import re
from typing import NamedTuple

import yaml

_CLOSING = {"[": "]", "{": "}"}
_QUOTE_IT = "put the value in quotes"
_KEY_AND_VALUE = re.compile(r"(- )?([\w./-]+?)\s*(?:=|:|\s)\s*(\S.*)")
_BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")


class Mistake(NamedTuple):
    """A message, a hint, and the line and column of the mistake (from 0; None if the parser named no location)."""

    message: str
    hint: str
    line: int | None = None
    column: int | None = None


def explain_syntax(error: yaml.MarkedYAMLError, text: str) -> Mistake:
    """Explain the parser's error in ``text`` to the author of a spec."""
    at = error.problem_mark or error.context_mark
    problem, context = error.problem or "", error.context or ""
    if at is None:
        return Mistake(f"{context} {problem}".strip(), _QUOTE_IT)
    here, opened = _Spot(text, at), _Spot(text, error.context_mark or at)
    if "\t" in here.indentation or "'\\t'" in problem:
        return here.mistake("a tab in the indentation", "indent with spaces")
    if text[max(at.index - 1, 0) :].startswith("${env:"):
        return here.mistake("`${env:` between brackets needs quotes", 'write "${env:NAME}"')
    if "quoted scalar" in context:
        if "escape" in problem:
            return here.mistake("unknown escape", r"write two backslashes (\\), or put the text in single quotes")
        return opened.mistake("unclosed quote", "add the closing quote")
    if "flow" in context:
        return _bracket(opened, here)
    if "mapping values are not allowed" in problem or "expected <block end>" in problem:
        quote = _open_quote(text, at.index)
        if quote is not None:
            return quote
    if "mapping values are not allowed" in problem:
        return _colon(text, here)
    if "could not find expected ':'" in problem:
        return _no_colon(opened)
    if "expected <block end>" in problem:
        return _after_block(here, problem.rpartition("'")[0].rpartition("'")[2])
    return _first_character(here, opened=opened, problem=problem, context=context)


class _Spot:
    def __init__(self, text: str, mark: yaml.Mark) -> None:
        self.line, self.column, self.index = mark.line, mark.column, mark.index
        self.text = _BREAK.split(text[mark.index - mark.column :], maxsplit=1)[0]
        self.indentation = self.text[: len(self.text) - len(self.text.lstrip())]
        self.character = text[mark.index : mark.index + 1]

    def mistake(self, message: str, hint: str) -> Mistake:
        return Mistake(message, hint=hint, line=self.line, column=self.column)


def _bracket(opened: _Spot, here: _Spot) -> Mistake:
    """The mistake when an entry in brackets is followed by neither a comma nor the closing bracket."""
    bracket = opened.character
    closing = _CLOSING.get(bracket, "]")
    if here.line == opened.line or len(here.indentation) > len(opened.indentation):
        message = f"missing comma or `{closing}`"
        return here.mistake(message, f"separate entries with commas, and close `{bracket}` with `{closing}`")
    return opened.mistake(f"unclosed `{bracket}`", f"add `{closing}` after its last entry")


def _open_quote(text: str, index: int) -> Mistake | None:
    """The mistake when a quote before ``index`` was closed only in a later line, by another text's opening quote."""
    last: yaml.ScalarToken | None = None
    try:
        for token in yaml.scan(text[:index], Loader=yaml.SafeLoader):
            if isinstance(token, yaml.ScalarToken):
                last = token
    except yaml.YAMLError:
        pass  # The text is known to be wrong. Only the last token before the mistake matters.
    if last is None or text[last.start_mark.index] not in ("'", '"') or last.start_mark.line == last.end_mark.line:
        return None
    message, start = f"unclosed quote: the next one is on line {last.end_mark.line + 1}", last.start_mark
    return Mistake(message, hint="add the closing quote on this line", line=start.line, column=start.column)


def _colon(text: str, here: _Spot) -> Mistake:
    """An invalid colon: a second one in a line, or one in a line that continues the value above it."""
    first = re.match(r"\s*(?:- )*([^\s:#][^:]*):\s+", here.text)
    if first is not None and first.end() <= here.column:
        key, value = first[1].strip("\"'"), here.text[first.end() :].strip()
        quote = "'" if '"' in value else '"'
        hint = f"write `{key}: {{{value}}}` for a section, or `{key}: {quote}{value}{quote}` for a text"
        return here.mistake("second colon in one line", hint if len(hint) < 200 else _QUOTE_IT)
    above = _BREAK.split(text[: here.index - here.column])[:-1]
    for number in range(len(above) - 1, -1, -1):
        line = above[number].strip()
        if line and not line.startswith("#"):
            if not re.search(r":(\s|$)", line):
                start = len(above[number]) - len(above[number].lstrip())
                return Mistake(*_no_value(line), number, start)
            break
    hint = "indent it like the other keys of its section"
    return Mistake("line is indented more than the keys above", hint=hint, line=here.line, column=len(here.indentation))


def _no_colon(key: _Spot) -> Mistake:
    line = key.text[key.column :].strip()
    if len(line) > 1000:
        return key.mistake("key of more than 1,000 characters", "shorten it")
    return key.mistake(*_no_value(line))


def _no_value(line: str) -> tuple[str, str]:
    """Message and hint for a line such as `seed 0`, `engines=1` or `seed:0`."""
    parts = _KEY_AND_VALUE.fullmatch(line)
    hint = f"write `{parts[1] or ''}{parts[2]}: {parts[3]}`" if parts and len(line) < 60 else "write `key: value`"
    shown = line if len(line) < 60 else f"{line[:59]}…"
    return f"`{shown}` is not a key, a colon, a space and a value", hint


def _after_block(here: _Spot, found: str) -> Mistake:
    if found in ("<block mapping start>", "<block sequence start>", "?"):
        message = "indentation matches none of the sections above"
        return here.mistake(message, "indent it like the other keys of its section")
    if found == "-":
        return here.mistake("list entry among keys", "put it under a separate key, and indent it")
    if found in ("]", "}", ","):
        return here.mistake(f"`{found}` without an opening bracket", "remove it, or put the value in quotes")
    if found == ":":
        return here.mistake("missing key before the colon", "write the key before it")
    hint = "put the whole value in one pair of quotes; in single quotes, write '' for an apostrophe"
    return here.mistake("text after the end of the value", hint)


def _first_character(here: _Spot, opened: _Spot, problem: str, context: str) -> Mistake:
    if "found undefined alias" in problem:
        name = problem.rpartition("'")[0].rpartition("'")[2]
        return here.mistake(f"`*{name}` has no anchor `&{name}` above it", "if it is text, put it in quotes")
    if "duplicate anchor" in context:
        return here.mistake(f"duplicate anchor, first on line {opened.line + 1}", "use another name")
    if "sequence entries are not allowed" in problem:
        hint = "write the list as `[a, b]`, or start each `- entry` on a separate line"
        return here.mistake("a list cannot start on the line of its key", hint)
    if "block scalar" in context:
        hint = f"start the text on the next line, or put the value in quotes if `{opened.character}` belongs to it"
        return opened.mistake(f"text after `{opened.character}`", hint)
    if "single document" in context:
        return here.mistake("second YAML document", "a spec is one document: remove the `---`")
    if "document start" in problem or "directive" in context + problem or "YAML document" in problem:
        hint = "remove lines that start with `%`, `---` or `...`"
        return here.mistake("text outside the document", hint)
    spot = opened if "scanning" in context and "token" not in context else here
    return spot.mistake(f"a value cannot start with `{spot.character}`", _QUOTE_IT)
