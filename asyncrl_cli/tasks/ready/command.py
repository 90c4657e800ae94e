"""The ready task ``command``: any program that calls a model over OpenAI's or Anthropic's API is an agent.

Its environment variables name the policy's server as agents expect it (agent_environment.py), and also:

- ``HOME``: a home folder for the episode;
- ``ASYNCRL_PROMPT``: the row as JSON, if it is not too long; ``ASYNCRL_PROMPT_FILE``: a file with the same;
- ``ASYNCRL_ROLLOUT``: the rollout's id;
- ``ASYNCRL_FOLDER``: the spec file's folder; ``ASYNCRL_SCRATCH``: a folder that is removed after the episode.

The reward is the last line that the program prints, a number or ``{"reward": ..., "metrics": {...}}``, or the result
of the option ``reward`` for the policy's last reply.

With ``task.sandbox`` the program runs in the sandbox. There it can read the spec file's folder, ``ASYNCRL_SCRATCH`` is
the work folder, and it gets only these variables and ``env`` from the environment.

Invariant: when ``run`` returns or is cancelled, no process of the command lives. One exception: if a command kills its
keeper (``system.process_tree``), its processes live until the process that plays episodes ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.commands import ShellSandbox
from asyncrl_cli.spec.base import YEAR_S
from asyncrl_cli.system.process_tree import KILL_TIMEOUT_S, with_keeper
from asyncrl_cli.tasks.base import GIVEN_PYTHONPATH, SPEC_FOLDER, ModelAccess, Reward, RewardResult, Use
from asyncrl_cli.tasks.function_task import FunctionTask, row_of
from asyncrl_cli.tasks.ready.agent_environment import HOME, home_files, inherited_by_agents, session_variables

KEPT_BYTES = 2**16
"""Bytes kept from the end of each of a command's streams."""
LONGEST_VARIABLE = 100_000
"""Bytes that an environment variable may have; the kernel's limit is 128 KiB."""
ROW_FILE, ERRORS = "prompt.json", "errors.txt"
"""Files in a command's folder: the prompt's row, and in a sandbox its standard error."""
CWD = "cwd"
"""The subfolder in which the command starts."""
PIPES_S = 1.0
"""Seconds to read the rest of the output after a command has ended."""


class CommandFailed(Exception):
    """The command ended with an error, or without a reward."""


class Command:
    """The task ``command``."""

    sandbox_use = Use.OPTIONAL
    sandbox_reads_spec_folder = True

    def __init__(
        self, command: str | Sequence[str], env: Mapping[str, str] | None = None, reward: str | None = None
    ) -> None:
        """``command``: a list of words, or a line for the shell. It starts in an empty folder that is removed
        afterwards. ``env`` is added to its environment.

        ``reward``: ``module:function``, called with the row and the text of the last reply. Raises ``TaskError``.
        """
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if not words or not all(isinstance(word, str) and word for word in words):
            raise TaskError(
                "the command is empty, or is not a list of words",
                location="task.options.command",
                hint="give a line for the shell, or a list of words",
            )
        self.name = f"command {command if isinstance(command, str) else shlex.join(words)!r}"
        self._words = words
        relative = "/" in words[0] and not os.path.isabs(words[0])  # to the empty folder
        if relative or shutil.which(words[0], path=(env or {}).get("PATH")) is None:
            raise TaskError(
                f"there is no program {words[0]}" + (" in an empty folder" if relative else ""),
                location="task.options.command",
                hint="correct its name, install it, give an absolute path, or write a line for the shell with "
                "$ASYNCRL_FOLDER",
            )
        self._env = dict(env or {})
        self._reward: FunctionTask | None = None
        if reward is not None:
            location, hint = "task.options.reward", "name a function as module:function, in a file next to the spec"
            function = import_named(reward, None, location=location, hint=hint, error_type=TaskError)
            if not callable(function):
                raise TaskError(f"{reward} is not a function", location=location, hint=hint)
            self._reward = FunctionTask(function, reward, location)

    async def run(
        self, prompt: Prompt, model: ModelAccess, sandbox: ShellSandbox | None = None
    ) -> float | RewardResult | None:
        """Play one episode. Raises ``CommandFailed``."""
        printed = await self.play(prompt, model, sandbox)
        return None if self._reward is not None else _reward_in(_last_line(printed))

    async def play(self, prompt: Prompt, model: ModelAccess, sandbox: ShellSandbox | None) -> str:
        """Run the command for a prompt; returns its output. Raises ``CommandFailed``."""
        status, printed, errors = await (
            self._run_here(prompt, model) if sandbox is None else self._run_inside(prompt, model, sandbox)
        )
        if status != 0:
            last_line = _last_line(errors) or _last_line(printed) or "it printed nothing"
            raise CommandFailed(f"it ended with status {status}: {last_line}")
        return printed

    async def _run_here(self, prompt: Prompt, model: ModelAccess) -> tuple[int, str, str]:
        with tempfile.TemporaryDirectory(prefix="asyncrl-episode-", ignore_cleanup_errors=True) as scratch:
            row = json.dumps(row_of(prompt), default=str)
            for name, text in {ROW_FILE: row, **home_files(model)}.items():
                Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
                Path(scratch, name).write_text(text)
            cwd = Path(scratch, CWD)
            cwd.mkdir()
            # The command may use another Python, so it gets the user's PYTHONPATH instead of the run's module path.
            user_path = os.environ.get(GIVEN_PYTHONPATH, os.environ.get("PYTHONPATH"))
            path = os.pathsep.join(filter(None, (os.environ.get(SPEC_FOLDER), user_path)))
            inherited = inherited_by_agents(os.environ) | {"PYTHONPATH": path}
            return await _run(self._words, cwd, inherited | _variables(row, scratch, model) | self._env)

    async def _run_inside(self, prompt: Prompt, model: ModelAccess, sandbox: ShellSandbox) -> tuple[int, str, str]:
        if sandbox.base_url is not None:
            model = replace(model, base_url=sandbox.base_url)
        row = json.dumps(row_of(prompt), default=str)
        for name, text in {ROW_FILE: row, **home_files(model)}.items():
            await sandbox.write_file(os.path.join(sandbox.scratch, name), text.encode())
        prepare = f"mkdir -p {CWD} && pwd" if not sandbox.scratch else f"echo {sandbox.scratch}"
        where = (await sandbox.run(prepare, time_s=YEAR_S)).output.strip()
        variables = _variables(row, where, model) | {SPEC_FOLDER: os.environ.get(SPEC_FOLDER, "")} | self._env
        cwd, errors_file = (shlex.quote(os.path.join(where, name)) for name in (CWD, ERRORS))
        enter = "" if sandbox.scratch else f"cd {cwd} && "  # an image's working folder has the task's files
        line = f"{enter}exec {shlex.join(self._words)} 2>{errors_file}"
        result = await sandbox.run(line, time_s=YEAR_S, env=variables)  # the episode has its own limit
        if result.stopped:
            raise CommandFailed(f"it reached the sandbox's limit on {result.stopped}")
        errors = b""
        if result.status != 0:
            errors = (await sandbox.read_file(os.path.join(sandbox.scratch, ERRORS)))[-KEPT_BYTES:]
        return result.status or 0, result.output, errors.decode(errors="replace")

    def reward(self, prompt: Prompt, response: str, finished: bool) -> Reward | Awaitable[Reward]:
        """Score the last reply with the option ``reward``."""
        if self._reward is None:
            raise CommandFailed("the task `command` has no option `reward`")
        return self._reward.reward(prompt, response, finished)


def _variables(row: str, scratch: str, model: ModelAccess) -> dict[str, str]:
    """A command's variables. ``row``: the prompt's row as JSON; ``scratch``: the command's folder."""
    variables = session_variables(model, os.path.join(scratch, HOME)) | {
        "ASYNCRL_PROMPT_FILE": os.path.join(scratch, ROW_FILE),
        "ASYNCRL_ROLLOUT": model.rollout_id,
        "ASYNCRL_SCRATCH": scratch,
    }
    return variables | ({"ASYNCRL_PROMPT": row} if len(row.encode()) <= LONGEST_VARIABLE else {})


async def _run(words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a command; returns its exit status and the end of both streams."""
    # Own pipes: asyncio would wait for every process that inherited its pipes.
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    reading = [asyncio.create_task(_end_of(descriptor)) for descriptor in (out, err)]
    try:
        process = await asyncio.create_subprocess_exec(
            *with_keeper(words),
            cwd=cwd,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=to_out,
            stderr=to_err,
            start_new_session=True,
        )
    finally:
        os.close(to_out)
        os.close(to_err)
    try:
        status = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(2 * KILL_TIMEOUT_S):
                await process.wait()
        except TimeoutError:  # the command has stopped its keeper
            process.kill()
        await asyncio.wait(reading, timeout=PIPES_S)
        for task in reading:
            task.cancel()
        printed, errors = await asyncio.gather(*reading)
    return status, printed.decode(errors="replace"), errors.decode(errors="replace")


async def _end_of(descriptor: int) -> bytes:
    """Read a pipe to its end; returns the last bytes."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    last_bytes = b""
    try:
        while chunk := await reader.read(KEPT_BYTES):
            last_bytes = (last_bytes + chunk)[-KEPT_BYTES:]
    except asyncio.CancelledError:
        pass  # another process keeps the pipe open
    finally:
        transport.close()
    return last_bytes


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _reward_in(line: str) -> float | RewardResult:
    """Parse the reward that a command printed. Raises ``CommandFailed``."""
    try:
        value = json.loads(line)
        if isinstance(value, dict):
            return RewardResult(float(value["reward"]), value.get("metrics") or {})
        return float(value)
    except (ValueError, KeyError, TypeError):
        raise CommandFailed(
            f"the last line that it printed is not a reward (a number, or {{'reward': number}}): {line[:200]!r}"
        ) from None
