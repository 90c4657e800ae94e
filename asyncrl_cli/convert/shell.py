"""Finds the command in a shell script that starts a trainer.

The script is read, not run, as bash would run it with only `HOME` and `PWD` in its environment: no other value of the
caller's environment gets into a spec. tree-sitter parses it. Assignments, arrays, sums, `if`, `case`, `for` and `&&`
are followed. A script with another construct that can set variables, such as a function, is refused.

Values are texts. A fragment that only a run gives is marked within them, see ``unknown_fragment``.
"""

from __future__ import annotations

import ast
import glob
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from tree_sitter import Language, Node, Parser

from asyncrl_cli.convert.config import content, unknown_fragment, unknown_fragments, without_marks
from asyncrl_cli.core.errors import ConfigError

SHELL_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
MAX_SCRIPT_BYTES = 1 << 16
MAX_CHARACTERS = 1 << 17
"""Limit of the characters of all assigned values."""
PASTE = "paste the command, as the shell runs it (`bash -x` shows it), in place of the script"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
_FIELD = re.compile("(?:\0(?:[^\0]*\0){4}|[^\\s\0])+")
_ENVIRONMENT_SCRIPT = re.compile(r"/(?:usr|opt|etc)/.*|(?:.*/)?(?:activate|conda\.sh|\.bashrc)|.*(?:conda|mamba) .*")
"""Scripts that set up programs, and no variables of a trainer's command."""
_SCRIPT_FOLDER = re.compile(
    r'\$\(cd (?:-- )?"\$\(dirname (?:-- )?"\$(?:0|\{BASH_SOURCE\[0\]\})"\)([^"$]*)"[^|;]*&& pwd\)'
)
"""The usual way to the folder of a script, or a folder relative to it."""
_SETTERS = ("eval", "source", ".", "read", "mapfile", "getopts", "let")
_COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda dividend, divisor: abs(dividend) // abs(divisor) * (1 if (dividend < 0) == (divisor < 0) else -1),
    ast.Mod: lambda dividend, divisor: abs(dividend) % abs(divisor) * (1 if dividend >= 0 else -1),
}


Branch = tuple[bool | None, Sequence[Node]]
"""Whether the condition of a branch holds (None: unknown), and its commands."""


def command_words(arguments: Sequence[str], argument_pattern: str) -> list[str]:
    """Return the words of a command line, or of the command in a shell script, which is then the first argument.

    Further arguments are added to the command, except `NAME=VALUE`, which sets a variable of the script. Raises
    ``ConfigError`` unless the script has exactly one command with arguments that match ``argument_pattern``, and if it
    has such arguments outside of a command.
    """
    if not arguments or Path(arguments[0]).suffix not in SHELL_SCRIPTS:
        return list(arguments)
    path, *further_arguments = arguments
    is_argument = re.compile(argument_pattern).match
    script = _Script(path, dict(word.split("=", 1) for word in further_arguments if _ASSIGNMENT.match(word)))
    try:
        script.evaluate(content(path, MAX_SCRIPT_BYTES))
    except RecursionError:
        raise ConfigError("the script is nested too deeply", location=path, hint=PASTE) from None
    commands = []
    for line, words in script.calls:
        if words and is_argument(words[0]):
            argument = without_marks(words[0])[:60]
            message = f"`{argument}` is not part of the command: the line before does not continue it"
            hint = "end each line of the command with a backslash, without empty lines and comments between them"
            raise ConfigError(message, location=f"{path}:{line}", hint=hint)
        if any(map(is_argument, words[launched(words) or len(words) :])):
            commands.append(words)
    if len(commands) != 1:
        message = (
            f"the script has {len(commands) or 'no'} commands with arguments of the trainer up to line {script.line}"
        )
        raise ConfigError(message, location=path, hint=PASTE)
    for word in commands[0][launched(commands[0]) :]:
        if (fragments := unknown_fragments(word)) and "=" not in word.partition("\0")[0]:
            message = f"`{without_marks(word)[:60]}` is not known without running the script: {fragments[0].reason}"
            hint = f"add `{fragments[0].variable or 'NAME'}=VALUE` after the script"
            raise ConfigError(message, location=fragments[0].location, hint=hint)
    return [*commands[0], *(word for word in further_arguments if not _ASSIGNMENT.match(word))]


def launched(line: Sequence[str], *programs: str) -> int:
    """Return the number of words up to the program that reads the arguments, or 0 if there is none.

    A program is one of ``programs``, a script, or the module of `python -m`.
    """
    for end, (previous, word) in enumerate(zip(("", *line), line, strict=False), start=1):
        if word in programs or (word.endswith(".py") and "=" not in word) or previous == "-m":
            return end
    return 0


class _Script:
    def __init__(self, path: str, variables: Mapping[str, str]) -> None:
        folders = {"HOME": os.path.expanduser("~"), "PWD": os.getcwd(), "0": path, "BASH_SOURCE": path}
        self._values = {name: [value] for name, value in {**folders, **variables}.items()}
        self._variables = variables  # they replace unknown values that the script sets
        self._path = path
        self._condition = ""  # why the current commands may not run
        self._character_count = 0
        self._source = b""
        self.line = 1
        self.calls: list[tuple[int, list[str]]] = []

    def evaluate(self, text: bytes) -> None:
        import tree_sitter_bash

        parser = Parser(Language(tree_sitter_bash.language()))
        root = parser.parse(text).root_node
        self._source = text
        if root.has_error or b"\0" in text:
            raise self._refusal("the script cannot be read as bash", "check it with `bash -n`, or paste its command")
        self._run_all(root.children)

    def _refusal(self, message: str, hint: str = PASTE) -> ConfigError:
        return ConfigError(message, location=f"{self._path}:{self.line}", hint=hint)

    def _unknown(self, text: str, reason: str = "", variable: str = "") -> str:
        reason = reason or f"line {self.line} has {text}"
        return unknown_fragment(text[:60], reason[:160], variable, f"{self._path}:{self.line}")

    # -- commands: each returns whether it succeeds, or None if only a run shows it

    def _run_all(self, nodes: Sequence[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if node.is_named and node.type != "comment":
                status = self._run(node)
        return status

    def _perhaps(self, nodes: Sequence[Node]) -> None:
        """Run commands that a real run may skip: what they set is unknown."""
        outer_condition = self._condition
        self._condition = outer_condition or f"under the condition in line {self.line}"
        self._run_all(nodes)
        self._condition = outer_condition

    def _run(self, node: Node) -> bool | None:
        self.line = node.start_point.row + 1
        children = node.named_children
        match node.type:
            case "command":
                return self._command(node)
            case "variable_assignment":
                self._assign(node)
            case "variable_assignments" | "declaration_command":
                for child in children:
                    if child.type == "variable_assignment":
                        self._assign(child)
            case "unset_command":
                for child in children:
                    self._set(_text(child), [])
            case "compound_statement" if node.children[0].type == "((":
                if children[0].type not in ("binary_expression", "parenthesized_expression"):
                    raise self._refusal("a sum that sets a variable is not followed")
                return None
            case "compound_statement":
                return self._run_all(children)
            case "redirected_statement":
                body = node.child_by_field_name("body")
                return self._run(body) if body else True
            case "pipeline" | "negated_command":
                self._run_all(children)
                return None
            case "list":
                status, is_and = self._run(node.children[0]), node.children[1].type == "&&"
                if status is not None:
                    return self._run(node.children[2]) if status == is_and else status
                self._perhaps(node.children[2:])
                return None
            case "test_command":
                return self._test(children[0]) if children else False
            case "if_statement":
                return self._if(node)
            case "case_statement":
                return self._case(node)
            case "for_statement":
                name = _text(children[0])
                self._values[name] = [self._unknown(f"${name}", f"line {self.line} is set by a loop")]
                self._perhaps(children[-1].children)
            case _:
                name = node.type.replace("_", " ")
                raise self._refusal(f"a {name} in a script is not followed: {_text(node)[:40]!r}")
        return True

    def _if(self, node: Node) -> bool | None:
        clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]

        def branches() -> Iterator[Branch]:
            for clause in (node, *clauses):
                children = [child for child in clause.children if child not in clauses]
                test_end = next((index for index, child in enumerate(children) if child.type == "then"), 0)
                yield self._run_all(children[1:test_end]) if test_end else True, children[test_end + 1 :]

        return self._first_branch(branches())

    def _case(self, node: Node) -> bool | None:
        subject = _known_text(self._join(node.named_children[0]))

        def branches() -> Iterator[Branch]:
            for item in node.named_children[1:]:
                end = next((index for index, child in enumerate(item.children) if child.type == ")"), 0)
                patterns = [self._pattern(child) for child in item.children[:end] if child.is_named]
                matches = any(fnmatchcase(subject or "", pattern or "") for pattern in patterns)
                yield None if subject is None or None in patterns else matches, item.children[end + 1 :]

        return self._first_branch(branches())

    def _first_branch(self, branches: Iterator[Branch]) -> bool | None:
        """Run the first branch with a condition that holds; after an unknown condition each branch, perhaps."""
        is_doubtful = False
        for holds, body in branches:
            if holds and not is_doubtful:
                return self._run_all(body)
            if holds is not False:
                is_doubtful = True
                self._perhaps(body)
        return None if is_doubtful else True

    def _command(self, node: Node) -> bool | None:
        for child, sibling in pairwise(child for child in node.children if child.type != "comment"):
            gap = self._source[child.end_byte : sibling.start_byte]
            if child.type == "variable_assignment" and re.search(rb"(?<!\\)\n", gap):
                # The grammar takes a line of several assignments for the environment of the next line's command.
                raise self._refusal("several assignments in a line are not followed", "write a line for each")
        name_node = node.child_by_field_name("name")
        assert name_node is not None
        words = self._fields(name_node.children[0])
        words += [field for word in node.children_by_field_name("argument") for field in self._fields(word)]
        name = words[0] if words else ""
        if name in ("true", ":", "set", "shopt", "ulimit", "wait", "false"):
            return name != "false"
        if name in _SETTERS:
            source = " ".join(map(without_marks, words[1 : None if name == "eval" else 2]))
            if not _ENVIRONMENT_SCRIPT.fullmatch(source):
                raise self._refusal(f"`{name} {source[:40]}` may set variables of the command")
            return True
        if name == "cd":
            self._set("PWD", [self._unknown("$PWD", f"line {self.line} changes the folder")])
        else:
            self.calls.append((self.line, words))
        return None

    def _assign(self, node: Node) -> None:
        target, assignment_operator, *value_nodes = node.children
        if target.type != "variable_name":
            raise self._refusal("an assignment to an item of an array is not followed")
        name, value_node = _text(target), value_nodes[0] if value_nodes else None
        old_values = self._values.get(name, []) if assignment_operator.type == "+=" else []
        if value_node is not None and value_node.type == "array":
            items = [field for item in value_node.named_children for field in self._fields(item)]
            self._set(name, old_values + items)
            return
        value = self._join(value_node) if value_node is not None else ""
        if value_node is not None and re.match(r"~(?=/|$)", _text(value_node)):
            value = self._scalar("HOME") + value[1:]
        self._set(name, [*(text + value for text in old_values[:1]), *old_values[1:]] if old_values else [value])

    def _set(self, name: str, values: list[str]) -> None:
        self._character_count += sum(map(len, values)) + len(values)
        if self._character_count > MAX_CHARACTERS:
            raise self._refusal("the script's values are too long")
        if self._condition:
            values = [self._unknown(f"${name}", f"line {self.line} sets {name} {self._condition}")]
        if name in self._variables and any("\0" in value for value in values):
            values = [self._variables[name]]
        self._values[name] = values

    def _scalar(self, name: str) -> str:
        return (self._values.get(name) or [""])[0]

    # -- words

    def _join(self, node: Node) -> str:
        """The value of a word without splitting."""
        return " ".join(self._fields(node, is_quoted=True))

    def _pattern(self, node: Node) -> str | None:
        """The pattern of a `case` or `[[`: quoted text stands for itself."""
        text = _known_text(self._join(node))
        return glob.escape(text) if text is not None and node.type in ("string", "raw_string") else text

    def _fields(self, node: Node, *, is_quoted: bool = False) -> list[str]:
        """The words that a word becomes."""
        text = _text(node)
        match node.type:
            case "comment":
                return []
            case "raw_string":
                return [text[1:-1]]
            case "string":
                return self._sequence(node, node.children[1:-1], is_quoted=True)
            case "string_content":
                return [re.sub(r"\\\n", "", re.sub(r'\\([$`"\\])', r"\1", text))]
            case "concatenation" if not is_quoted and _BRACES.search(_unquoted_text(node)):
                return [self._unknown(text, f"line {self.line} has braces, which bash expands into several words")]
            case "concatenation":
                return self._sequence(node, node.children, is_quoted=is_quoted)
            case "arithmetic_expansion":
                return [self._sum(node)]
            case "command_substitution":  # of a default, the grammar reads sums as commands
                values = [self._sum(node) if text.startswith("$((") else self._substitution(text)]
            case "simple_expansion" | "expansion":
                values = self._parameter(node, is_quoted=is_quoted)
            case "word" | "number" | "variable_name" | "extglob_pattern" | "regex" | "test_operator":
                return [re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""), flags=re.DOTALL)]
            case _ if node.is_named:
                return [self._unknown(text)]
            case _:
                return [text]
        return values if is_quoted else [field for value in values for field in _FIELD.findall(value)]

    def _sequence(self, parent: Node, nodes: Sequence[Node], *, is_quoted: bool) -> list[str]:
        """The words of adjacent nodes: none if all are empty, as in `"$@"`. The parser skips blanks between them."""
        if parent.type == "string":
            position, end = parent.start_byte + 1, parent.end_byte - 1
        else:
            position, end = nodes[0].start_byte, nodes[-1].end_byte
        fields, is_empty = [""], position < end
        for fragment in nodes:
            gap = self._source[position : fragment.start_byte].decode(errors="surrogateescape")
            fragment_fields = self._fields(fragment, is_quoted=is_quoted)
            fields[-1] += gap + (fragment_fields[0] if fragment_fields else "")
            fields += fragment_fields[1:]
            is_empty &= not gap and not fragment_fields
            position = fragment.end_byte
        fields[-1] += self._source[position:end].decode(errors="surrogateescape")
        return [] if is_empty and position == end else fields

    def _parameter(self, node: Node, *, is_quoted: bool) -> list[str]:
        """The values of `$NAME` and `${NAME…}`: several of an array."""
        fragments = [child for child in node.children if child.type not in ("$", "${", "}")]
        if fragments and fragments[0].type == "subscript":
            target, index = fragments[0].named_children[0], _text(fragments[0].named_children[-1])
        else:
            target, index = fragments[0] if fragments else node, ""
        name = _text(target)
        change = fragments[1].type if len(fragments) > 1 else ""
        if target.type not in ("variable_name", "special_variable_name") or index not in ("", "@", "*", "0"):
            return [self._unknown(_text(node))]
        if change and change not in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return [self._unknown(_text(node))]
        values = self._values.get(name) or ([] if name in self._values and index in ("@", "*") else None)
        if values is not None and index not in ("@", "*"):
            values = values[:1]
        if index == "*" and is_quoted and values:
            values = [" ".join(values)]
        is_empty = not values or (change.startswith(":") and values == [""])
        default = " ".join(self._sequence(node, fragments[2:], is_quoted=True)) if len(fragments) > 2 else ""
        match change[-1:]:
            case "+":
                return [] if is_empty else [default]
            case "-" | "=" if is_empty:
                if change[-1] == "=":
                    self._set(name, [default])
                return [default]
        if name in ("@", "*"):
            return []
        return [self._unknown(_text(node), f"the script does not set {name}", name)] if values is None else values

    def _substitution(self, text: str) -> str:
        """The output of a command, for the few commands that need no run."""
        if "torch_npu" in text and (other_device := re.search(r"\|\| echo (\w+)\)$", text)):
            return other_device[1]  # asyncrl has no NPUs
        if folder := _SCRIPT_FOLDER.fullmatch(text):
            return os.path.normpath(f"{os.path.dirname(os.path.abspath(self._path))}/{folder[1]}")
        return self._scalar("PWD") if text in ("$(pwd)", "`pwd`") else self._unknown(text)

    # -- conditions and sums

    def _test(self, node: Node) -> bool | None:
        """Evaluate a condition. None: it depends on the machine, or on an unknown value."""
        children = node.children
        if node.type not in ("unary_expression", "binary_expression"):
            text = None if node.type == "parenthesized_expression" else _known_text(self._join(node))
            return None if text is None else text != ""
        symbol = _text(children[1 if node.type == "binary_expression" else 0])
        if symbol == "!":
            result = self._test(children[1])
            return None if result is None else not result
        if symbol in ("&&", "||", "-a", "-o"):
            results = [self._test(side) for side in (children[0], children[2])]
            decisive = symbol in ("||", "-o")
            return decisive if decisive in results else None if None in results else not decisive
        operands = [child for child in node.named_children if child.type != "test_operator"]
        texts = [_known_text(self._join(operand)) for operand in operands]
        if None in texts:
            return None
        if symbol in ("-n", "-z"):
            return (texts[0] != "") == (symbol == "-n")
        if symbol in ("=", "==", "!="):
            return fnmatchcase(texts[0] or "", self._pattern(children[-1]) or "") == (symbol != "!=")
        integers = [int(text) for text in texts if text and re.fullmatch(r"\s*-?\d{1,18}\s*", text)]
        is_comparison = symbol in _COMPARISONS and len(integers) == 2
        return bool(_COMPARISONS[symbol](*integers)) if is_comparison else None

    def _sum(self, node: Node) -> str:
        """The value of `$((…))`. The grammar is not used, because it reads `-1 + 1` as `-(1 + 1)`."""
        value = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
        text = value.sub(lambda name: f"({self._scalar(name[1])})", _text(node)[3:-2])
        with suppress(SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            if len(text) <= 400:
                return str(_integer(ast.parse(text.strip(), mode="eval").body))
        return self._unknown(_text(node))


def _integer(node: ast.expr) -> int:
    """Evaluate a sum of whole numbers, with bash's division. Raises ``ValueError`` for anything else."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_integer(operand)
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            result = _OPERATORS[type(symbol)](_integer(left), _integer(right))
            if abs(result) < 2**63:
                return result
    raise ValueError("not a sum of whole numbers")


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="surrogateescape")


def _unquoted_text(node: Node) -> str:
    plain_texts = (_text(child) for child in node.children if child.type in ("word", "brace_expression"))
    return "".join(plain_texts).replace("\\{", "")


def _known_text(value: str) -> str | None:
    """The text of a value, or None. A variable that the script does not set is empty, as in an empty environment."""
    text = without_marks(value, lambda fragment: "" if fragment.variable else "\0")
    return None if "\0" in text else text
