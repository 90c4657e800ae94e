"""Finds the command in a shell script that starts a trainer.

The script is read, not run, as bash would run it with only `HOME` and `PWD` in its environment: no other value of the
caller's environment gets into a spec. A value that only a run gives is ``Unknown``, such as the output of a program, or
a variable that is set under an unknown condition. ``MAX_WORK`` bounds the work.
"""

from __future__ import annotations

import ast
import glob
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

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
from asyncrl_cli.core.files import read_regular

MAX_WORK = 1 << 17
"""Limit of the characters of all expanded values, and of commands and words, which count 20 and 10."""
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#?$!-])(\[[^]]*\])?(?:(:?[-=+?]|##?|%%?|,,|\^\^)(.*))?", re.DOTALL)
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda dividend, divisor: abs(dividend) // abs(divisor) * (1 if (dividend < 0) == (divisor < 0) else -1),
    ast.Mod: lambda dividend, divisor: abs(dividend) % abs(divisor) * (1 if dividend >= 0 else -1),
}
_ENVIRONMENT_SCRIPT = re.compile(
    r"/(?:usr|opt|etc)/.*|(?:.*/)?(?:activate|conda\.sh|\.bashrc)|\$\(.*(?:conda|mamba) .*\)"
)
"""Scripts that set up programs, and no variables of a trainer's command."""
_DECLARATIONS = ("export", "readonly", "declare", "local", "typeset")
_OUTSIDE = ("HOME", "PWD", "0", "BASH_SOURCE")
"""Variables that have a value before the script begins."""
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class Unknown(NamedTuple):
    """A segment of a text that only a run of the script gives. ``variable``: its name if the script does not set it."""

    text: str
    reason: str
    variable: str = ""


Value = tuple[str | Unknown, ...]
"""A text in segments."""


class ShellText(str):
    """A text with unknown segments, as the script has it. ``location`` is its file and line."""

    segments: Value
    location: str

    @classmethod
    def of_segments(cls, segments: Value, location: str) -> str:
        """Return the text of the segments, which is an ordinary one if all are known."""
        text = "".join(segment if isinstance(segment, str) else segment.text for segment in segments)
        if all(isinstance(segment, str) for segment in segments):
            return text
        shell_text = cls(text)
        shell_text.segments, shell_text.location = segments, location
        return shell_text

    def after_equals(self) -> str:
        """Return the text after the first `=`."""
        return self.of_segments((str(self.segments[0]).partition("=")[2], *self.segments[1:]), self.location)

    def unknown(self) -> Unknown:
        """Return the first unknown segment."""
        return next(segment for segment in self.segments if isinstance(segment, Unknown))


class _Call(NamedTuple):
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
    exit_text = ""
    try:
        script.run(Parser(text).script())
    except (ShellSyntaxError, RecursionError) as error:
        message = f"the script cannot be read: {error}"
        location = f"{path}:{getattr(error, 'line', script.line)}"
        raise ConfigError(message, location=location, hint="check it with `bash -n`") from None
    except _Exit:
        exit_text = f"; it ends in line {script.line}"
    commands: list[tuple[int, list[str]]] = []
    for call in script.calls:
        words = [ShellText.of_segments(word, f"{path}:{call.line}") for word in call.words]
        if words and is_argument(words[0]):
            raise ConfigError(
                f"`{words[0][:60]}` is not part of the command, because the line before does not continue it",
                location=f"{path}:{call.line}",
                hint="end each line of the command with a backslash, without empty lines and comments between them",
            )
        if any(map(is_argument, words[launched(words) or len(words) :])):
            commands.append((call.line, words))
    if len(commands) != 1:
        lines = f" (lines {', '.join(str(line) for line, _ in commands)})" if commands else exit_text
        message = f"the script has {len(commands) or 'no'} commands with arguments of the trainer{lines}"
        raise ConfigError(
            message, location=path, hint="paste the command, as the shell runs it, in place of the script"
        )
    ((line, words),) = commands
    end = launched(words)
    for word in words[end:]:
        if isinstance(word, ShellText) and not (isinstance(word.segments[0], str) and "=" in word.segments[0]):
            name = word.unknown().variable or "NAME"
            message = f"`{word[:60]}` is not known without running the script: {word.unknown().reason}"
            raise ConfigError(message, location=f"{path}:{line}", hint=f"add `{name}=VALUE` after the script")
    return [*words, *(word for word in further if word not in variables)]


class _Script:
    def __init__(self, path: str, variables: Mapping[str, str]) -> None:
        outside = dict(zip(_OUTSIDE, (os.path.expanduser("~"), os.getcwd(), path, path), strict=True))
        self._values: dict[str, list[Value]] = {name: [(value,)] for name, value in (outside | dict(variables)).items()}
        self.line = 1
        self.calls: list[_Call] = []
        self._path = path
        self._variables = variables  # they replace unknown values that the script sets
        self._functions: dict[str, Group] = {}
        self._arguments: list[Value] = []
        self._doubt = ""  # why the current commands may not run, or may run several times
        self._output: list[str | Unknown] | None = None  # of a command whose output is substituted
        self._unread = ""  # why any variable may be set
        self._cost = 0
        self._depth = 0

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
                saved_values = dict(self._values)
                status = self.run(node.body)
                if node.is_subshell:
                    self._values = saved_values
                return status
            case Branches():
                return self._branches(node)
            case Cases():
                return self._cases(node)
            case Loop():
                values = [value for word in node.words for value in self._expand(word)]
                if node.variable and not any(map(_is_unknown, values)):
                    for value in values:
                        self._values[node.variable] = [value]
                        self.run(node.body)
                else:
                    self._set(node.variable, [self._unknown(f"${node.variable}", "is set by a loop")])
                    self._perhaps(node.body, node.line)
                return True

    def _spend(self, cost: int) -> None:
        self._cost += cost
        if self._cost > MAX_WORK:
            message = "the script does too much work for reading it"
            raise ConfigError(message, location=f"{self._path}:{self.line}", hint="paste the command that it runs")

    def _unknown(self, text: str, reason: str = "") -> Value:
        return (Unknown(text, f"line {self.line} {reason or f'has {text}'}"),)

    def _perhaps(self, nodes: Sequence[Node], line: int) -> None:
        outer_doubt, self._doubt = self._doubt, self._doubt or f"under the condition in line {line}"
        self.run(nodes)
        self._doubt = outer_doubt

    def _chain(self, node: Chain) -> bool | None:
        status: bool | None = True
        for symbol, inner in node.nodes:
            if symbol in ("", "!", "|"):
                status = self._run(inner)
                status = None if symbol == "|" or status is None else status != (symbol == "!")
            elif status is None:
                self._perhaps([inner], self.line)
            elif status == (symbol == "&&"):
                status = self._run(inner)
        return status

    def _branches(self, node: Branches) -> bool | None:
        is_doubtful = False
        for test, body in node.branches:
            holds = self.run(test) if test else True
            if holds and not is_doubtful:
                return self.run(body)
            if holds is not False:
                self._perhaps(body, node.line)
                is_doubtful = True
        return None if is_doubtful else True

    def _cases(self, node: Cases) -> bool | None:
        subject = _text_or_empty(self._join(node.subject))
        is_doubtful = False
        for patterns, body in node.branches:
            texts = [_text(self._join(pattern)) for pattern in patterns]
            texts = [
                glob.escape(text) if text and pattern.raw[0] in "'\"" else text
                for text, pattern in zip(texts, patterns, strict=True)
            ]
            if subject is None or any(text is None or len(text) > 200 for text in texts):
                is_doubtful = True
            elif not any(fnmatchcase(subject, text or "") for text in texts):
                continue
            elif not is_doubtful:
                return self.run(body)
            self._perhaps(body, node.line)
        return None if is_doubtful else True

    def _command(self, node: Command) -> bool | None:
        self.line = node.line
        words = list(node.words)
        if all(ASSIGNMENT.match(word.raw) for word in words) or words[0].raw in _DECLARATIONS:
            for word in words:
                self._assign(word)
            return True
        while ASSIGNMENT.match(words[0].raw):  # only for this command
            words.pop(0)
        name = words[0].raw
        values = [value for word in words for value in ([self._join(word)] if name == "[[" else self._expand(word))]
        arguments = [_text(value) for value in values[1:]]
        if name in ("[", "test", "[["):
            texts = [_text_or_empty(value) for value in values]
            for index, text in enumerate(texts[1:], start=1):  # only an unquoted word in `[[` is a pattern
                if text and texts[index - 1] in ("=", "==", "!=") and (name != "[[" or words[index].raw[0] in "'\""):
                    texts[index] = glob.escape(text)
            return _test(texts[1 : None if name == "test" else -1])
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
            self._change([word.raw for word in words])
        elif name == "cd":
            target = arguments[-1] if len(arguments) == 1 or arguments[:1] == ["--"] else None
            folder = _text(self._values["PWD"][0])
            path = os.path.normpath(os.path.join(folder, target)) if folder and target else None
            self._set("PWD", [(path,) if path else self._unknown("$PWD", "changes the folder")])
            return None if self._output is None else True
        elif name in ("source", ".", "eval"):
            return self._source(name, values[1:])
        elif name in self._functions and self._depth < 20:
            outer_arguments, self._arguments = self._arguments, values[1:]
            self._depth += 1
            status = self.run(self._functions[name].body)
            self._arguments, self._depth = outer_arguments, self._depth - 1
            return status
        elif any("torch_npu" in word.raw for word in words):
            return False  # asyncrl has no NPUs
        elif self._output is not None:
            return self._print(name, values[1:], arguments)
        else:
            self.calls.append(_Call(self.line, values))
        return None

    def _source(self, name: str, values: list[Value]) -> bool | None:
        """Run the commands of another file, or of `eval`. If they cannot be read, they may set any variable."""
        values = values if name == "eval" else values[:1]
        source = " ".join("".join(str(getattr(segment, "text", segment)) for segment in value) for value in values)
        if _ENVIRONMENT_SCRIPT.fullmatch(source):
            return True
        text = None
        if not any(map(_is_unknown, values)) and self._depth < 20:
            text = source if name == "eval" else None
            with suppress(OSError, ValueError):
                folder = _text(self._values["PWD"][0]) or "."
                text = text or read_regular(os.path.join(folder, source), MAX_WORK).decode(errors="surrogateescape")
        line, self._depth = self.line, self._depth + 1
        try:
            if text is not None:
                return self.run(Parser(text, line).script())
        except (ShellSyntaxError, _Exit):
            pass
        finally:
            self.line, self._depth = line, self._depth - 1
        self._unread = f"line {line} runs `{name} {source[:40]}`, which is not here and may set"
        for variable in self._values.keys() - {*_OUTSIDE}:
            self._set(variable, [(Unknown(f"${variable}", f"{self._unread} {variable}"),)])
        return None

    def _change(self, words: list[str]) -> None:
        """Forget the variables that `read`, `mapfile`, `unset` or `((…))` changes."""
        pattern = r"^([A-Za-z_]\w*)$"
        if words[0].startswith("(("):
            pattern = r"\b([A-Za-z_]\w*)\s*(?:=(?!=)|[-+*/%]=|\+\+|--)"
        for name in re.findall(pattern, "\n".join(words if words[0].startswith("((") else words[1:]), re.MULTILINE):
            self._set(name, [self._unknown(f"${name}", f"sets {name} while it runs")])
            if words[0] == "unset" and not self._doubt:
                del self._values[name]

    def _print(self, name: str, values: list[Value], arguments: list[str | None]) -> bool | None:
        """Collect the output of a command."""
        assert self._output is not None
        texts = [text for text in arguments if text is not None and text != "--"]
        if name == "echo" and not {"-n", "-e"} & {*texts[:1]}:
            for value in values:
                self._output += [*value, " "]
            self._output += ["\n"]
        elif name == "pwd":
            self._output += [*self._values["PWD"][0], "\n"]
        elif name in ("basename", "dirname") and texts and None not in arguments:
            folder, file = os.path.split(texts[0].rstrip("/"))
            self._output += [file.removesuffix("".join(texts[1:])) if name == "basename" else folder or ".", "\n"]
        else:
            self._output += self._unknown(f"$({name} …)")
            return None
        return True

    def _set(self, name: str, values: list[Value]) -> None:
        values = [self._unknown(f"${name}", f"sets {name} {self._doubt}")] if self._doubt else values
        if name in self._variables and any(map(_is_unknown, values)):
            values = [(self._variables[name],)]
        self._values[name] = values

    def _assign(self, word: Word) -> None:
        """Assign a variable; other words of `export` and `declare` have no effect."""
        if not (assignment := ASSIGNMENT.match(word.raw)):
            return
        name, appends = assignment.groups()
        old_values = self._values.get(name, []) if appends else []
        if word.array is not None:
            self._set(name, old_values + [value for inner in word.array for value in self._expand(inner)])
            return
        value = self._join(word)
        text = str(value[0])[assignment.end() :]
        if word.raw.startswith("~", assignment.end()):
            text = re.sub(r"^~(?=/|$)", _text(self._values["HOME"][0]) or "~", text)
        old_text = old_values[0] if old_values else ()
        self._set(name, [(*old_text, text, *value[1:]), *old_values[1:]])

    def _join(self, word: Word) -> Value:
        """The word as one text, without splitting."""
        segments: list[str | Unknown] = []
        for segment in word.segments:
            values = [(segment,)] if isinstance(segment, str) else self._expansion(segment)
            for index, value in enumerate(values):
                segments += [" ", *value] if index else value
        self._spend(sum(len(segment) for segment in segments if isinstance(segment, str)))
        return tuple(segments)

    def _expand(self, word: Word) -> list[Value]:
        """The words that a word becomes."""
        fields: list[list[str | Unknown]] = []
        is_open = False  # whether the next text belongs to the last field

        def append(text: str | Unknown) -> None:
            nonlocal is_open
            if not is_open:
                fields.append([])
            fields[-1].append(text)
            is_open = True

        for segment in word.segments:
            if isinstance(segment, str):
                append(segment)
                continue
            for index, value in enumerate(self._expansion(segment)):
                if index and segment.is_quoted and not segment.body.endswith(("[@]", "@")):
                    append(" ")
                elif index:
                    is_open = False
                for text in value or ("",):
                    self._spend(10 + len(text) if isinstance(text, str) else 10)
                    if isinstance(text, Unknown) or segment.is_quoted:
                        append(text)
                        continue
                    for blank, letters in re.findall(r"(\s+)|(\S+)", text):
                        if blank:
                            is_open = False
                        else:
                            append(letters)
        return [tuple(field) for field in fields]

    def _expansion(self, expansion: Expansion) -> list[Value]:
        if expansion.form == "sum":
            return [self._sum(expansion)]
        if expansion.form == "command":
            return [self._substitution(expansion)]
        parameter = _PARAMETER.fullmatch(expansion.body) if expansion.form == "parameter" else None
        if parameter is None or (parameter[3] or "")[1:-1] not in ("", "@", "*", "0"):
            return [self._unknown(expansion.text)]
        length, name, index, change, text = parameter.groups()
        values = self._arguments if name in ("@", "*") else self._values.get(name)
        if name.isdigit() and name != "0":
            values = self._arguments[int(name) - 1 : int(name)] or None
        if name == "#" or length:
            values = self._arguments if name == "#" else values or []
            is_count = name == "#" or (index or "")[1:2] in ("@", "*")
            return [(str(len(values) if is_count else len(_text(values[0]) or "") if values else 0),)]
        if values is not None and name not in ("@", "*") and (index or "[0]")[1:2] == "0":
            values = values[:1]
        if values is None and self._unread and re.match(r"[A-Za-z_]", name):
            values = [(Unknown(expansion.text, f"{self._unread} {name}"),)]
        if change and change[-1] in "-=+?":
            is_empty = not values or (change[0] == ":" and _text(values[0]) == "")
            if change[-1] == "+":
                return [] if is_empty else [self._default(text, expansion)]
            if is_empty and change[-1] in "-=":
                values = [self._default(text, expansion)]
                if change[-1] == "=":
                    self._set(name, values)
        elif change:
            return [self._changed(value, change, text, expansion) for value in values or []]
        if values is None:
            return [(Unknown(expansion.text, f"the script does not set {name}", name),)]
        return values

    def _default(self, text: str, expansion: Expansion) -> Value:
        return self._join(Word(text, self.line, Parser(text, self.line).segments(is_quoted=expansion.is_quoted)))

    def _changed(self, value: Value, change: str, text: str, expansion: Expansion) -> Value:
        """The value without a prefix or suffix, or in lower or upper case."""
        old_text, pattern = _text(value), _text(self._default(text, expansion))
        if old_text is None or pattern is None or len(old_text) * len(pattern) > 10_000:
            return self._unknown(expansion.text)
        if change in (",,", "^^"):
            return (old_text.lower() if change == ",," else old_text.upper(),)
        cuts = range(len(old_text) + 1) if change in ("#", "%%") else range(len(old_text), -1, -1)
        halves = ((old_text[:cut], old_text[cut:]) for cut in cuts)
        ordered = halves if change[0] == "#" else ((end, start) for start, end in halves)
        return (next((remainder for removed, remainder in ordered if fnmatchcase(removed, pattern)), old_text),)

    def _sum(self, expansion: Expansion) -> Value:
        text = _text(self._default(expansion.body, expansion._replace(is_quoted=True)))
        if text is not None and len(text) <= 200:
            for _ in range(3):  # a variable may hold a sum
                text = re.sub(r"\b[A-Za-z_]\w*\b", self._operand, text)
            with suppress(SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
                return (str(_evaluate(ast.parse(text.strip(), mode="eval").body)),)
        return self._unknown(expansion.text)

    def _operand(self, name: re.Match[str]) -> str:
        value = _text(self._values.get(name[0], [("?",)])[0])
        return f"({value})" if value is not None and len(value) < 40 else "?"

    def _substitution(self, expansion: Expansion) -> Value:
        """The output of a command, for the few commands that need no run."""
        if self._depth >= 20:
            return self._unknown(expansion.text)
        saved_state = self._output, self._values, self.line, self._depth
        self._output, self._values, self._depth = [], dict(self._values), self._depth + 1
        try:
            self.run(Parser(expansion.body, self.line).script())
            output = tuple(self._output)
        except (ShellSyntaxError, _Exit):
            output = self._unknown(expansion.text)
        self._output, self._values, self.line, self._depth = saved_state
        text = _text(output)
        return self._unknown(expansion.text) if text is None else (text.rstrip("\n ").replace(" \n", "\n"),)


def _is_unknown(value: Value) -> bool:
    return any(isinstance(segment, Unknown) for segment in value)


def _text(value: Value) -> str | None:
    return None if _is_unknown(value) else "".join(map(str, value))


def _text_or_empty(value: Value) -> str | None:
    """The text, where a variable that the script does not set is empty, as in an empty environment."""
    return _text(tuple("" if isinstance(segment, Unknown) and segment.variable else segment for segment in value))


def _test(words: Sequence[str | None]) -> bool | None:
    """Evaluate the words of `[ … ]`. None: the result depends on the machine, or on an unknown value."""
    if len(words) > 64:
        return None
    for either, symbols in ((True, ("||", "-o")), (False, ("&&", "-a"))):
        cuts = [index for index, word in enumerate(words) if word in symbols and 0 < index < len(words) - 1]
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
            operands = [int(text) for text in (left, right) if re.fullmatch(r"\s*-?\d{1,18}\s*", text)]
            return _COMPARISONS[symbol](*operands) if len(operands) == 2 else None
    return None


def _evaluate(node: ast.expr) -> int:
    """Evaluate a sum of whole numbers, with bash's division. Raises ``ValueError`` for anything else."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _ARITHMETIC:
            result: int = _ARITHMETIC[type(symbol)](_evaluate(left), _evaluate(right))
            if abs(result) < 2**63:
                return result
    raise ValueError("not a sum of whole numbers")
