"""Check whether this machine supports a kind of sandbox, and list what is missing."""

from __future__ import annotations

import asyncio
import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.sandbox import commands, container, filters, judge
from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.spec.inputs import SandboxSpec

HINTS: dict[commands.SandboxKind, str] = {
    "bubblewrap": "install bubblewrap (Debian, Ubuntu: apt install bubblewrap libseccomp2), or allow user namespaces",
    "container": "get the image with `podman pull IMAGE` or `podman build`; without an engine, install podman (Debian, "
    "Ubuntu: apt install podman) or docker",
}
NO_GATEWAY = "http://127.0.0.1:9/v1"
"""The gateway's address in a trial: nothing listens there."""


def missing_program(settings: SandboxSpec) -> str:
    """Name the part that this machine lacks for a sandbox; "" if nothing is known to be missing."""
    if settings.kind == "none":
        return ""
    if settings.kind == "container":
        try:
            container.engine()
        except SandboxError as error:
            return str(error)
        return "" if settings.image is None or "{" in settings.image else container.image_problem(settings.image)
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        filters.for_code()
    except OSError as error:
        return f"libseccomp cannot be used ({error})"
    return ""


def problem(settings: SandboxSpec) -> str:
    """Why a sandbox for commands does not work on this machine; "" if a command ran in one.

    An image with columns is not tried.
    """
    has_no_image = settings.kind == "container" and "{" in (settings.image or "{")
    if (reason := missing_program(settings)) or settings.kind == "none" or has_no_image:
        return reason
    # In another thread, because this one may already run an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _try_command(settings)).result()


@functools.cache
def check_judge(sandbox_kind: judge.SandboxKind) -> None:
    """Try a kind of sandbox for judged code. Raises ``TaskError`` if it does not work."""
    if sandbox_kind not in get_args(judge.SandboxKind):
        raise TaskError(
            f"there is no sandbox {sandbox_kind!r}",
            location="task.options.sandbox",
            hint=f"choose one of {', '.join(get_args(judge.SandboxKind))}",
        )
    if not (reason := missing_program(SandboxSpec(kind=sandbox_kind))):
        try:
            judge.run("", tests=[judge.Check("")], limits=judge.Limits(), sandbox_kind=sandbox_kind)
            return
        except SandboxError as error:
            reason = str(error)
    raise TaskError(
        f"no sandbox for the model's code works here: {reason}",
        hint=f"{HINTS['bubblewrap']}; with the option `sandbox: none` the code runs without a sandbox and can do "
        "anything that your user can do",
    )


async def _try_command(settings: SandboxSpec) -> str:
    if settings.kind == "container":
        settings = settings.model_copy(update={"readable": []})
        command, expected = "echo 1", "1\n"  # its files and its working folder are the image's
    else:
        settings = SandboxSpec(kind=settings.kind, network="none")
        command, expected = "pwd; ls -d /root/.bashrc /etc/shadow 2>/dev/null; ls -d .", f"{commands.WORK_FOLDER}\n.\n"
    try:
        async with commands.open_sandbox(settings, gateway=NO_GATEWAY) as sandbox:
            result = await sandbox.run(command)
    except OSError as error:
        return str(error)
    return "" if result.output == expected else f"a command answered {result.output.strip()!r}"
