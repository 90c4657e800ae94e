"""Finds the command in a shell script that starts a trainer.

The script is read, not run, as bash would run it with only `HOME` and `PWD` in its environment: no other value of the
caller's environment gets into a spec. A value that only a run gives is ``Unknown``, such as the output of a program, or
a variable that is set under an unknown condition. ``MAX_WORK`` bounds the work.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from asyncrl_cli.convert.shell import (
    ASSIGNMENT,
    Branches,
    Cases,
    Chain,
    Command,
    Expansion,
    Group,
    Loop,
    Node,
    Parser,
    ShellSyntaxError,
    Word,
)
from asyncrl_cli.core.errors import ConfigError

MAX_WORK = 1 << 17
"""Limit of the characters of all expanded values, and of commands and words, which count 20 and 10."""
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#?$!-])(\[[^]]*\])?(?:(:?[-=+?]|##?|%%?|,,|\^\^)(.*))?", re.DOTALL)
_NUMBERS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    ast.Mod: lambda left, right: abs(left) % abs(right) * (1 if left >= 0 else -1),
}
_DECLARATIONS = ("export", "readonly", "declare", "local", "typeset")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Unknown:
    """A part of a text that only a run of the script gives. ``variable``: its name, if the script does not set it."""

    text: str
    reason: str
    variable: str = ""


Value = tuple[str | Unknown, ...]
"""A text in pieces."""


class ShellText(str):
    """A text with unknown pieces, as the script has it. ``location`` is its file and line."""

    pieces: Value
    location: str

    @classmethod
    def of(cls, pieces: Value, location: str) -> str:
        """Return the text of the pieces, which is an ordinary one if all are known."""
        whole = "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)
        if all(isinstance(piece, str) for piece in pieces):
            return whole
        text = cls(whole)
        text.pieces, text.location = pieces, location
        return text

    def after_equals(self) -> str:
        """Return the text after the first `=`."""
        first, *others = self.pieces
        return self.of((str(first).partition("=")[2], *others), self.location)

    def unknown(self) -> Unknown:
        """Return the first unknown piece."""
        return next(piece for piece in self.pieces if isinstance(piece, Unknown))


@dataclass(frozen=True, slots=True)
class _Call:
    line: int
    words: list[Value]


class _Exit(Exception):
    pass


def trainer_command(
    path: str,
    text: str,
    further: Sequence[str],
    *,
    is_argument: Callable[[str], bool],
    launched: Callable[[Sequence[str]], int],
) -> list[str]:
    """Return the words of the script's command that starts a program with such arguments, and the ``further`` words.

    `NAME=VALUE` in ``further`` sets a variable of the script. ``launched`` gives the number of words up to a command's
    program. Raises ``ConfigError`` unless there is exactly one such command, and if the script has arguments outside of
    it.
    """
    variables = [word for word in further if ASSIGNMENT.match(word)]
    script = _Script(path, dict(word.split("=", 1) for word in variables))
    ended = ""
    try:
        script.run(Parser(text).script())
    except (ShellSyntaxError, RecursionError) as error:
        message = f"the script cannot be read: {error}"
        location = f"{path}:{getattr(error, 'line', script.line)}"
        raise ConfigError(message, location=location, hint="check it with `bash -n`") from None
    except _Exit:
        ended = f"; it ends in line {script.line}"
    commands: list[tuple[int, list[str]]] = []
    for call in script.calls:
        words = [ShellText.of(word, f"{path}:{call.line}") for word in call.words]
        if words and is_argument(words[0]):
            raise ConfigError(
                f"`{words[0][:60]}` is not part of the command, because the line before does not continue it",
                location=f"{path}:{call.line}",
                hint="end each line of the command with a backslash, without empty lines and comments between them",
            )
        if any(map(is_argument, words[launched(words) or len(words) :])):
            commands.append((call.line, words))
    if len(commands) != 1:
        lines = f" (lines {', '.join(str(line) for line, _ in commands)})" if commands else ended
        message = f"the script has {len(commands) or 'no'} commands with arguments of the trainer{lines}"
        raise ConfigError(
            message, location=path, hint="paste the command, as the shell runs it, in place of the script"
        )
    ((line, words),) = commands
    end = launched(words)
    for word in words[end:]:
        if isinstance(word, ShellText) and not (isinstance(word.pieces[0], str) and "=" in word.pieces[0]):
            name = word.unknown().variable or "NAME"
            message = f"`{word[:60]}` is not known without running the script: {word.unknown().reason}"
            raise ConfigError(message, location=f"{path}:{line}", hint=f"add `{name}=VALUE` after the script")
    return [*words, *(word for word in further if word not in variables)]


@dataclass(slots=True)
class _Script:
    path: str
    variables: dict[str, str]
    line: int = 1
    calls: list[_Call] = field(default_factory=list)
    _values: dict[str, list[Value]] = field(default_factory=dict)
    _functions: dict[str, Group] = field(default_factory=dict)
    _arguments: list[Value] = field(default_factory=list)
    _doubt: str = ""  # why the current commands may not run, or may run several times
    _output: list[str | Unknown] | None = None  # of a command whose output is substituted
    _work: int = 0
    _depth: int = 0

    def __post_init__(self) -> None:
        outside = {"HOME": os.path.expanduser("~"), "PWD": os.getcwd(), "0": self.path, "BASH_SOURCE": self.path}
        self._values = {name: [(value,)] for name, value in (outside | self.variables).items()}

    def run(self, nodes: Sequence[Node]) -> bool | None:
        """Run commands. Returns whether the last one succeeds, or None if only a run shows it."""
        status: bool | None = True
        for node in nodes:
            status = self._run(node)
        return status

    def _run(self, node: Node) -> bool | None:
        self._spend(20)
        match node:
            case Command():
                return self._command(node)
            case Chain():
                return self._chain(node)
            case Group(name=name) if name:
                self._functions[name] = node
                return True
            case Group():
                saved = dict(self._values)
                status = self.run(node.body)
                if node.subshell:
                    self._values = saved
                return status
            case Branches():
                return self._branches(node)
            case Cases():
                return self._cases(node)
            case Loop():
                values = [value for word in node.words for value in self._expand(word)]
                known = bool(node.variable) and all(map(_known, values))
                for value in values if known else []:
                    self._values[node.variable] = [value]
                    self.run(node.body)
                if not known:
                    self._set(node.variable, [self._unknown(f"${node.variable}", "is set by a loop")])
                    self._perhaps(node.body, node.line)
                return True

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            message = "the script does too much work for reading it"
            raise ConfigError(message, location=f"{self.path}:{self.line}", hint="paste the command that it runs")

    def _unknown(self, text: str, reason: str, variable: str = "") -> Value:
        return (Unknown(text, f"line {self.line} {reason}" if not variable else reason, variable),)

    def _perhaps(self, nodes: Sequence[Node], line: int) -> None:
        saved, self._doubt = self._doubt, self._doubt or f"under the condition in line {line}"
        self.run(nodes)
        self._doubt = saved

    def _chain(self, node: Chain) -> bool | None:
        status: bool | None = True
        for operator_, inner in node.nodes:
            if operator_ in ("", "!", "|"):
                status = self._run(inner)
                status = None if operator_ == "|" or status is None else status != (operator_ == "!")
            elif status is None:
                self._perhaps([inner], self.line)
            elif status == (operator_ == "&&"):
                status = self._run(inner)
        return status

    def _branches(self, node: Branches) -> bool | None:
        doubt = False
        for test, body in node.branches:
            holds = self.run(test) if test else True
            if holds is None or (holds and doubt):
                self._perhaps(body, node.line)
                doubt = True
            elif holds:
                return self.run(body)
        return None if doubt else True

    def _cases(self, node: Cases) -> bool | None:
        subject = _empty_if_unset(self._join(node.subject))
        doubt = False
        for patterns, body in node.branches:
            texts = [_known(self._join(pattern)) for pattern in patterns]
            if subject is None or any(text is None or len(text) > 200 for text in texts):
                doubt = True
                self._perhaps(body, node.line)
            elif any(fnmatchcase(subject, text or "") for text in texts):
                if doubt:
                    self._perhaps(body, node.line)
                    return None
                return self.run(body)
        return None if doubt else True

    def _command(self, node: Command) -> bool | None:
        self.line = node.line
        words = list(node.words)
        while words and (found := ASSIGNMENT.match(words[0].raw)) and (len(words) > 1 or found):
            if any(not ASSIGNMENT.match(word.raw) for word in words):
                words = words[1:]  # only for this command
                continue
            self._assign(words.pop(0))
        if not words:
            return True
        name = words[0].raw
        if name in _DECLARATIONS:
            for word in words[1:]:
                if ASSIGNMENT.match(word.raw):
                    self._assign(word)
            return True
        values = [value for word in words for value in self._expand(word)]
        if name == "[[":
            values = [self._join(word) for word in words]
        return self._call(name, values, words)

    def _call(self, name: str, values: list[Value], words: list[Word]) -> bool | None:
        arguments = [_known(value) for value in values[1:]]
        if name in ("[", "test", "[["):
            return _test([_empty_if_unset(value) for value in values[1 : None if name == "test" else -1]])
        if name in ("true", ":", "set", "shopt", "ulimit", "wait"):
            if name == "set" and "--" in arguments:
                self._arguments = values[2 + arguments.index("--") :]
            return True
        if name in ("exit", "return") and not self._doubt:
            raise _Exit
        if name in ("false", "exit", "return"):
            return False if name == "false" else None
        if name == "shift":
            self._arguments = self._arguments[1:]
        elif name in ("read", "mapfile", "unset") or name.startswith("(("):
            pattern = (
                r"\b([A-Za-z_]\w*)\s*(?:=(?!=)|[-+*/%]=|\+\+|--)" if name.startswith("((") else r"^([A-Za-z_]\w*)$"
            )
            for changed in re.findall(pattern, "\n".join([name] + [word.raw for word in words[1:]]), re.MULTILINE):
                self._set(changed, [self._unknown(f"${changed}", f"sets {changed} while it runs")])
                if name == "unset" and not self._doubt:
                    del self._values[changed]
        elif name == "cd":
            target = arguments[-1] if len(arguments) == 1 or arguments[:1] == ["--"] else None
            folder = _known(self._values["PWD"][0])
            there = os.path.normpath(os.path.join(folder, target)) if folder and target else None
            self._set("PWD", [(there,) if there else self._unknown("$PWD", "changes the folder")])
            return None if self._output is None else True
        elif name in self._functions and self._depth < 20:
            saved, self._arguments = self._arguments, values[1:]
            self._depth += 1
            status = self.run(self._functions[name].body)
            self._arguments, self._depth = saved, self._depth - 1
            return status
        elif any("torch_npu" in word.raw for word in words):
            return False  # asyncrl has no NPUs
        elif self._output is not None:
            return self._print(name, values[1:], arguments)
        else:
            self.calls.append(_Call(self.line, values))
        return None

    def _print(self, name: str, values: list[Value], arguments: list[str | None]) -> bool | None:
        """Collect the output of a command."""
        assert self._output is not None
        known = [text for text in arguments if text not in (None, "--")]
        if name == "echo" and "-n" not in arguments[:1] and "-e" not in arguments[:1]:
            for value in values:
                self._output += [*value, " "]
            self._output += ["\n"]
            return True
        if name == "pwd":
            self._output += [*self._values["PWD"][0], "\n"]
            return True
        if name in ("basename", "dirname") and known and None not in arguments:
            head, tail = os.path.split(str(known[0]).rstrip("/"))
            tail = tail.removesuffix(str(known[1])) if len(known) > 1 else tail
            self._output += [tail if name == "basename" else head or ".", "\n"]
            return True
        self._output += self._unknown(f"$({name} …)", f"has the output of {name}")
        return None

    def _set(self, name: str, values: list[Value]) -> None:
        if self._doubt:
            values = [self._unknown(f"${name}", f"sets {name} {self._doubt}")]
        self._values[name] = values

    def _assign(self, word: Word) -> None:
        found = ASSIGNMENT.match(word.raw)
        assert found is not None
        name, adds = found.groups()
        before = self._values.get(name, []) if adds else []
        if word.array is not None:
            self._set(name, before + [value for inner in word.array for value in self._expand(inner)])
            return
        first, *others = self._join(word)
        text = str(first)[found.end() :]
        home = _known(self._values["HOME"][0]) or "~"
        value: Value = (re.sub(r"^~(?=/|$)", home, text) if word.raw.startswith("~", found.end()) else text, *others)
        self._set(name, [(*(before[0] if before else ()), *value), *before[1:]])

    def _join(self, word: Word) -> Value:
        """The word as one text, without splitting."""
        pieces: list[str | Unknown] = []
        for piece in word.pieces:
            if isinstance(piece, str):
                pieces.append(piece)
            else:
                for at, value in enumerate(self._expansion(piece)):
                    pieces += [" " * (at > 0), *value]
        self._spend(sum(len(piece) for piece in pieces if isinstance(piece, str)))
        return tuple(pieces)

    def _expand(self, word: Word) -> list[Value]:
        """The words that a word becomes."""
        fields: list[Value] = []
        current: list[str | Unknown] | None = None

        def end() -> None:
            nonlocal current
            if current is not None:
                fields.append(tuple(current))
            current = None

        for piece in word.pieces:
            if isinstance(piece, str):
                current = [*(current or ()), piece]
                continue
            for at, value in enumerate(self._expansion(piece)):
                if at and (not piece.quoted or piece.body.endswith(("[@]", "@"))):
                    end()
                elif at:
                    current = [*(current or ()), " "]
                for part in value or ("",):
                    self._spend(10 + len(part) if isinstance(part, str) else 10)
                    if isinstance(part, Unknown) or piece.quoted:
                        current = [*(current or ()), part]
                        continue
                    for blank, text in re.findall(r"(\s+)|(\S+)", part):
                        if blank:
                            end()
                        else:
                            current = [*(current or ()), text]
        end()
        return fields

    def _expansion(self, piece: Expansion) -> list[Value]:
        if piece.kind == "sum":
            return [self._sum(piece)]
        if piece.kind == "command":
            return [self._substitution(piece)]
        found = _PARAMETER.fullmatch(piece.body) if piece.kind == "parameter" else None
        if found is None or (found[3] or "")[1:-1] not in ("", "@", "*", "0"):
            return [self._unknown(piece.text, f"has {piece.text}")]
        length, name, index, change, text = found.groups()
        values = self._arguments if name in ("@", "*") else self._values.get(name)
        if name.isdigit() and name != "0":
            values = self._arguments[int(name) - 1 : int(name)] or None
        if name == "#" or length:
            values = self._arguments if name == "#" else values or []
            many = name == "#" or (index or "")[1:2] in ("@", "*")
            whole = _known(values[0]) if values else ""
            return [(str(len(values) if many else len(whole or "")),)]
        if values is not None and name not in ("@", "*") and (index or "[0]")[1:2] == "0":
            values = values[:1]
        if change and change[-1] in "-=+?":
            is_set = values is not None and bool(values) and not (change[0] == ":" and values == [("",)])
            is_set = is_set and not (change[0] == ":" and all(part == "" for part in (values or [()])[0]))
            if change[-1] == "+":
                return [self._text(text, piece)] if is_set else []
            if not is_set and change[-1] in "-=":
                values = [self._text(text, piece)]
                if change[-1] == "=":
                    self._set(name, values)
        elif change:
            return [self._changed(value, change, text, piece) for value in values or []]
        if values is None:
            return [self._unknown(piece.text, f"the script does not set {name}", name)]
        return values

    def _text(self, text: str, piece: Expansion) -> Value:
        """The text of a default."""
        pieces = Parser(text, self.line).pieces(quoted=piece.quoted)
        return self._join(Word(text, self.line, pieces=pieces))

    def _changed(self, value: Value, change: str, text: str, piece: Expansion) -> Value:
        """The value without a prefix or suffix, or in lower or upper case."""
        whole, pattern = _known(value), _known(self._text(text, piece))
        if whole is None or pattern is None or len(whole) * len(pattern) > 10_000:
            return self._unknown(piece.text, f"has {piece.text}")
        if change in (",,", "^^"):
            return (whole.lower() if change == ",," else whole.upper(),)
        cuts = range(len(whole) + 1) if change in ("#", "%%") else range(len(whole), -1, -1)
        parts = ((whole[:cut], whole[cut:]) if change[0] == "#" else (whole[cut:], whole[:cut]) for cut in cuts)
        return (next((rest for removed, rest in parts if fnmatchcase(removed, pattern)), whole),)

    def _sum(self, piece: Expansion) -> Value:
        text = _known(self._text(piece.body, Expansion("sum", "", text="", quoted=True)))
        if text is not None and len(text) <= 200:
            for _ in range(3):  # a variable may hold a sum
                text = re.sub(r"\b[A-Za-z_]\w*\b", self._number, text)
            try:
                return (str(_evaluate(ast.parse(text.strip(), mode="eval").body)),)
            except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
                pass
        return self._unknown(piece.text, f"has {piece.text}")

    def _number(self, name: re.Match[str]) -> str:
        value = _known(self._values.get(name[0], [("?",)])[0])
        return f"({value})" if value is not None and len(value) < 40 else "?"

    def _substitution(self, piece: Expansion) -> Value:
        """The output of a command, for the few commands that need no run."""
        if self._depth >= 20:
            return self._unknown(piece.text, f"has {piece.text}")
        saved = self._output, self._values, self._line_and_depth()
        self._output, self._values = [], dict(self._values)
        self._depth += 1
        try:
            self.run(Parser(piece.body, self.line).script())
            output = self._output
        except (ShellSyntaxError, _Exit):
            output = [Unknown(piece.text, f"line {self.line} has {piece.text}")]
        self._output, self._values, (self.line, self._depth) = saved
        if any(isinstance(part, Unknown) for part in output):
            return self._unknown(piece.text, f"has {piece.text}")
        return ("".join(map(str, output)).rstrip("\n ").replace(" \n", "\n"),)

    def _line_and_depth(self) -> tuple[int, int]:
        return self.line, self._depth


def _known(value: Value) -> str | None:
    return "".join(map(str, value)) if all(isinstance(part, str) for part in value) else None


def _empty_if_unset(value: Value) -> str | None:
    """The text, where a variable that the script does not set is empty, as in an empty environment."""
    return _known(tuple("" if isinstance(part, Unknown) and part.variable else part for part in value))


def _test(words: Sequence[str | None]) -> bool | None:
    """Evaluate the words of `[ … ]`. None: the result depends on the machine, or on an unknown value."""
    if len(words) > 64:
        return None
    for either, symbols in ((True, ("||", "-o")), (False, ("&&", "-a"))):
        cuts = [at for at, word in enumerate(words) if word in symbols and 0 < at < len(words) - 1]
        if cuts:
            results = [_test(words[: cuts[0]]), _test(words[cuts[0] + 1 :])]
            return either if either in results else None if None in results else not either
    if words[:1] == ["!"] and len(words) > 1:
        result = _test(words[1:])
        return None if result is None else not result
    match words:
        case [str(text)]:
            return text != ""
        case ["-n" | "-z" as symbol, str(text)]:
            return (text == "") == (symbol == "-z")
        case [str(left), "=" | "==" | "!=" as symbol, str(right)] if len(right) < 200:
            return fnmatchcase(left, right) == (symbol != "!=")
        case [str(left), str(symbol), str(right)] if symbol in _COMPARISONS:
            numbers = [int(text) for text in (left, right) if re.fullmatch(r"\s*-?\d{1,18}\s*", text)]
            return _COMPARISONS[symbol](*numbers) if len(numbers) == 2 else None
    return None


def _evaluate(node: ast.expr) -> int:
    """Evaluate a sum of whole numbers, with bash's division. Raises ``ValueError`` for anything else."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _NUMBERS:
            result: int = _NUMBERS[type(symbol)](_evaluate(left), _evaluate(right))
            if abs(result) < 2**63:
                return result
    raise ValueError("not a sum of whole numbers")
