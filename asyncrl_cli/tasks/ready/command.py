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

Invariant: when ``run`` returns or is cancelled, no process of the command lives. One exception: if a command without a
sandbox kills its supervisor (``sandbox.supervisor``), its processes live until the process that plays episodes ends.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from itertools import chain

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.commands import ShellSandbox, open_sandbox
from asyncrl_cli.spec.base import YEAR_S
from asyncrl_cli.spec.inputs import SandboxSpec
from asyncrl_cli.tasks.base import GIVEN_PYTHONPATH, SPEC_FOLDER, ModelAccess, Reward, RewardResult, Use
from asyncrl_cli.tasks.function_task import FunctionTask, row_of
from asyncrl_cli.tasks.ready.agent_environment import HOME, home_files, inherited_by_agents, session_variables

LONGEST_VARIABLE = 100_000
"""Bytes that an environment variable may have; the kernel's limit is 128 KiB."""
ROW_FILE = "prompt.json"
"""File in a command's folder with the prompt's row."""
CWD = "cwd"
"""The subfolder in which the command starts."""


class CommandFailed(Exception):
    """The command ended with an error, or without a reward."""


class LimitReached(CommandFailed):
    """The command was stopped at a limit of its sandbox."""


class Command:
    """The task ``command``."""

    sandbox_use = Use.OPTIONAL
    sandbox_reads_spec_folder = True

    def __init__(self, command: str, env: Mapping[str, str] | None = None, reward: str | None = None) -> None:
        """``command``: a line for the shell. It starts in an empty folder that is removed afterwards. ``env`` is added
        to its environment.

        ``reward``: ``module:function``, called with the row and the text of the last reply. Raises ``TaskError``.
        """
        if not isinstance(command, str) or not command.strip():
            raise TaskError(
                f"the command {command!r} is not a line for the shell",
                location="task.options.command",
                hint="write what you would type, such as `python $ASYNCRL_FOLDER/agent.py`",
            )
        variables = {} if env is None else env
        if not isinstance(variables, Mapping) or not all(isinstance(text, str) for text in chain(*variables.items())):
            hint = 'put numbers in quotes, such as {DEBUG: "1"}'
            raise TaskError(f"{env!r} is not a mapping of texts", location="task.options.env", hint=hint)
        self.name = f"command {command!r}"
        self._command = command
        self._env = dict(variables)
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
        if sandbox is not None:
            return await self._play_in(sandbox, prompt, model, {SPEC_FOLDER: os.environ.get(SPEC_FOLDER, "")})
        # The command may use another Python, so it gets the user's PYTHONPATH instead of the run's module path.
        user_path = os.environ.get(GIVEN_PYTHONPATH, os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(filter(None, (os.environ.get(SPEC_FOLDER), user_path)))
        inherited = inherited_by_agents(os.environ) | {"PYTHONPATH": path}
        async with open_sandbox(SandboxSpec(kind="none")) as unconfined:
            return await self._play_in(unconfined, prompt, model, inherited)

    async def _play_in(
        self, sandbox: ShellSandbox, prompt: Prompt, model: ModelAccess, environment: Mapping[str, str]
    ) -> str:
        if sandbox.base_url is not None:
            model = replace(model, base_url=sandbox.base_url)
        row = json.dumps(row_of(prompt), default=str)
        for name, text in {ROW_FILE: row, **home_files(model)}.items():
            await sandbox.write_file(os.path.join(sandbox.scratch, name), text.encode())
        prepare = f"mkdir -p {CWD} && pwd" if not sandbox.scratch else f"echo {sandbox.scratch}"
        where = (await sandbox.run(prepare, time_s=YEAR_S)).output.strip()
        # An image's working folder has the task's files.
        enter = "" if sandbox.scratch else f"cd {shlex.quote(os.path.join(where, CWD))} && "
        line = f"{enter}exec /bin/sh -c {shlex.quote(self._command)}"
        variables = {**environment, **_variables(row, where, model), **self._env}
        # The episode has its own limit. Errors stay apart, because the last line of the output is the reward.
        result = await sandbox.run(line, time_s=YEAR_S, env=variables, errors_apart=True)
        if result.stopped:
            raise LimitReached(f"it reached the sandbox's limit on {result.stopped}")
        if result.status != 0:
            last_line = _last_line(result.errors) or _last_line(result.output)
            raise CommandFailed(f"it ended with status {result.status}: {last_line or 'it printed nothing'}")
        return result.output

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
