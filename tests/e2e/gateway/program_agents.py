"""A task whose agents are unmodified third-party programs (mini-swe-agent, Codex CLI, Claude Code, aider and OpenHands)
and the libraries of ``library_agents``.

A program's session is an episode of the ready task ``command``, in bubblewrap: it may write to its own folders only.
Between agent and gateway is the proxy ``http_record.Recorder``; its records are written to a log, a line per session.

The module is copied into the folder of a run's spec and imported by the run's processes, so it imports no other module
of the tests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calculator import Calculator
from http_record import Exchange, Recorder, is_call, reply_of  # type: ignore[import-not-found]
from library_agents import LIBRARIES  # type: ignore[import-not-found]

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import ModelAccess, RewardResult, Split
from asyncrl_cli.tasks.ready.command import Command, CommandFailed

MARK = "###"
"""Precedes the question, so that a template can find it in the text that a program adds."""
IN_A_BOX = (
    'exec bwrap --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp --ro-bind "$AGENTS" "$AGENTS" '
    '--ro-bind "$HERE" "$HERE" --bind "$ASYNCRL_SCRATCH" "$ASYNCRL_SCRATCH" '
    '--unshare-pid --die-with-parent --chdir "$PWD" '
)
QUIETLY = (
    'out=$ASYNCRL_SCRATCH/out; ( {} ) >"$out" 2>&1 || '
    '{{ s=$?; tail -c 1500 "$out" | tr "\\n" " " >&2; exit $s; }}; echo 1'
)
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Program:
    """How a program is started: a line for the shell, with the question as ``$1``. ``tool`` and ``argument`` are the
    names of its shell tool and of the command's argument. ``ends`` is part of its message when it stops at a limit of
    its own."""

    line: str
    tool: str = ""
    argument: str = "command"
    ends: str = "there is none"


PROGRAMS = {
    "mini-swe-agent": Program(
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=1 mini -y --exit-immediately -c mini.yaml -c agent.step_limit=4 "
        '-o "$HOME/trajectory.json" -t "$1"',
        "bash",
    ),
    "codex": Program(
        'codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$1"',
        "exec_command",
        "cmd",
        ends="reason: max_output_tokens",  # for a truncated reply
    ),
    "claude-code": Program(
        'IS_SANDBOX=1 claude -p "$1" --max-turns 4 --permission-mode bypassPermissions', "Bash", ends="max turns"
    ),
    "aider": Program('aider --no-git --yes-always --no-show-model-warnings --no-stream --message "$1"'),
    "openhands": Program(f'openhands-python {HERE / "openhands_agent.py"} "$1"', "terminal"),
}
FINISH = {"mini-swe-agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {}"}
"""The command that ends a session. Other programs end it with a reply that calls no tool."""
KINDS = (*LIBRARIES, *PROGRAMS)


class Agents:
    """Sums, each answered by one of the kinds of agents."""

    def __init__(self, log: str, path: str, kinds: Sequence[str] = KINDS) -> None:
        """``log`` is the file that gets a line per session, ``path`` the folder with the programs."""
        self._log = log
        self._path = path
        self._kinds = tuple(kinds)
        self._sums = Calculator(max_terms=2)
        self._recorder: asyncio.Task[Recorder] | None = None

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        return self._sums.prompts(split, size)

    def demonstration(self, rng: random.Random) -> Sequence[Message]:
        """A conversation of one kind of agent, up to a random reply of the policy."""
        kind = rng.choice(self._kinds)
        if kind not in PROGRAMS:
            return self._sums.demonstration(rng, clean=True)
        sums = self._sums.demonstration(rng, clean=True)
        expression = sums[0]["content"].removesuffix("=")
        result = str(eval(expression))  # consists of digits and signs only
        messages: list[Message] = [{"role": "user", "content": f"{MARK}{kind} {expression}="}]
        program = PROGRAMS[kind]
        steps = [_call(program, f"echo $(({expression}))")] if program.tool else []
        ending = FINISH.get(kind)
        steps.append(
            _call(program, ending.format(result)) if ending else {"role": "assistant", "content": f"#{result}"}
        )
        for step in steps[: rng.randrange(len(steps))]:
            messages += [step, {"role": "tool", "tool_call_id": "1", "content": result}]
        return [*messages, steps[sum(message["role"] == "tool" for message in messages)]]

    async def run(self, prompt: Prompt, model: ModelAccess) -> RewardResult:
        """One session; its reward is 1.0 for the right number, and up to 0.5 for calls of tools."""
        kind = self._kinds[zlib.crc32(model.rollout_id.encode()) % len(self._kinds)]
        error = ""
        async with (await self._recording()).session(model.base_url) as (base_url, exchanges):
            access = dataclasses.replace(model, base_url=base_url)
            try:
                if kind in LIBRARIES:
                    await LIBRARIES[kind](str(prompt.content), access)
                else:
                    await self._command(kind, f"{MARK}{kind} {prompt.content}").run(prompt, access)
            except CommandFailed as failed:
                error = "" if PROGRAMS[kind].ends in str(failed) else str(failed)
            except Exception as failed:  # libraries raise many types, also for a refusal at a limit
                error = f"{type(failed).__name__}: {failed}"
        session = {"agent": kind, "rollout": model.rollout_id, "failed": error}
        session["exchanges"] = [exchange.as_row() for exchange in exchanges]
        self._write(json.dumps(session).encode() + b"\n")
        return _judged(exchanges, str(prompt.fields["answer"]))

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            while line:
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)

    def _command(self, kind: str, question: str) -> Command:
        line = QUIETLY.format(f'{IN_A_BOX} sh -c {_quoted(PROGRAMS[kind].line)} {kind} "$1"')
        environment = {"PATH": f"{self._path}:{os.environ['PATH']}", "HERE": str(HERE)}
        environment["AGENTS"] = str(Path(self._path).resolve().parent)
        return Command(shlex.join(["/bin/sh", "-c", line, kind, question]), env=environment)

    async def _recording(self) -> Recorder:
        if self._recorder is None:
            self._recorder = asyncio.create_task(_started())
        return await self._recorder


async def _started() -> Recorder:
    recorder = Recorder()
    await recorder.start()
    return recorder


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _call(program: Program, command: str) -> Message:
    function = {"name": program.tool, "arguments": json.dumps({program.argument: command})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def _judged(exchanges: Sequence[Exchange], answer: str) -> RewardResult:
    replies = [reply_of(exchange) for exchange in exchanges if is_call(exchange) and exchange.status == 200]
    right = bool(replies) and replies[-1].text.strip() == f"#{answer}"
    used = sum(bool(reply.calls) for reply in replies)
    return RewardResult(1.0 if right else min(0.5, 0.25 * used), {"calls": float(len(replies))})
