"""The ready task ``harbor``: tasks in the format of Harbor, each a folder with an image, an instruction and tests.

    NAME/task.toml               time limits, and optionally a ready image
    NAME/instruction.md          the prompt
    NAME/environment/Dockerfile  the image, which is built before the start and named by a hash of this folder
    NAME/tests/test.sh           writes /logs/verifier/reward.txt (a number) or reward.json (numbers by name)

An agent works in the task's container. Then the tests are copied in and run.

Invariant: no file of ``tests`` is in the container before the agent's last command has ended. When the tests run,
``/tests`` and ``/logs/verifier`` have no file that the agent left.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox import container
from asyncrl_cli.sandbox.commands import ShellSandbox
from asyncrl_cli.tasks.base import ModelAccess, RewardResult, Split, Use
from asyncrl_cli.tasks.function_task import AgentFunction
from asyncrl_cli.tasks.ready.command import Command, LimitReached

TESTS, LOGS = "/tests", "/logs/verifier"
"""Folders in a container: the task's tests, and their reward."""
DEFAULT_TIMEOUT_S = 600.0
REPOSITORY = "localhost/asyncrl-harbor"
UNSUPPORTED = {
    "agent": ("user",),
    "verifier": ("user",),
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir"),
    "": ("steps", "multi_step"),
}
"""Settings of task.toml that would change an episode and that this task does not have, by section."""


class VerifierFailed(Exception):
    """The tests of a task gave no reward."""


class Harbor:
    """The task ``harbor``."""

    sandbox_use = Use.REQUIRED

    def __init__(
        self,
        tasks: str,
        command: str | None = None,
        agent: str | None = None,
        eval_tasks: str | None = None,
        env: Mapping[str, str] | None = None,
        spec_folder: Path = Path(),
    ) -> None:
        """``tasks``: a folder with folders of tasks, for training; ``eval_tasks``: another one, for evaluations.

        ``command``: a line for the container's shell, with ``env``, as in the task ``command``; or ``agent``:
        ``module:function``, an async function of the row, the model and the sandbox. Raises ``TaskError``.
        """
        if (command is None) == (agent is None):
            raise TaskError(
                "give one of `command` and `agent`",
                location="task.options",
                hint="command: a line for the container's shell; agent: an async function as module:function",
            )
        self._folders: dict[Split, Path | None] = {
            "train": Path(spec_folder, tasks),
            "eval": None if eval_tasks is None else Path(spec_folder, eval_tasks),
        }
        self.name = "harbor"
        self._command = None if command is None else Command(command, env=env)
        if agent is not None:
            location, hint = (
                "task.options.agent",
                "name an async function as module:function, in a file next to the spec",
            )
            function = import_named(agent, spec_folder, location=location, hint=hint, error_type=TaskError)
            if not asyncio.iscoroutinefunction(function):
                raise TaskError(f"{agent} is not an async function", location=location, hint=hint)
            self._agent = AgentFunction(function, agent)

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """The instructions of the first ``size`` tasks by name, with their images, which are built if they are missing.

        Raises ``TaskError``.
        """
        key = "tasks" if split == "train" else "eval_tasks"
        if (parent := self._folders[split]) is None:
            raise TaskError(
                "no tasks to evaluate on",
                location="task.options.eval_tasks",
                hint="name their folder, or set data.eval to null",
            )
        folders = sorted(path.parent for path in parent.glob("*/task.toml"))
        if len(folders) < size:
            message = f"{parent} has {len(folders)} tasks (folders with task.toml), not {size}"
            raise TaskError(message, location=f"task.options.{key}", hint=f"set data.{split}.size to their number")
        rows = []
        for folder in folders[:size]:
            try:
                settings = _settings(folder)
                instruction = (folder / "instruction.md").read_text().strip()
                (folder / "tests" / "test.sh").stat()
                image = _image(folder, settings)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                hint = "correct the task (docs/tasks.md#harbor)"
                raise TaskError(f"{folder}: {error}", location=f"task.options.{key}", hint=hint) from error
            rows.append(Prompt(f"harbor/{split}/{folder.name}", instruction, {"task": folder.name, "image": image}))
        return rows

    async def run(self, prompt: Prompt, model: ModelAccess, sandbox: ShellSandbox) -> RewardResult:
        """Play one episode, and run the tests. Raises ``CommandFailed``, ``VerifierFailed`` and ``SandboxError``."""
        split: Split = "eval" if prompt.uid.startswith("harbor/eval/") else "train"
        parent = self._folders[split]
        assert parent is not None
        folder = parent / prompt.fields["task"]
        settings = _settings(folder)
        with suppress(TimeoutError, LimitReached):  # the policy must not escape the tests by reaching a limit
            async with asyncio.timeout(_timeout_s(settings, "agent")):
                row = Prompt(prompt.uid, prompt.content, {})
                if self._command is not None:
                    await self._command.play(row, model, sandbox)
                else:
                    await self._agent.run(row, model, sandbox)
        return await _judge(folder / "tests", settings.get("verifier", {}), sandbox)


async def _judge(tests: Path, settings: Mapping[str, Any], sandbox: ShellSandbox) -> RewardResult:
    """Copy the tests into the container and run them. Raises ``VerifierFailed``."""
    result = await sandbox.run(f"rm -rf {TESTS} {LOGS} && mkdir -p {TESTS} {LOGS}")
    if result.status != 0:
        raise VerifierFailed(f"the container's user cannot make {TESTS} and {LOGS}: {result.output.strip()}")
    programs = ["/tests/test.sh"]
    for path in sorted(path for path in tests.rglob("*") if path.is_file()):
        inside = f"{TESTS}/{path.relative_to(tests)}"
        await sandbox.write_file(inside, path.read_bytes())
        if os.access(path, os.X_OK):
            programs.append(inside)
    line = f"chmod +x {shlex.join(programs)} && {TESTS}/test.sh"
    result = await sandbox.run(line, time_s=_timeout_s({"verifier": settings}, "verifier"), env=settings.get("env", {}))
    rewards = []
    for name in ("reward.json", "reward.txt"):
        with suppress(FileNotFoundError):
            text = (await sandbox.read_file(f"{LOGS}/{name}")).decode(errors="replace")
            rewards.append(parsed_reward(name, text))
    if rewards:  # the tested code may have written one of two files
        return min(rewards, key=lambda result: cast("float", result.reward))
    reason = f"reached the limit on {result.stopped}" if result.stopped else f"ended with status {result.status}"
    last_line = (result.output.strip().splitlines() or ["it printed nothing"])[-1]
    raise VerifierFailed(f"test.sh {reason} and wrote no reward: {last_line[:200]}")


def parsed_reward(name: str, text: str) -> RewardResult:
    """The reward in a file: a number, or in reward.json the number named ``reward``, or the only one.

    Raises ``VerifierFailed``.
    """
    try:
        if not name.endswith(".json"):
            return RewardResult(float(text))
        values = {key: float(value) for key, value in json.loads(text).items()}
        reward = values.pop("reward") if "reward" in values else values.pop(*values) if len(values) == 1 else None
        if reward is not None:
            return RewardResult(reward, values)
    except (ValueError, TypeError, AttributeError):
        pass
    raise VerifierFailed(f"{name} has no reward (a number, or a number named `reward`): {text.strip()[:200]!r}")


def _settings(folder: Path) -> dict[str, Any]:
    """A task's settings. Raises ``ValueError`` for those that this task does not have, and ``OSError``."""
    settings = tomllib.loads((folder / "task.toml").read_text())
    for section, keys in UNSUPPORTED.items():
        values = settings.get(section, {}) if section else settings
        for key in keys:
            if values.get(key):
                raise ValueError(f"task.toml sets {f'{section}.{key}'.lstrip('.')}, which asyncrl does not have")
    environment = settings.get("environment", {})
    if environment.get("os", "linux") != "linux":
        raise ValueError("task.toml asks for another system than Linux")
    for variables in (settings.get("verifier", {}).get("env", {}), environment.get("env", {})):
        if any("${" in value for value in variables.values()):
            raise ValueError("task.toml takes variables from this machine (${...}): write their values")
    if environment.get("env"):
        raise ValueError("task.toml sets environment.env, which asyncrl does not have: set it in the Dockerfile")
    _timeout_s(settings, "agent"), _timeout_s(settings, "verifier")
    return settings


def _timeout_s(settings: Mapping[str, Any], section: str, key: str = "timeout_sec") -> float:
    return float(settings.get(section, {}).get(key, DEFAULT_TIMEOUT_S))


def _image(folder: Path, settings: Mapping[str, Any]) -> str:
    """Name of a task's image, which is built if it is missing. Raises ``OSError`` and ``ValueError``."""
    if image := settings.get("environment", {}).get("docker_image"):
        return str(image)
    context = folder / "environment"
    if not (context / "Dockerfile").is_file():
        raise ValueError("there is no environment/Dockerfile (docker-compose.yaml is not supported)")
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in context.rglob("*") if path.is_file()):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(context)}\0{path.stat().st_mode & 0o777:o}\0{len(data)}\0".encode())
        digest.update(data)
    image = f"{REPOSITORY}:{digest.hexdigest()}"
    if container.image_problem(image):
        command = [container.engine(), "build", "--tag", image, str(context)]
        timeout_s = _timeout_s(settings, "environment", "build_timeout_sec")
        built = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if built.returncode:
            lines = (built.stderr.strip() or built.stdout.strip()).splitlines() or ["no message"]
            raise ValueError(f"environment/Dockerfile cannot be built: {lines[-1]}")
    return image
