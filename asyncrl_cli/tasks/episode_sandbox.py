"""The sandbox of an episode, for tasks that use one.

A task asks for it with a parameter ``sandbox``: an agent in ``run``; an environment task in ``environment``; an
environment class in its constructor; a ``ToolTask`` in ``tools`` or ``judge``. Agents get a ``ShellSandbox``; the
others run in threads and get a ``BlockingSandbox``. It is opened before the episode and closed after it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.sandbox.commands import ShellSandbox
from asyncrl_cli.spec.inputs import SandboxSpec
from asyncrl_cli.tasks.base import SPEC_FOLDER, AgentTask, EnvironmentTask, TaskMix, Use


def parameter_use(function: Callable[..., Any]) -> Use:
    """How a function uses a sandbox, according to its parameter ``sandbox``."""
    try:
        parameter = inspect.signature(function).parameters.get("sandbox")
    except ValueError:  # a builtin without a signature
        return Use.NO
    if parameter is None:
        return Use.NO
    return Use.REQUIRED if parameter.default is parameter.empty else Use.OPTIONAL


def sandbox_use(task: object) -> Use:
    """How a task uses a sandbox, according to its attribute ``sandbox_use`` or its method's parameter."""
    if isinstance(stated := getattr(task, "sandbox_use", None), Use):
        return stated
    if isinstance(task, AgentTask):
        return parameter_use(task.run)
    return parameter_use(task.environment) if isinstance(task, EnvironmentTask) else Use.NO


def check_sandbox(task: object, spec: SandboxSpec | None, location: str = "task") -> None:
    """Raise ``TaskError`` if the task cannot use the sandbox, needs one that is missing, or if none can start here."""
    from asyncrl_cli.sandbox.trial import HINTS, problem

    uses = [sandbox_use(member) for member in (task.members.values() if isinstance(task, TaskMix) else [task])]
    location = f"{location}.sandbox"
    if spec is None:
        if Use.REQUIRED in uses:
            raise TaskError(
                "the task needs a sandbox, and the spec has none",
                location=location,
                hint="set task.sandbox, such as {kind: bubblewrap}, or give its parameter `sandbox` a default",
            )
        return
    if set(uses) == {Use.NO}:
        raise TaskError(
            "the task does not use a sandbox",
            location=location,
            hint="remove task.sandbox; or use the task `command`, or give the agent, the environment, or a tool task's "
            "`tools` or `judge` a parameter `sandbox`",
        )
    if reason := problem(spec.kind):
        raise TaskError(f"no sandbox can be started here: {reason}", location=location, hint=HINTS[spec.kind])
    for index, path in enumerate(spec.readable):
        if not _from_spec(path).exists():
            raise TaskError(f"{path} does not exist", location=f"{location}.readable.{index}", hint="correct the path")


@asynccontextmanager
async def episode_sandbox(task: object, spec: SandboxSpec | None, gateway: str) -> AsyncIterator[ShellSandbox | None]:
    """Open the sandbox for an episode; None for a task without one. ``gateway``: the episode's base URL.

    Raises ``SandboxError``.
    """
    if spec is None or sandbox_use(task) is Use.NO:
        yield None
        return
    from asyncrl_cli.sandbox.commands import open_sandbox

    further = [""] if getattr(task, "sandbox_reads_spec_folder", False) else []
    readable = [str(_from_spec(path)) for path in (*spec.readable, *further)]
    async with open_sandbox(spec.model_copy(update={"readable": readable}), gateway=gateway) as sandbox:
        yield sandbox


def _from_spec(path: str) -> Path:
    return Path(os.environ.get(SPEC_FOLDER, "."), path).absolute()
