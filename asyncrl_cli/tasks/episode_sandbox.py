"""The sandbox of an episode, for tasks that use one.

A task asks for it with a parameter ``sandbox``: an agent in ``run``; an environment task in ``environment``; an
environment class in its constructor; a ``ToolTask`` in ``tools`` or ``judge``. Agents get a ``ShellSandbox``; the
others run in threads and get a ``BlockingSandbox``. It is opened before the episode and closed after it.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.sandbox.commands import ShellSandbox
from asyncrl_cli.spec.inputs import SandboxSpec
from asyncrl_cli.tasks.base import SPEC_FOLDER, AgentTask, EnvironmentTask, TaskMix, Use

IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
IMAGE_ROWS = 10_000
"""Number of rows of each split to check for their images before a start."""
TRIED_IMAGES = 4
"""Images of rows that are started before a start; the others only have to be here."""


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
    if reason := problem(spec):
        raise TaskError(f"no sandbox can be started here: {reason}", location=location, hint=HINTS[spec.kind])
    for index, path in enumerate(spec.readable):
        if not _from_spec(path).exists():
            raise TaskError(f"{path} does not exist", location=f"{location}.readable.{index}", hint="correct the path")


def check_images(spec: SandboxSpec, splits: Iterable[Sequence[Prompt]], location: str) -> str:
    """Check the images that rows name, and start the first ones. Returns a text that counts them. Raises ``TaskError``
    if one is not here, or starts no shell.
    """
    from asyncrl_cli.sandbox.trial import HINTS, missing_program, problem

    rows_by_image: dict[str, str] = {}
    for prompt in chain.from_iterable(islice(prompts, IMAGE_ROWS) for prompts in splits):
        try:
            rows_by_image.setdefault(image_of(spec, prompt), prompt.uid)
        except SandboxError as error:
            raise TaskError(str(error), location=f"{location}.sandbox.image", hint="correct the column") from error
    for index, (image, uid) in enumerate(rows_by_image.items()):
        settings = spec.model_copy(update={"image": image})
        if reason := problem(settings) if index < TRIED_IMAGES else missing_program(settings):
            text = f"row {uid} has no sandbox here: {reason}"
            raise TaskError(text, location=f"{location}.sandbox.image", hint=HINTS["container"])
    return f"{counted(len(rows_by_image), 'image')}, {min(len(rows_by_image), TRIED_IMAGES)} tried"


def image_of(spec: SandboxSpec, prompt: Prompt) -> str:
    """The container's image for a prompt. Raises ``SandboxError`` if the row does not give the name of an image."""
    try:
        image = str(spec.image).format_map(prompt.fields)
    except (KeyError, LookupError, ValueError, AttributeError) as error:
        raise SandboxError(f"the row {prompt.uid} does not fill the image {spec.image}: {error!r}") from error
    if not IMAGE_NAME.fullmatch(image):  # a name that begins with a dash would be an option of the engine
        raise SandboxError(f"the row {prompt.uid} names no image: {image!r}")
    return image


@asynccontextmanager
async def episode_sandbox(
    task: object, spec: SandboxSpec | None, gateway: str, prompt: Prompt
) -> AsyncIterator[ShellSandbox | None]:
    """Open the sandbox for an episode; None for a task without one. ``gateway``: the episode's base URL.

    Raises ``SandboxError``.
    """
    if spec is None or sandbox_use(task) is Use.NO:
        yield None
        return
    from asyncrl_cli.sandbox.commands import open_sandbox

    further = [""] if getattr(task, "sandbox_reads_spec_folder", False) else []
    readable = [str(_from_spec(path)) for path in (*spec.readable, *further)]
    image = image_of(spec, prompt) if spec.image is not None else None
    async with open_sandbox(spec.model_copy(update={"readable": readable, "image": image}), gateway=gateway) as sandbox:
        yield sandbox


def _from_spec(path: str) -> Path:
    return Path(os.environ.get(SPEC_FOLDER, "."), path).absolute()
