"""Finds the command in a shell script that starts a trainer.

bash runs the script in a sandbox that has none of the programs, so each command only leaves its expanded words in
bash's trace. Two runs show what the script itself decides. In the first, programs succeed and tested files exist; their
output, and variables that nobody sets, are marks. In the second, programs fail and print 1, no file exists, and such
variables are empty. A value that differs between the runs is unknown, see ``unknown_fragment``.
"""

from __future__ import annotations

import asyncio
import glob
import os
import re
import shlex
from codecs import escape_decode
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from asyncrl_cli.convert.config import Unknown, content, launched, unknown_fragment, unknown_fragments, without_marks
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.sandbox.commands import ShellSandbox, open_sandbox
from asyncrl_cli.sandbox.trial import missing_program
from asyncrl_cli.spec.inputs import SandboxSpec

SHELL_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
MAX_SCRIPT_BYTES = 1 << 16
MAX_CHARACTERS = 1 << 17
"""Limit of the characters of a command."""
MAX_UNKNOWN = 64
"""Limit of the variables that a script uses and nobody sets."""
PASTE = "paste the command, as the shell runs it (`bash -x` shows it), in place of the script"
LIMITS = SandboxSpec(time_s=5.0, memory_mb=256, processes=64, disk_mb=16, network="none")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_ENVIRONMENT_SCRIPT = re.compile(r"/(?:usr|opt|etc)/.*|(?:.*/)?(?:activate|conda\.sh|\.bashrc)")
"""Scripts that set up programs, and no variables of a trainer's command."""
_TESTS = ("[", "[[", "test", "((", "asyncrl_case", "eval")
_MARK = re.compile(r"asyncrl_unknown_(name|line)_(\d+)_")
_UNBOUND = re.compile(r"line (\d+): (\$?\w+)(?:\[.*\])?: (?:unbound variable|parameter null or not set)")
_START = r"(?:^|[;&|(]|\b(?:do|while|until|then|else)[ \t])[ \t]*"
_INPUT = re.compile(
    _START + r"(?:\w+=\S*[ \t]+)?((?:read|mapfile|readarray|pushd|popd|getopts)\b[^\n;]*)", re.MULTILINE
)
_CASE = re.compile(f"({_START})case[ \t]+([^\n;]+?)[ \t]+in\\b", re.MULTILINE)
_FILE = re.compile(r"\$\([ \t]*<(?!<)")
_FILE_TEST = re.compile(r"((?:\[\[?|\btest|&&|\|\||-[ao])[ \t]+(?:![ \t]+)?)-[a-hkprsuwxGLNOS](?=[ \t])")
_SCRIPT_PATH = re.compile(r"(\$\{?)BASH_SOURCE(?:\[0\])?")
"""In the sandbox the script has another path, so `$BASH_SOURCE` becomes `$0`."""
_RECORD = re.compile("\1+\2script (\\d+) (.*?)(?=\1+\2|\\Z)", re.DOTALL)
_WORD = re.compile(r"""(?:'[^']*'|\$'(?:[^\\']|\\.)*'|\\.|[^ \t\n'\\])+""", re.DOTALL)
_QUOTED = re.compile(r"""'([^']*)'|\$'((?:[^\\']|\\.)*)'|\\(.)""", re.DOTALL)
_PRELUDE = r"""
shopt -s expand_aliases
alias exec= exit=: set=: ulimit=: unalias=: shopt=: trap=: wait=: hash=:
FUNCNEST=100 HOME={home} PWD={folder}
unset OLDPWD
cd() {{
    [[ ${{1-}} != -- ]] || shift
    case ${{1-$HOME}} in (/*) PWD=${{1-$HOME}} ;; (*) PWD=$PWD/$1 ;; esac
    PWD=$(builtin command -p realpath -ms -- "$PWD")
}}
pwd() {{ printf '%s\n' "$PWD"; }}
asyncrl_case() {{ :; }}
source() {{ return {status}; }}
.() {{ return {status}; }}
command() {{
    case ${{1-}} in (-*) (asyncrl_line=$BASH_LINENO; command_not_found_handle "$@") ;; (*) "$@" ;; esac
}}
command_not_found_handle() {{
    {{ builtin set +x; }} 2>&-
    case "$*" in (*torch_npu*) return 1 ;; esac # asyncrl has no NPUs
    case $1 in
        (conda|mamba) return {status} ;; # prints commands that set up programs
        (dirname|basename|seq|expr|tr) builtin command -p "$@" ;;
        (realpath|readlink) builtin command -p realpath -ms -- "${{@: -1}}" ;;
        (*) printf %s {output}; return {status} ;;
    esac
}}
{variables}
\trap '\wait' EXIT
PATH=/nowhere PS4=$'\1\2${{BASH_SOURCE[0]}} ${{LINENO}} '
\exec 9>trace
BASH_XTRACEFD=9
builtin set -x {options}
builtin source script
"""


class _Command(NamedTuple):
    line: int
    words: list[str]


def command_words(arguments: Sequence[str], argument_pattern: str) -> list[str]:
    """Return the words of a command line, or of the command in a shell script, which is then the first argument.

    Further arguments are added to the command, except `NAME=VALUE`, which sets a variable before the script. Raises
    ``ConfigError`` unless the script has exactly one command with arguments that match ``argument_pattern``, and if it
    has such arguments outside of a command.
    """
    if not arguments or Path(arguments[0]).suffix not in SHELL_SCRIPTS:
        return list(arguments)
    path, *further_arguments = arguments
    variables = dict(word.split("=", 1) for word in further_arguments if _ASSIGNMENT.match(word))
    text = content(path, MAX_SCRIPT_BYTES).decode(errors="surrogateescape")
    if reason := missing_program(LIMITS):
        message = f"the script is run in a sandbox, and {reason}"
        raise ConfigError(message, location=path, hint=f"install it, or {PASTE}")
    if reader := _INPUT.search(text):
        line = text.count("\n", 0, reader.start(1)) + 1
        raise ConfigError(f"`{reader[1][:40]}` may set variables of the command", location=f"{path}:{line}", hint=PASTE)
    try:
        script = asyncio.run(_Script.run(path, text, variables))
    except OSError as error:
        raise ConfigError(f"the script cannot be run in a sandbox: {error}", location=path, hint=PASTE) from error
    command = script.command(argument_pattern)
    for word in command[launched(command) :]:
        if (fragments := unknown_fragments(word)) and "=" not in word.partition("\0")[0]:
            message = f"`{without_marks(word)[:60]}` is not known without running the script: {fragments[0].reason}"
            hint = f"add `{fragments[0].variable or 'NAME'}=VALUE` after the script"
            raise ConfigError(message, location=fragments[0].location, hint=hint)
    return [*command, *(word for word in further_arguments if not _ASSIGNMENT.match(word))]


class _Script:
    """The traces of a script's two runs, and the variables that nobody sets."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._unset: list[tuple[str, str]] = []
        """Line and name of each variable that nobody sets, the first time that it is used."""
        self._last_error = ""
        self._traces: list[list[_Command]] = []

    @classmethod
    async def run(cls, path: str, text: str, variables: Mapping[str, str]) -> _Script:
        """Run the script twice. Raises ``ConfigError`` at a limit, and ``OSError`` if the sandbox does not work."""
        script = cls(path)
        async with open_sandbox(LIMITS) as sandbox:
            values = dict(variables)
            while True:
                trace, errors = await script._trace(sandbox, text, values, succeeds=True)
                unset = next((pair for pair in _UNBOUND.findall(errors) if pair[1] not in values), None)
                if unset is None or len(script._unset) == MAX_UNKNOWN:
                    break
                # Sums read a mark as the name of a variable. In the other run it is 1, or empty.
                is_mark = _MARK.fullmatch(unset[1])
                values[unset[1]] = "3" if is_mark else f"asyncrl_unknown_name_{len(script._unset)}_"
                script._unset.append(unset)
            script._last_error = "".join(errors.splitlines()[-1:])
            script._traces = [trace, (await script._trace(sandbox, text, variables, succeeds=False))[0]]
        return script

    async def _trace(
        self, sandbox: ShellSandbox, text: str, values: Mapping[str, str], *, succeeds: bool
    ) -> tuple[list[_Command], str]:
        """Run the script once and return its trace and standard error. ``succeeds``: whether programs and file tests
        do."""
        prelude = _PRELUDE.format(
            home=shlex.quote(os.path.expanduser("~")),
            folder=shlex.quote(os.getcwd()),
            status=0 if succeeds else 1,
            output='asyncrl_unknown_line_"${asyncrl_line-$BASH_LINENO}"_' if succeeds else "1",
            variables="\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items() if name[0] != "$"),
            options="-u" if succeeds else "",
        )
        script = _SCRIPT_PATH.sub(r"\g<1>0", text)
        if succeeds:
            script = _FILE_TEST.sub(r"\1-n", _FILE.sub("$(cat ", _CASE.sub(r"\1asyncrl_case \2; case \2 in", script)))
        for name, lines in (("prelude", prelude), ("script", script)):
            await sandbox.write_file(name, lines.encode(errors="surrogateescape"))
        positional = [values.get(f"${index}", "") for index in range(1, 10)]
        words = shlex.join([self._path, *filter(None, positional)])
        # No value of the caller's environment gets into a spec.
        command = f"exec env -i LC_ALL=C.UTF-8 bash --norc --noprofile -c '. ./prelude' {words} </dev/null"
        result = await sandbox.run(command, errors_apart=True)
        if result.stopped:
            limit = f"{LIMITS.time_s:.0f} seconds" if result.stopped == "time" else f"its limit of {result.stopped}"
            raise ConfigError(f"the script needs more than {limit}", location=self._path, hint=PASTE)
        records = (await sandbox.read_file("trace")).decode(errors="surrogateescape")
        return [_Command(int(line), _words(words)) for line, words in _RECORD.findall(records)], result.errors

    def command(self, argument_pattern: str) -> list[str]:
        """Return the words of the trainer's command, with marks of unknown fragments. Raises ``ConfigError``."""
        commands, other_commands = (
            self._trainer_commands(trace, re.compile(argument_pattern)) for trace in self._traces
        )
        if len(commands) != 1:
            message = f"the script has {len(commands) or 'no'} commands with arguments of the trainer"
            message += f"; bash's last error: {self._last_error}" if self._last_error and not commands else ""
            raise ConfigError(message, location=self._path, hint=PASTE)
        line, words = commands[0]
        if len(other_commands) != 1 or len(other_commands[0].words) != len(words):
            message = "the command depends on programs, files or variables that only a run has"
            raise ConfigError(message, location=f"{self._path}:{line}", hint=PASTE)
        if sum(map(len, words)) > MAX_CHARACTERS:
            raise ConfigError("the command is too long", location=f"{self._path}:{line}", hint=PASTE)
        return [self._with_marks(*pair, line) for pair in zip(words, other_commands[0].words, strict=True)]

    def _trainer_commands(self, trace: Sequence[_Command], argument_pattern: re.Pattern[str]) -> list[_Command]:
        """Raises ``ConfigError`` for a test of an unknown value, and for arguments outside a command."""
        commands = []
        for line, words in trace:
            location = f"{self._path}:{line}"
            name, *operands = words or [""]
            if argument_pattern.match(name):
                message = (
                    f"`{_MARK.sub('$', name)[:60]}` is not part of the command: the line before does not continue it"
                )
                hint = "end each line of the command with a backslash, without empty lines and comments between them"
                raise ConfigError(message, location=location, hint=hint)
            if name in ("source", ".") and not _ENVIRONMENT_SCRIPT.fullmatch(" ".join(operands[:1])):
                message = f"`{' '.join(words)[:40]}` may set variables of the command"
                raise ConfigError(message, location=location, hint=PASTE)
            outputs = (mark for mark in _MARK.finditer(" ".join(operands)) if mark[1] == "line")
            if name in _TESTS and (output := next(outputs, None)):
                message = f"the script decides by the output of a program: {self._unknown(output).text}"
                raise ConfigError(message, location=location, hint=f"write the value in the script, or {PASTE}")
            if any(map(argument_pattern.match, words[launched(words) or len(words) :])):
                commands.append(_Command(line, words))
        return commands

    def _with_marks(self, word: str, other_word: str, line: int) -> str:
        """A word of the first run with marks of its unknown fragments. ``other_word``: the same of the second run."""
        if fnmatchcase(other_word, "*".join(map(glob.escape, _MARK.split(word)[::3]))):
            return _MARK.sub(lambda mark: unknown_fragment(*self._unknown(mark)), word)
        name, equals, value = word.partition("=")
        reason = f"line {line} has a value that depends on programs, files or variables that only a run has"
        return name + equals + unknown_fragment(_MARK.sub("…", value)[:60], reason, "", f"{self._path}:{line}")

    def _unknown(self, mark: re.Match[str]) -> Unknown:
        if mark[1] == "name":
            line, name = self._unset[int(mark[2])]
            name = name.removeprefix("$")
            return Unknown(f"${name}", f"the script does not set {name}", name, f"{self._path}:{line}")
        line = mark[2]
        words = next((words for traced_line, words in self._traces[0] if traced_line == int(line)), [])
        text = f"$({' '.join(words)[:56]})"
        return Unknown(text, f"line {line} has {text}", "", f"{self._path}:{line}")


def _words(text: str) -> list[str]:
    """The words of a line of bash's trace."""

    def unquoted(quoted: re.Match[str]) -> str:
        literal, escaped, character = quoted.groups()
        if escaped is None:
            return literal if literal is not None else character
        escaped = re.sub(r"\\(.)", lambda escape: r"\x1b" if escape[1] == "E" else escape[0], escaped)
        return escape_decode(escaped.encode(errors="surrogateescape"))[0].decode(errors="surrogateescape")

    return [_QUOTED.sub(unquoted, word) for word in _WORD.findall(text)]
