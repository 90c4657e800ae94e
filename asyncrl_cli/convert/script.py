"""Finds the command in a shell script that starts a trainer.

The script is read, not run. Assignments, arrays, defaults (`${X:-1}`) and sums (`$((8 * 1024))`) are followed.
Everything else is unknown, such as the output of a command, or a variable that is set under a condition. A command that
needs an unknown value is refused, with its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl_cli.core.errors import ConfigError

_NESTED = r"\([^()]*(?:\((?:[^()]|\([^()]*\))*\)[^()]*)*\)"
_VALUE = rf"""
    (?P<sum>\$\({_NESTED}\)) | (?P<output>\${_NESTED}|`[^`]*`)
    | \$\{{(?P<braced>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}} | \$(?P<plain>[A-Za-z_]\w*|[0-9@*#?$!-])
"""
_IN_QUOTES = re.compile(rf"{_VALUE} | \\(?P<escaped>[$`\"\\])", re.VERBOSE)
_TOKEN = re.compile(
    rf"""
    (?P<continued>\\\n) | (?P<end>\n) | (?P<space>[ \t]+) | (?P<comment>(?<!\S)\#[^\n]*)
    | (?P<redirect>(?<!\S)\d*[<>]+(?:&\d?)?|&>+|[<>]+(?:&\d?)?) | (?P<operator>&&|\|\||;;|[;&|])
    | '(?P<single>[^']*)' | "(?P<double>(?:\\.|{_NESTED.replace("()", '()"')}|[^"\\])*)" | \\(?P<escaped>.)
    | {_VALUE} | (?P<bracket>[()]) | (?P<text>[^\s'"\\$`|;&<>()]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1(.*?)\n\s*\2(?=\n|$)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+)(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_OPENS, _CLOSES = {"if", "for", "while", "until", "case", "select", "{"}, {"fi", "done", "esac", "}"}
_KEYWORDS = {*_OPENS, "then", "else", "elif", "do", "!", "export", "readonly", "declare", "local", "exec", "nohup"}
_UNKNOWN = "\0"
"""Encloses the reason in an unknown value."""


def trainer_command(
    path: str, further: Sequence[str], *, is_argument: Callable[[str], bool], launched: Callable[[Sequence[str]], int]
) -> list[str]:
    """Return the words of the script's command that starts a program with such arguments, and the ``further`` words.

    ``launched`` gives the number of words up to a command's program. Raises ``ConfigError`` unless there is exactly one
    such command and all its words are known, or replaced by further arguments.
    """
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        message = f"the script cannot be read: {getattr(error, 'strerror', None) or str(error)}"
        raise ConfigError(message, location=path, hint="name a file that exists") from None
    script = _Script(_HERE_DOCUMENT.sub(lambda found: "\n" * found[0].count("\n"), text))
    found = [
        (line, words)
        for line, words in script.commands()
        if any(map(is_argument, words[launched(words) or len(words) :]))
    ]
    paste = "paste the command, as the shell runs it, in place of the script"
    if len(found) != 1:
        lines = f" (lines {', '.join(str(line) for line, _ in found)})" if found else ""
        message = f"the script has {len(found) or 'no'} commands with arguments of the trainer{lines}"
        raise ConfigError(message, location=path, hint=paste)
    ((line, words),) = found
    replaced = {argument.partition("=")[0] for argument in further}
    for word in words[launched(words) :]:
        name, _, _ = word.partition("=")
        if _UNKNOWN in word and name not in replaced:
            before, reason, _ = word.split(_UNKNOWN, 2)
            message = f"`{before}…` is not known without running the script: {reason}"
            raise ConfigError(message, location=f"{path}:{line}", hint=f"add `{name}=VALUE` after the script")
    return [*(word for word in words if _UNKNOWN not in word), *further]


class _Script:
    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[str, list[str]] = {}
        self._line = 1
        self._depth = 0  # nesting of blocks that may run never or several times
        self._conditional = False  # after && and ||
        self._words: list[str] = []
        self._is_open = False  # the last word continues

    def commands(self) -> Iterator[tuple[int, list[str]]]:
        array = ""  # the assignment to an array, while its values are being read
        for token in _TOKEN.finditer(self._text):
            kind, value = token.lastgroup or "", token[0]
            if array and kind in ("bracket", "end", "comment"):
                self._is_open = False
                if value == ")":
                    self._assign(array, self._words)
                    array, self._words = "", []
            elif value == "(" and self._is_open and re.fullmatch(r"\w+\+?=", self._words[-1]):
                array, self._words, self._is_open = self._words[-1], [], False
            elif kind in ("end", "operator", "bracket", "redirect"):
                yield from self._command()
                self._conditional = value in ("&&", "||")
                if kind == "redirect":
                    self._words, self._is_open = ["true"], False  # ignore the file or arguments that follow
            elif kind in ("space", "continued", "comment"):
                self._is_open = False
            elif kind in ("single", "escaped", "text"):
                self._add([token[kind]])
            elif kind == "double":
                self._quoted(token["double"])
            else:
                values = self._value(token)
                if self._is_open and all(word in _KEYWORDS or _ASSIGNMENT.fullmatch(word) for word in self._words):
                    values = [" ".join(values)]  # the shell does not split the value of an assignment
                else:
                    values = [part for one in values for part in ([one] if _UNKNOWN in one else one.split())]
                self._add(values, split=True)
            self._line += value.count("\n")
        yield from self._command()

    def _quoted(self, text: str) -> None:
        whole = _IN_QUOTES.fullmatch(text)
        if whole and whole["braced"] and whole["braced"].endswith("[@]"):
            self._add(self._value(whole), split=True)
            return
        if whole and (whole["plain"] == "@" or (whole["braced"] or "").startswith("@")):
            return  # the script's arguments
        text = text.replace("\\\n", "")
        self._add([_IN_QUOTES.sub(lambda found: found["escaped"] or " ".join(self._value(found)), text)])

    def _add(self, parts: list[str], split: bool = False) -> None:
        """Add text to the open word. Several parts become several words."""
        if not parts and split:
            return
        if self._is_open:
            self._words[-1] += parts[0]
            parts = parts[1:]
        self._words += parts
        self._is_open = True

    def _command(self) -> Iterator[tuple[int, list[str]]]:
        words, self._words, self._is_open = self._words, [], False
        while words and words[0] in _KEYWORDS | _CLOSES:
            self._depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
            words = words[1:]
        assigned = next((at for at, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
        if assigned == len(words):
            for word in words:
                self._assign(word, None)
        else:
            yield self._line, words[assigned:]

    def _assign(self, word: str, array: list[str] | None) -> None:
        found = _ASSIGNMENT.fullmatch(word)
        assert found is not None
        name, adds, value = found.groups()
        if self._depth or self._conditional:
            new = [f"{_UNKNOWN}line {self._line} sets {name} under a condition{_UNKNOWN}"]
        elif array is not None:
            new = [*self._known.get(name, ()), *array] if adds else array
        else:
            new = ["".join(self._known.get(name, ())) + value] if adds else [value]
        self._known[name] = new

    def _value(self, token: re.Match[str]) -> list[str]:
        """The value of a variable or a sum, or the reason why it is unknown."""
        if token["sum"]:
            names = re.sub(
                r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda found: "".join(self._variable(found[1])), token["sum"][3:-2]
            )
            if _UNKNOWN in names:
                return [names]
            if re.fullmatch(r"[\d\s+*/()-]{1,100}", names) and "**" not in names:
                with suppress(SyntaxError, ArithmeticError):
                    return [str(eval(names.replace("/", "//")))]  # digits and operators only
        if token["output"] in ("$(pwd)", "`pwd`"):
            return [os.getcwd()]
        name = token["plain"] or token["braced"] or ""
        if name[:1] in ("@", "*"):
            return []
        if found := _PARAMETER.fullmatch(name):
            return self._variable(found[1], found[4], found[3])
        return [f"{_UNKNOWN}line {self._line} has {token[0]}{_UNKNOWN}"]

    def _variable(self, name: str, default: str | None = None, operator: str | None = None) -> list[str]:
        outside = {**os.environ, "PWD": os.getcwd()}
        known = self._known.get(name, [outside[name]] if name in outside else None)
        if default is not None and (known is None or (known == [""] and (operator or "").startswith(":"))):
            known = [
                _IN_QUOTES.sub(lambda found: found["escaped"] or " ".join(self._value(found)), default.strip("\"'"))
            ]
            if (operator or "").endswith("="):
                self._assign(f"{name}={known[0]}", None)
        return known if known is not None else [f"{_UNKNOWN}the script does not set {name}{_UNKNOWN}"]
