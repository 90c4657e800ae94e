"""Check whether this machine supports a kind of sandbox, and list what is missing."""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.sandbox import commands, confine, filters, judge
from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.spec.inputs import SandboxSpec

Wanted = Literal["auto", "bubblewrap", "seccomp", "none"]
OLDEST_GVISOR = 20240729
"""The oldest version (a date) that works. In Debian 12's, from 2022, `ls` fails, and it does not start unprivileged."""
HINTS: dict[commands.Kind, str] = {
    "bubblewrap": "install bubblewrap (Debian, Ubuntu: apt install bubblewrap libseccomp2)",
    "gvisor": "install bubblewrap, and gVisor's runsc of 2024-07-29 or later (Debian 13: apt install runsc; Debian 12: "
    "apt install -t bookworm-backports runsc; else https://gvisor.dev/docs/user_guide/install), on every node",
}
COMMAND = "ls -d /root/.bashrc /etc/shadow 2>/dev/null; ls -d ."


def missing(kind: commands.Kind | judge.Kind) -> str:
    """Name the part that this machine lacks for a kind of sandbox; "" if nothing is known to be missing."""
    if kind == "none":
        return ""
    if kind != "seccomp" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if kind == "seccomp" and not confine.landlock_version():
        return "this kernel has no Landlock"
    try:
        filters.for_code()
    except OSError as error:
        return f"libseccomp cannot be used ({error})"
    if kind == "gvisor":
        if shutil.which("runsc") is None:
            return "runsc (gVisor) is not installed"
        version = subprocess.run(["runsc", "--version"], capture_output=True, text=True, check=False).stdout
        date = re.search(r"20\d{6}", version)
        if date is not None and int(date.group()) < OLDEST_GVISOR:
            return f"runsc (gVisor) {date.group()} is too old: {OLDEST_GVISOR} is the oldest version that works"
    return ""


def problem(kind: commands.Kind) -> str:
    """Why a kind of sandbox for commands does not work on this machine; "" if a command ran in one."""
    if (reason := missing(kind)) or kind == "none":
        return reason
    # In another thread, because this one may already run an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _tried(kind)).result()


@functools.cache
def choose(wanted: Wanted = "auto") -> judge.Kind:
    """Try the ``wanted`` kind of sandbox for judged code and return it; with ``auto``, the strongest one that works.

    Raises ``TaskError`` if none works.
    """
    if wanted not in get_args(Wanted):
        raise TaskError(
            f"there is no sandbox {wanted!r}",
            location="task.options.sandbox",
            hint=f"choose one of {', '.join(get_args(Wanted))}",
        )
    kinds: tuple[judge.Kind, ...] = ("bubblewrap", "seccomp") if wanted == "auto" else (wanted,)
    reasons = []
    for kind in kinds:
        if not (reason := missing(kind)):
            try:
                judge.run("", tests=[judge.Check("")], limits=judge.Limits(), kind=kind)
                return kind
            except SandboxError as error:
                reason = str(error)
        reasons.append(f"{kind}: {reason}")
    raise TaskError(
        f"no sandbox for the model's code works here ({'; '.join(reasons)})",
        hint="install bubblewrap (Debian, Ubuntu: apt install bubblewrap libseccomp2), or allow user namespaces; "
        "with the option `sandbox: none` the code runs without a sandbox and can do anything that your user can do",
    )


async def _tried(kind: commands.Kind) -> str:
    try:
        async with commands.open_sandbox(SandboxSpec(kind=kind, network="none")) as sandbox:
            result = await sandbox.run(f"pwd; {COMMAND}")
    except OSError as error:
        return str(error)
    if result.output != f"{commands.WORK_FOLDER}\n.\n":
        return f"a command answered {result.output.strip()!r}"
    return ""
