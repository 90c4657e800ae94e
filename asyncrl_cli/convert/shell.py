"""Parses the part of bash that scripts which start a trainer use. ``script.py`` evaluates the result.

Each character is read a bounded number of times, and brackets are nested at most ``MAX_DEPTH`` deep.
"""

from __future__ import annotations

import re
from bisect import bisect
from dataclasses import dataclass, field
from typing import Literal

MAX_DEPTH = 40
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_REDIRECT = re.compile(r"(?:\d*(?:<<<|<<-?|<>|>>|>\||[<>]&?)|&>>?)[ \t]*")
_LITERAL = re.compile(r"[^\s'\"\\$`|;&<>()]+")
_QUOTED = re.compile(r"[^\"\\$`]+")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()\n]")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BRACES = re.compile(r"\{[^{}]*\}")
_CLOSES = {"$(": ")", "${": "}", "(": ")", '"': '"', "`": "`"}


class ShellSyntaxError(Exception):
    """A text that bash would not read, or that is nested too deeply. ``line``: its line, from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Expansion:
    """`$NAME`, `${…}`, `$(…)` or `$((…))`. ``text``: as written. ``body``: without the brackets."""

    kind: Literal["parameter", "command", "sum", "braces"]
    body: str
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Word:
    """A word before its expansion. ``array``: the words of `name=(…)`."""

    raw: str
    line: int
    pieces: tuple[str | Expansion, ...]
    array: tuple[Word, ...] | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command with its assignments. Redirections and here documents are dropped."""

    line: int
    words: list[Word]


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands with the operator before each: `&&`, `||` or `|`. The first command has none, or `!`."""

    nodes: list[tuple[str, Node]]


@dataclass(frozen=True, slots=True)
class Branches:
    """`if` with its `elif` and `else`, which has an empty test."""

    line: int
    branches: list[tuple[list[Node], list[Node]]]


@dataclass(frozen=True, slots=True)
class Cases:
    """`case`, with the patterns of each branch."""

    line: int
    subject: Word
    branches: list[tuple[list[Word], list[Node]]]


@dataclass(frozen=True, slots=True)
class Loop:
    """`for` with its variable and words, or `while`, `until` and `select` without."""

    line: int
    variable: str
    words: list[Word]
    body: list[Node]


@dataclass(frozen=True, slots=True)
class Group:
    """`{ …; }` or `( … )`, which has its own variables; with a ``name``, the definition of a function."""

    body: list[Node]
    subshell: bool = False
    name: str = ""


Node = Command | Chain | Branches | Cases | Loop | Group


@dataclass(slots=True)
class Parser:
    """Reads ``text``. ``first_line``: the line of its first character."""

    text: str
    first_line: int = 1
    depth: int = 0
    _at: int = 0
    _here: list[str] = field(default_factory=list)
    _breaks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._breaks = [found.start() for found in re.finditer("\n", self.text)]

    def script(self) -> list[Node]:
        """Return the commands of the text. Raises ``ShellSyntaxError``."""
        nodes = self._commands(())
        if self._at < len(self.text):
            raise self._error(f"unexpected `{self.text[self._at]}`")
        return nodes

    def pieces(self, *, quoted: bool) -> tuple[str | Expansion, ...]:
        """Return the pieces of the entire text: inside double quotes, or outside, where blanks stay, too."""
        found: list[str | Expansion] = []
        while self._at < len(self.text):
            if not quoted and (space := re.compile(r"[\s|;&<>()]+").match(self.text, self._at)):
                self._at = space.end()
                found.append(space[0])
            elif quoted and self.text[self._at] == '"':
                self._at += 1
            else:
                found += self._piece(quoted)
        return tuple(found)

    def _line(self) -> int:
        return self.first_line + bisect(self._breaks, self._at - 1)

    def _error(self, message: str) -> ShellSyntaxError:
        return ShellSyntaxError(message, self._line())

    def _skip(self) -> None:
        while True:
            if blank := _BLANK.match(self.text, self._at):
                self._at = blank.end()
            elif self.text.startswith("#", self._at):
                end = self.text.find("\n", self._at)
                self._at = len(self.text) if end < 0 else end
            else:
                return

    def _operator(self) -> str:
        """The operator at the current position, or nothing. Also reads past here documents."""
        self._skip()
        operator = _OPERATOR.match(self.text, self._at)
        return operator[0] if operator and not _REDIRECT.match(self.text, self._at) else ""

    def _take(self, text: str) -> None:
        self._at += len(text)
        while text == "\n" and self._here:
            end = re.compile(rf"^\t*{re.escape(self._here.pop(0))}(?:\n|\Z)", re.MULTILINE).search(self.text, self._at)
            self._at = end.end() if end else len(self.text)

    def _newlines(self) -> None:
        while self._operator() == "\n":
            self._take("\n")

    def _commands(self, ends: tuple[str, ...]) -> list[Node]:
        """The commands up to one of the words or operators ``ends``, which is not read."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"blocks are nested more than {MAX_DEPTH} deep")
        nodes: list[Node] = []
        while True:
            while (operator := self._operator()) in ("\n", ";", "&"):
                self._take(operator)
            if self._at >= len(self.text) or operator in ends or self._keyword() in ends:
                break
            if operator and operator != "(":
                if not ends:
                    raise self._error(f"unexpected `{operator}`")
                break
            nodes.append(self._chain())
        self.depth -= 1
        return nodes

    def _chain(self) -> Node:
        negated = self._keyword() == "!"
        if negated:
            self._expect("!")
        chain = [("!" if negated else "", self._node())]
        while (operator := self._operator()) in ("&&", "||", "|", "|&"):
            self._take(operator)
            self._newlines()
            chain.append((operator.removesuffix("&") if operator == "|&" else operator, self._node()))
        return chain[0][1] if len(chain) == 1 and not negated else Chain(chain)

    def _keyword(self) -> str:
        """The unquoted word at the current position."""
        self._skip()
        found = re.compile(r"(?:\[\[|\(\(|[{}!]|[a-z]+)(?=[\s;&|()]|\Z)|\(\(").match(self.text, self._at)
        return found[0] if found else ""

    def _expect(self, word: str) -> None:
        self._newlines()
        if self._operator() == ";":
            self._take(";")
            self._newlines()
        if not self.text.startswith(word, self._at):
            raise self._error(f"`{word}` is missing")
        self._at += len(word)

    def _node(self) -> Node:
        line, keyword = self._line(), self._keyword()
        if keyword == "((":
            return self._command(line)
        if self._operator() == "(":
            self._take("(")
            group = Group(self._commands((")",)), subshell=True)
            self._expect(")")
            return self._redirected(group)
        if keyword == "{":
            self._at += 1
            group = Group(self._commands(("}",)))
            self._expect("}")
            return self._redirected(group)
        if keyword in ("if", "case", "for", "while", "until", "select"):
            self._at += len(keyword)
            if keyword in ("if", "case"):
                return self._redirected(self._if(line) if keyword == "if" else self._case(line))
            return self._redirected(self._loop(line, keyword))
        if keyword == "function":
            self._at += len(keyword)
        return self._command(line, function=keyword == "function")

    def _redirected(self, node: Node) -> Node:
        while self._redirect():
            pass
        return node

    def _if(self, line: int) -> Node:
        branches = []
        while True:
            test = self._commands(("then",))
            self._expect("then")
            branches.append((test, self._commands(("elif", "else", "fi"))))
            if self._keyword() != "elif":
                break
            self._at += len("elif")
        if self._keyword() == "else":
            self._at += len("else")
            branches.append(([], self._commands(("fi",))))
        self._expect("fi")
        return Branches(line, branches)

    def _case(self, line: int) -> Node:
        subject = self._word()
        self._expect("in")
        branches: list[tuple[list[Word], list[Node]]] = []
        self._newlines()
        while self._keyword() != "esac":
            if self._operator() == "(":
                self._take("(")
            patterns = [self._word()]
            while self._operator() == "|":
                self._take("|")
                patterns.append(self._word())
            self._expect(")")
            branches.append((patterns, self._commands((";;", ";&", ";;&", "esac"))))
            if self._operator().startswith(";"):
                self._take(self._operator())
            self._newlines()
        self._expect("esac")
        return Cases(line, subject, branches)

    def _loop(self, line: int, keyword: str) -> Node:
        variable, words = "", list[Word]()
        if keyword in ("for", "select"):
            if self._keyword() == "((":
                self._at = self._end(self._at + 1, "(")
            else:
                variable = self._word().raw
                self._newlines()
                if self._keyword() == "in":
                    self._at += len("in")
                    while not self._operator() and self._at < len(self.text):
                        words.append(self._word())
        else:
            self._commands(("do",))
        self._expect("do")
        body = self._commands(("done",))
        self._expect("done")
        return Loop(line, variable if keyword == "for" else "", words, body)

    def _command(self, line: int, *, function: bool = False) -> Node:
        words: list[Word] = []
        in_test = False
        while True:
            operator = self._operator()
            if self._at >= len(self.text):
                break
            if self.text.startswith("((", self._at) and not words:
                start, self._at = self._at, self._end(self._at + 1, "(")
                raw = self.text[start : self._at]
                return Command(line, [Word(raw, line, pieces=(raw,))])
            if operator and in_test and operator != "\n":
                self._at += len(operator)
                words.append(Word(operator, line, pieces=(operator,)))
                continue
            if (operator == "(" and len(words) == 1) or (operator == "\n" and function):
                if operator == "(":
                    self._take("(")
                    self._expect(")")
                self._newlines()
                body = self._node()
                return Group([body], name=words[0].raw)
            if operator or (function and len(words) == 1 and self._keyword() == "{"):
                if operator or not words:
                    break
                return Group([self._node()], name=words[0].raw)
            if not in_test and self._redirect():
                continue
            words.append(self._word())
            in_test = words[0].raw == "[[" and words[-1].raw != "]]"
        if not words and self._operator():
            return Command(line, [])
        return Command(line, words)

    def _redirect(self) -> bool:
        """Read past a redirection. The text of a here document follows the next line break."""
        self._skip()
        redirect = _REDIRECT.match(self.text, self._at)
        if not redirect:
            return False
        if self.text[redirect.end() : redirect.end() + 1] == "(":  # process substitution
            self._at = self._end(redirect.end() + 1, "(")
            return True
        self._at = redirect.end()
        target = self._word()
        operator = redirect[0].strip()
        if operator.lstrip("0123456789") in ("<<", "<<-"):
            self._here.append(re.sub(r"['\"\\]", "", target.raw))
        return True

    def _word(self) -> Word:
        self._skip()
        start, line = self._at, self._line()
        pieces: list[str | Expansion] = []
        while self._at < len(self.text) and self.text[self._at] not in " \t\n|;&<>()":
            if self.text.startswith("\\\n", self._at):
                self._at += 2
                if self._at >= len(self.text) or self.text[self._at] in " \t\n":
                    break
                continue
            pieces += self._piece(False)
            raw = self.text[start : self._at]
            if self.text.startswith("(", self._at) and ASSIGNMENT.fullmatch(raw):
                self._at += 1
                return Word(raw, line, pieces=(raw,), array=tuple(self._array()))
        if self._at == start:
            unexpected = self.text[self._at : self._at + 1].strip() or "end of the line"
            raise self._error(f"unexpected {unexpected if len(unexpected) > 1 else f'`{unexpected}`'}")
        return Word(self.text[start : self._at], line, pieces=tuple(pieces))

    def _array(self) -> list[Word]:
        words: list[Word] = []
        while True:
            self._newlines()
            if self._operator() == ")":
                self._at += 1
                return words
            words.append(self._word())

    def _piece(self, quoted: bool) -> list[str | Expansion]:
        """The pieces that begin at the current character."""
        text, at = self.text, self._at
        character = text[at]
        if literal := (_QUOTED if quoted else _LITERAL).match(text, at):
            self._at = literal.end()
            if not quoted and any("," in braces or ".." in braces for braces in _BRACES.findall(literal[0])):
                return [Expansion("braces", literal[0], text=literal[0], quoted=True)]
            return [literal[0]]
        if character == "\\":
            self._at += 2
            escaped = text[at + 1 : at + 2]
            if escaped == "\n":
                return []
            return [escaped if not quoted or escaped in '$`"\\' else f"\\{escaped}"]
        if character == "'" or (text.startswith("$'", at) and not quoted):
            end = text.find("'", at + (2 if character == "$" else 1))
            if end < 0:
                raise self._error("unclosed quote")
            self._at = end + 1
            return [text[at + 1 : end].removeprefix("'")]
        if character == '"':
            self._at = self._end(at + 1, '"')
            inner = Parser(text[at + 1 : self._at - 1], self.first_line + bisect(self._breaks, at))
            return list(inner.pieces(quoted=True)) or [""]
        if character == "`" or text.startswith(("$(", "${"), at):
            opening = "`" if character == "`" else text[at : at + 2]
            self._at = self._end(at + len(opening), opening)
            whole = text[at : self._at]
            body = whole[len(opening) : -1]
            kind: Literal["parameter", "command", "sum"] = "parameter" if opening == "${" else "command"
            if opening == "$(" and body.startswith("(") and body.endswith(")"):
                kind, body = "sum", body[1:-1]
            return [Expansion(kind, body, text=whole, quoted=quoted)]
        if character == "$" and (name := _NAME.match(text, at + 1)):
            self._at = name.end()
            return [Expansion("parameter", name[0], text=text[at : self._at], quoted=quoted)]
        self._at += 1
        return [character]

    def _end(self, at: int, opening: str) -> int:
        """The position after the bracket or quote that closes ``opening``, whose content begins at ``at``."""
        text, stack = self.text, [_CLOSES[opening]]
        while at < len(text):
            character, step = text[at], 1
            in_quotes = next((closing for closing in reversed(stack) if closing in '")'), "") == '"'
            if character == "\\":
                step = 2
            elif character == stack[-1]:
                stack.pop()
                if not stack:
                    return at + 1
            elif character == "'" and not in_quotes:
                end = text.find("'", at + 1)
                step = (end if end >= 0 else len(text)) + 1 - at
            elif text.startswith(("$(", "${"), at):
                stack.append(_CLOSES[text[at : at + 2]])
                step = 2
            elif character in '"`' or (character == "(" and stack[-1] == ")"):
                stack.append(_CLOSES[character])
            if len(stack) > MAX_DEPTH:
                raise self._error(f"brackets are nested more than {MAX_DEPTH} deep")
            at += step
        raise self._error("unclosed quote or bracket")
