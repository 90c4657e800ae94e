"""Finds the command in a shell script that starts a trainer.

bash runs the script in a sandbox that has none of the programs, so each command only leaves its expanded words in
bash's trace. The script is refused if anything before the trainer's command depends on what only a run has: an unset
variable, the output or exit status of a program, or a file. So each word of the command is certain (decision 0027).
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from codecs import escape_decode
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from asyncrl_cli.convert.config import content, launched
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.sandbox.commands import open_sandbox
from asyncrl_cli.spec.inputs import SandboxSpec

SHELL_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
MAX_SCRIPT_BYTES = 1 << 16
PASTE = "paste the command, as the shell runs it (`bash -x` shows it), in place of the script"
LIMITS = SandboxSpec(time_s=5.0, memory_mb=256, processes=64, disk_mb=16, network="none")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SETS_VARIABLES = re.compile(r"(?:read|mapfile|readarray)\b|set (?:--|[^-+])|(?:source|\.) ")
_ENVIRONMENT_SCRIPT = re.compile(r"(?:source|\.) (?:/(?:usr|opt|etc)/|(?:\S*/)?(?:activate|conda\.sh|\.bashrc)(?: |$))")
"""A script that sets up programs, and no variables of a trainer's command."""
_FILE_TEST = re.compile(r"(?:\[\[?|test) (?:.* )?-(?:[b-hkprstuwxGLNOS]|nt|ot|ef) ")
_UNSET = re.compile(r"\$?(\w+)(?:\[.*\])?: (?:unbound variable|parameter null or not set)")
_REPLACED = (
    (re.compile(r"(?<=\$)BASH_SOURCE\b|(?<=\$\{)BASH_SOURCE(?:\[0\])?"), "0"),
    (re.compile(r"(?<=\$)\?|(?<=\$\{)\?|\bPIPESTATUS\b"), "STATUS_OF_A_PROGRAM"),
    (re.compile(r"(?<=\$)E?UID\b|(?<=\$\{)E?UID\b"), "USER_ID"),
    (re.compile(r"(?<![\w./])PATH\b"), "PATH_OF_PROGRAMS"),
    (re.compile(r"<[ \t]*/dev/null"), "</dev/zero"),
)
"""Differences of the sandbox: another path and user, programs have no exit status and are never found, and only the
input of programs in the background is /dev/null."""
_RECORD = re.compile(
    "(\1*)\2(script|prelude)(?:: line)? (\\d+):? (.*?)(?=\1+\2(?:script|prelude) |\2(?:script|prelude): line |\\Z)",
    re.DOTALL,
)
"""A command in the trace, or an error. The first has one `\\1`, and another one in each command substitution."""
_WORD = re.compile(r"""(?:'[^']*'|\$'(?:[^\\']|\\.)*'|\\.|[^ \t\n'\\])+""", re.DOTALL)
_QUOTED = re.compile(r"""'([^']*)'|\$'((?:[^\\']|\\.)*)'|\\(.)""", re.DOTALL)
_PRELUDE = r"""
PWD=$ASYNCRL_FOLDER OLDPWD= PATH=/nowhere PATH_OF_PROGRAMS=/nowhere PS4=$'\1${BASH_SOURCE[0]} ${LINENO} '
unset ASYNCRL_FOLDER BASH_ENV HOSTNAME RANDOM SRANDOM SECONDS EPOCHSECONDS EPOCHREALTIME
cd() {
    [[ ${1-} != -- ]] || shift
    local target=${1-$HOME}
    case $target in (-) target=$OLDPWD ;; (/*) ;; (*) target=$PWD/$target ;; esac
    OLDPWD=$PWD PWD=$(realpath "$target")
}
pwd() { printf '%s\n' "$PWD"; }
command_not_found_handle() {
    case $1 in
        (conda|mamba|mkdir) return 0 ;; # they succeed, and `conda shell.bash hook` sets no variable of a command
        (dirname|basename|seq|expr|tr|date|nproc) "/usr/bin/$@" && return ;;
        (realpath|readlink) /usr/bin/realpath -ms -- "${@: -1}" && return ;;
    esac
    # In the background the input is /dev/null, and nothing uses the exit status.
    [[ /proc/self/fd/0 -ef /dev/null ]] || : missing "$BASH_LINENO" "$@"
    return 127
}
trap 'enable wait; wait' EXIT
trap ': unused' ERR # not run if `if`, `while`, `until`, `&&`, `||` or `!` uses the exit status
exec 9>trace 2>&9
BASH_XTRACEFD=9
set -uEx
# From here on like programs that do not exist.
enable -n . command exec hash kill mapfile read readarray set source trap type ulimit wait
"""


def command_words(arguments: Sequence[str], argument_pattern: str) -> list[str]:
    """Return the words of a command line, or of the command in a shell script, which is then the first argument.

    Further arguments are added to the command, except `NAME=VALUE`, which sets a variable before the script. Raises
    ``ConfigError`` unless the script has exactly one command with arguments that match ``argument_pattern``, if a word
    is not certain, and if it has such arguments outside of a command.
    """
    if not arguments or Path(arguments[0]).suffix not in SHELL_SCRIPTS:
        return list(arguments)
    path, *further_arguments = arguments
    variables = [word for word in further_arguments if _ASSIGNMENT.match(word)]
    try:
        trace = asyncio.run(_trace(path, variables))
    except OSError as error:
        raise ConfigError(f"the script cannot be run in a sandbox: {error}", location=path, hint=PASTE) from error
    command = _command(path, trace, re.compile(argument_pattern))
    return [*command, *(word for word in further_arguments if word not in variables)]


async def _trace(path: str, variables: Sequence[str]) -> str:
    """Run the script and return bash's trace and errors. Raises ``ConfigError``, and ``OSError`` if the sandbox does
    not work."""
    script = f"BASH_ARGV0={shlex.quote(path)}; " + content(path, MAX_SCRIPT_BYTES).decode(errors="surrogateescape")
    for pattern, replacement in _REPLACED:
        script = pattern.sub(replacement, script)
    # No value of the caller's environment gets into a spec.
    environment = ["LC_ALL=C.UTF-8", f"HOME={os.path.expanduser('~')}", f"ASYNCRL_FOLDER={os.getcwd()}", *variables]
    command = shlex.join(["env", "-i", *environment, "BASH_ENV=\2prelude", "bash", "\2script"])
    async with open_sandbox(LIMITS) as sandbox:
        for name, lines in (("\2prelude", _PRELUDE), ("\2script", script)):
            await sandbox.write_file(name, lines.encode(errors="surrogateescape"))
        result = await sandbox.run(f"{command} </dev/zero >/dev/null")
        if result.stopped:
            limit = f"{LIMITS.time_s:.0f} seconds" if result.stopped == "time" else f"its limit of {result.stopped}"
            raise ConfigError(f"the script needs more than {limit}", location=path, hint=PASTE)
        return (await sandbox.read_file("trace")).decode(errors="surrogateescape")


def _command(path: str, trace: str, argument_pattern: re.Pattern[str]) -> list[str]:
    """Return the words of the trainer's command. Raises ``ConfigError``."""
    texts = _RECORD.findall(trace)
    # Programs of a pipeline may write at the same time, and an argument may look like a record.
    if any(not text.endswith("\n") or (depth and _WORD.sub("", text).strip()) for depth, _, _, text in texts):
        raise ConfigError("bash's trace of the script is torn", location=path, hint=f"try again, or {PASTE}")
    records = [
        (len(depth), file, line, (depth and _words(text)) or [text.strip()]) for depth, file, line, text in texts
    ]
    unused_statuses = Counter(line for _, _, line, words in records if words in ([":", "unused"], ["true"], [":"]))
    commands: list[list[str]] = []
    for depth, file, traced_line, traced_words in records:
        is_missing = traced_words[:2] == [":", "missing"]
        if file == "prelude" and not is_missing:
            continue
        line, words = (traced_words[2], traced_words[3:]) if is_missing else (traced_line, traced_words)
        text, location = " ".join(words), f"{path}:{line}"
        if argument_pattern.match(text):
            message = f"`{words[0][:60]}` is not part of the command: the line before does not continue it"
            hint = "end each line of the command with a backslash, without empty lines and comments between them"
            raise ConfigError(message, location=location, hint=hint)
        if not is_missing and depth and any(map(argument_pattern.match, words[launched(words) or len(words) :])):
            commands.append(words)
        if commands:
            continue  # The rest of the script does not change the command.
        if not depth and (unset := _UNSET.match(text)):
            hint = f"add `{unset[1]}=VALUE` after the script"
            raise ConfigError(f"the script does not set {unset[1]}", location=location, hint=hint)
        if not depth and not text.startswith("warning: "):
            raise ConfigError(f"bash reports an error: {text[:120]}", location=location, hint=PASTE)
        if is_missing or "/" in words[0].partition("=")[0]:
            unused_statuses[line] -= 1
            sets_variables = _SETS_VARIABLES.match(text) and not _ENVIRONMENT_SCRIPT.match(text)
            if depth == 1 and unused_statuses[line] >= 0 and not sets_variables:
                continue
        elif not _FILE_TEST.match(text):
            continue
        raise ConfigError(f"only a run has the result of `{text[:60]}`", location=location, hint=PASTE)
    if len(commands) != 1:
        message = f"the script has {len(commands) or 'no'} commands with arguments of the trainer"
        raise ConfigError(message, location=path, hint=PASTE)
    return commands[0]


def _words(text: str) -> list[str]:
    """The words of a line of bash's trace."""

    def unquoted(quoted: re.Match[str]) -> str:
        literal, escaped, character = quoted.groups()
        if escaped is None:
            return literal if literal is not None else character
        escaped = re.sub(r"\\(.)", lambda escape: r"\x1b" if escape[1] == "E" else escape[0], escaped)
        return escape_decode(escaped.encode(errors="surrogateescape"))[0].decode(errors="surrogateescape")

    return [_QUOTED.sub(unquoted, word) for word in _WORD.findall(text)]
