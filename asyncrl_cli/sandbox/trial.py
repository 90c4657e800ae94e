"""Check whether this machine supports a kind of sandbox, and list what is missing."""

from __future__ import annotations

import asyncio
import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.sandbox import commands, filters, judge
from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.spec.inputs import SandboxSpec

HINTS: dict[commands.SandboxKind, str] = {
    "bubblewrap": "install bubblewrap (Debian, Ubuntu: apt install bubblewrap libseccomp2), or allow user namespaces",
}
COMMAND = "ls -d /root/.bashrc /etc/shadow 2>/dev/null; ls -d ."


def missing_program(sandbox_kind: commands.SandboxKind) -> str:
    """Name the part that this machine lacks for a kind of sandbox; "" if nothing is known to be missing."""
    if sandbox_kind == "none":
        return ""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        filters.for_code()
    except OSError as error:
        return f"libseccomp cannot be used ({error})"
    return ""


def problem(sandbox_kind: commands.SandboxKind) -> str:
    """Why a kind of sandbox for commands does not work on this machine; "" if a command ran in one."""
    if (reason := missing_program(sandbox_kind)) or sandbox_kind == "none":
        return reason
    # In another thread, because this one may already run an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _try_command(sandbox_kind)).result()


@functools.cache
def check_judge(sandbox_kind: judge.SandboxKind) -> None:
    """Try a kind of sandbox for judged code. Raises ``TaskError`` if it does not work."""
    if sandbox_kind not in get_args(judge.SandboxKind):
        raise TaskError(
            f"there is no sandbox {sandbox_kind!r}",
            location="task.options.sandbox",
            hint=f"choose one of {', '.join(get_args(judge.SandboxKind))}",
        )
    if not (reason := missing_program(sandbox_kind)):
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


async def _try_command(sandbox_kind: commands.SandboxKind) -> str:
    try:
        async with commands.open_sandbox(SandboxSpec(kind=sandbox_kind, network="none")) as sandbox:
            result = await sandbox.run(f"pwd; {COMMAND}")
    except OSError as error:
        return str(error)
    if result.output != f"{commands.WORK_FOLDER}\n.\n":
        return f"a command answered {result.output.strip()!r}"
    return ""
