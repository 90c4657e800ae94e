"""Parses the part of bash that scripts which start a trainer use. ``script.py`` evaluates the result.

Brackets and blocks are nested at most ``MAX_DEPTH`` deep, which also bounds how often a character is read.
"""

from __future__ import annotations

import re
from bisect import bisect
from typing import Literal, NamedTuple

MAX_DEPTH = 40
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BLANK = re.compile(r"(?:[ \t]|\\\n|(?<![^\s;&|()])\#[^\n]*)+")
_REDIRECT = re.compile(r"(?:\d*(?:<<<|<<-?|<>|>>|>\||[<>]&?)|&>>?)[ \t]*")
_LITERAL = re.compile(r"[^\s'\"\\$`|;&<>()]+")
_QUOTED = re.compile(r"[^\"\\$`]+")
_SEPARATORS = re.compile(r"[ \t\n|;&<>()]+")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()\n]")
_KEYWORD = re.compile(r"(?:\[\[|[{}!]|[a-z]+)(?=[\s;&|()]|\Z)|\(\(")
_BRACES = re.compile(r"\{[^{}]*\}")
_CLOSES = {"$(": ")", "${": "}", "(": ")", '"': '"', "`": "`"}


class ShellSyntaxError(Exception):
    """A text that bash would not read, or that is nested too deeply. ``line``: its line, from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class Expansion(NamedTuple):
    """`$NAME`, `${…}`, `$(…)`, `$((…))` or `{…,…}`. ``text``: as in the script. ``body``: without the brackets."""

    form: Literal["parameter", "command", "sum", "braces"]
    body: str
    text: str
    is_quoted: bool


Segments = tuple[str | Expansion, ...]


class Word(NamedTuple):
    """A word before its expansion. ``array``: the words of `name=(…)`."""

    raw: str
    line: int
    segments: Segments
    array: list[Word] | None = None


class Command(NamedTuple):
    """A simple command with its assignments, without redirections and here documents."""

    line: int
    words: list[Word]


class Chain(NamedTuple):
    """Commands with the operator before each: `&&`, `||` or `|`. The first command has none, or `!`."""

    nodes: list[tuple[str, Node]]


class Branches(NamedTuple):
    """`if` with its `elif` and `else`, which has an empty test."""

    line: int
    branches: list[tuple[list[Node], list[Node]]]


class Cases(NamedTuple):
    """`case`, with the patterns of each branch."""

    line: int
    subject: Word
    branches: list[tuple[list[Word], list[Node]]]


class Loop(NamedTuple):
    """`for` with its variable and words, or a loop without: `while`, `until`."""

    line: int
    variable: str
    words: list[Word]
    body: list[Node]


class Group(NamedTuple):
    """`{ …; }` or `( … )`, which has its own variables; with a ``name``, the definition of a function."""

    body: list[Node]
    is_subshell: bool = False
    name: str = ""


Node = Command | Chain | Branches | Cases | Loop | Group


class Parser:
    """Reads ``text``, whose first character is in the line ``line``. Raises ``ShellSyntaxError``."""

    def __init__(self, text: str, line: int = 1) -> None:
        self._text = text
        self._first_line = line
        self._breaks = [line_break.start() for line_break in re.finditer("\n", text)]
        self._position = 0
        self._depth = 0
        self._documents: list[str] = []  # ends of the here documents that follow the next line break

    def script(self) -> list[Node]:
        """Return the commands of the text."""
        nodes = self._commands()
        if self._position < len(self._text):
            raise self._error(f"unexpected `{self._text[self._position]}`")
        return nodes

    def segments(self, *, is_quoted: bool) -> Segments:
        """Return the segments of the text within double quotes, or outside, where separators stay, too."""
        segments: list[str | Expansion] = []
        while self._position < len(self._text):
            if not is_quoted and (separators := _SEPARATORS.match(self._text, self._position)):
                self._position = separators.end()
                segments.append(separators[0])
            elif not (is_quoted and self._accept('"')):
                segments += self._segment(is_quoted)
        return tuple(segments)

    def _line(self) -> int:
        return self._first_line + bisect(self._breaks, self._position - 1)

    def _error(self, message: str) -> ShellSyntaxError:
        return ShellSyntaxError(message, self._line())

    def _skip(self) -> None:
        if blank := _BLANK.match(self._text, self._position):
            self._position = blank.end()

    def _accept(self, text: str) -> bool:
        """Read the text if it is next. After a line break, also read its here documents."""
        if not self._text.startswith(text, self._position):
            return False
        self._position += len(text)
        while text == "\n" and self._documents:
            end = re.compile(rf"^\t*{re.escape(self._documents.pop(0))}(?:\n|\Z)", re.MULTILINE)
            document = end.search(self._text, self._position)
            self._position = document.end() if document else len(self._text)
        return True

    def _operator(self) -> str:
        self._skip()
        operator = _OPERATOR.match(self._text, self._position)
        return operator[0] if operator and not _REDIRECT.match(self._text, self._position) else ""

    def _keyword(self) -> str:
        self._skip()
        keyword = _KEYWORD.match(self._text, self._position)
        return keyword[0] if keyword else ""

    def _newlines(self) -> None:
        while self._operator() == "\n":
            self._accept("\n")

    def _expect(self, word: str) -> None:
        self._newlines()
        if word != ")" and self._operator() == ";":
            self._accept(";")
            self._newlines()
        if not self._accept(word):
            raise self._error(f"`{word}` is missing")

    def _commands(self, *ends: str) -> list[Node]:
        """The commands up to one of the words or operators ``ends``, which is not read."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"blocks are nested more than {MAX_DEPTH} deep")
        nodes: list[Node] = []
        while True:
            while (operator := self._operator()) in ("\n", ";", "&"):
                self._accept(operator)
            if self._position >= len(self._text) or operator in ends or self._keyword() in ends:
                break
            if operator not in ("", "("):
                raise self._error(f"unexpected `{operator}`")
            nodes.append(self._chain())
        self._depth -= 1
        return nodes

    def _block(self, end: str) -> list[Node]:
        nodes = self._commands(end)
        self._expect(end)
        return nodes

    def _chain(self) -> Node:
        is_negated = self._keyword() == "!" and self._accept("!")
        nodes = [("!" if is_negated else "", self._node())]
        while (operator := self._operator()) in ("&&", "||", "|", "|&"):
            self._accept(operator)
            self._newlines()
            nodes.append((operator.replace("|&", "|"), self._node()))
        return nodes[0][1] if len(nodes) == 1 and not is_negated else Chain(nodes)

    def _node(self) -> Node:
        keyword, line = self._keyword(), self._line()
        node: Node
        if keyword != "((" and self._operator() == "(":
            self._accept("(")
            node = Group(self._block(")"), is_subshell=True)
        elif keyword == "{":
            self._accept(keyword)
            node = Group(self._block("}"))
        elif keyword in ("if", "case", "for", "while", "until"):
            self._accept(keyword)
            node = self._if(line) if keyword == "if" else self._case(line) if keyword == "case" else self._loop(keyword)
        else:
            return self._command()
        while self._redirect():
            pass
        return node

    def _if(self, line: int) -> Node:
        branches = []
        keyword = "elif"
        while keyword == "elif":
            branches.append((self._block("then"), self._commands("elif", "else", "fi")))
            keyword = self._keyword()
            self._expect(keyword or "fi")
        if keyword == "else":
            branches.append(([], self._block("fi")))
        return Branches(line, branches)

    def _case(self, line: int) -> Node:
        subject = self._word()
        self._expect("in")
        branches: list[tuple[list[Word], list[Node]]] = []
        self._newlines()
        while self._keyword() != "esac":
            self._accept("(")
            patterns = [self._word()]
            while self._operator() == "|" and self._accept("|"):
                patterns.append(self._word())
            self._expect(")")
            branches.append((patterns, self._commands(";;", ";&", ";;&", "esac")))
            self._accept(self._operator())
            self._newlines()
        self._expect("esac")
        return Cases(line, subject, branches)

    def _loop(self, keyword: str) -> Node:
        line, variable, words = self._line(), "", list[Word]()
        if keyword == "for" and self._keyword() == "((":
            self._position = self._end(self._position + 1, "(")
        elif keyword == "for":
            variable = self._word().raw
            self._newlines()
            if self._keyword() == "in" and self._accept("in"):
                while not self._operator() and self._position < len(self._text):
                    words.append(self._word())
        else:
            self._commands("do")
        self._expect("do")
        return Loop(line, variable, words, self._block("done"))

    def _command(self) -> Node:
        is_function = self._keyword() == "function" and self._accept("function")
        words: list[Word] = []
        self._skip()
        line, start = self._line(), self._position
        if self._text.startswith("((", start):
            self._position = self._end(start + 1, "(")
            raw = self._text[start : self._position]
            return Command(line, [Word(raw, line, segments=(raw,))])
        while self._position < len(self._text):
            operator, in_test = self._operator(), bool(words) and words[0].raw == "[[" and words[-1].raw != "]]"
            if in_test and operator not in ("", "\n"):
                self._accept(operator)
                words.append(Word(operator, line, segments=(operator,)))
            elif len(words) == 1 and (operator == "(" or is_function):
                if self._accept("("):
                    self._expect(")")
                self._newlines()
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    raise self._error(f"blocks are nested more than {MAX_DEPTH} deep")
                body = self._node()
                self._depth -= 1
                return Group([body], name=words[0].raw)
            elif operator or self._position >= len(self._text):
                break
            elif in_test or not self._redirect():
                words.append(self._word())
        return Command(line, words)

    def _redirect(self) -> bool:
        """Read a redirection, if it is next."""
        self._skip()
        redirect = _REDIRECT.match(self._text, self._position)
        if not redirect:
            return False
        self._position = redirect.end()
        if self._accept("("):  # process substitution
            self._position = self._end(self._position, "(")
            return True
        target = self._word().raw
        if redirect[0].strip(" \t0123456789") in ("<<", "<<-"):
            self._documents.append(re.sub(r"['\"\\]", "", target))
        return True

    def _word(self) -> Word:
        self._skip()
        start, line = self._position, self._line()
        segments: list[str | Expansion] = []
        while self._position < len(self._text) and not _SEPARATORS.match(self._text, self._position):
            segments += self._segment(is_quoted=False)
            raw = self._text[start : self._position]
            if ASSIGNMENT.fullmatch(raw) and self._accept("("):
                array = []
                self._newlines()
                while self._operator() != ")":
                    array.append(self._word())
                    self._newlines()
                self._accept(")")
                return Word(raw, line, (raw,), array)
        if self._position == start:
            raise self._error(f"unexpected `{self._text[start : start + 1].strip() or 'end of the line'}`")
        return Word(self._text[start : self._position], line, tuple(segments))

    def _segment(self, is_quoted: bool) -> Segments:
        """The segments that begin at the current character."""
        text, start = self._text, self._position
        if literal := (_QUOTED if is_quoted else _LITERAL).match(text, start):
            self._position = literal.end()
            is_list = any("," in braces or ".." in braces for braces in _BRACES.findall(literal[0]))
            return (Expansion("braces", "", literal[0], True) if is_list and not is_quoted else literal[0],)
        if self._accept("\\"):
            escaped = text[start + 1 : start + 2]
            self._position += 1
            return () if escaped == "\n" else (escaped if not is_quoted or escaped in '$`"\\' else f"\\{escaped}",)
        if not is_quoted and (self._accept("'") or self._accept("$'")):
            content_start = self._position
            self._position = text.find("'", content_start) + 1
            if not self._position:
                self._position = start
                raise self._error("unclosed quote")
            return (text[content_start : self._position - 1],)
        if self._accept('"'):
            line = self._line()
            self._position = self._end(start + 1, '"')
            return Parser(text[start + 1 : self._position - 1], line).segments(is_quoted=True) or ("",)
        opening = "`" if text.startswith("`", start) else text[start : start + 2]
        if opening in ("`", "$(", "${"):
            self._position = self._end(start + len(opening), opening)
            expansion = text[start : self._position]
            body = expansion[len(opening) : -1]
            if opening == "$(" and body.startswith("(") and body.endswith(")"):
                return (Expansion("sum", body[1:-1], expansion, is_quoted),)
            return (Expansion("parameter" if opening == "${" else "command", body, expansion, is_quoted),)
        name = _NAME.match(text, start + 1) if text[start] == "$" else None
        self._position = name.end() if name else start + 1
        return (Expansion("parameter", name[0], text[start : name.end()], is_quoted) if name else text[start],)

    def _end(self, position: int, opening: str) -> int:
        """The position after the bracket or quote that closes ``opening``, whose content begins at ``position``."""
        text, stack = self._text, [_CLOSES[opening]]
        while position < len(text):
            character, step = text[position], 1
            in_quotes = next((closing for closing in reversed(stack) if closing in '")'), "") == '"'
            if character == "\\":
                step = 2
            elif character == stack[-1]:
                stack.pop()
                if not stack:
                    return position + 1
            elif character == "'" and not in_quotes:
                closing_quote = text.find("'", position + 1)
                step = (closing_quote if closing_quote >= 0 else len(text)) + 1 - position
            elif text.startswith(("$(", "${"), position):
                stack.append(_CLOSES[text[position : position + 2]])
                step = 2
            elif character in '"`' or (character == "(" and stack[-1] == ")"):
                stack.append(_CLOSES[character])
            if len(stack) > MAX_DEPTH:
                raise self._error(f"brackets are nested more than {MAX_DEPTH} deep")
            position += step
        raise self._error("unclosed quote or bracket")
