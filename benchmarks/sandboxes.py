"""The cost of sandboxes for commands: to start, to keep, to run a command in, and to close them.

    python benchmarks/sandboxes.py --sandboxes 64

The memory is the proportional set size (PSS) of all processes of a sandbox: a page that N processes share counts 1/N
for each. A command's processor time includes all processes, also the command `true` and its shell. The next column has
the same without a sandbox, by `subprocess.run`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import time
from contextlib import AsyncExitStack

import psutil

from asyncrl_cli.sandbox.commands import ShellSandbox, open_sandbox
from asyncrl_cli.spec.inputs import SandboxSpec

GATEWAY = "http://127.0.0.1:9/v1"


async def opened(stack: AsyncExitStack, count: int) -> list[ShellSandbox]:
    """Start ``count`` sandboxes at the same time."""
    settings = SandboxSpec()
    return await asyncio.gather(
        *(stack.enter_async_context(open_sandbox(settings, gateway=GATEWAY)) for _ in range(count))
    )


def pss_mb(pids: list[int]) -> float:
    """MiB that processes use; shared pages count by share."""
    return float(sum(psutil.Process(pid).memory_full_info().pss for pid in pids)) / 2**20


def processor_s(pids: list[int]) -> float:
    """Processor time (s) of this process, of ``pids``, and of their ended children."""
    times = [psutil.Process(pid).cpu_times() for pid in [os.getpid(), *pids]]
    return float(sum(one.user + one.system + one.children_user + one.children_system for one in times))


async def measure(count: int, commands: int) -> None:
    """Print the rows of a table."""
    async with AsyncExitStack() as stack:  # loads programs into the page cache and imports modules
        await opened(stack, 2)
    threads = os.cpu_count()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        sandboxes = await opened(stack, count)
        print(f"{count} sandboxes started, s, {threads} cores | {time.perf_counter() - began:.2f}")
        pids = [process.pid for process in psutil.Process().children(recursive=True)]
        print(f"processes of one | {len(pids) / count:.1f}")
        print(f"memory of one (PSS), MiB | {pss_mb(pids) / count:.1f}")
        before, began = processor_s(pids), time.perf_counter()
        for index in range(commands):
            await sandboxes[index % count].run("true")
        print(f"a command, one at a time, ms | {1e3 * (time.perf_counter() - began) / commands:.2f}")
        print(f"its processor time, ms | {1e3 * (processor_s(pids) - before) / commands:.2f}")
        began = time.perf_counter()
        await asyncio.gather(*(one.run("true") for one in sandboxes for _ in range(commands // count)))
        print(
            f"commands in all of them at a time, 1/s | {commands // count * count / (time.perf_counter() - began):.0f}"
        )
        before = processor_s([])
        for _ in range(commands // 4):
            subprocess.run(["/bin/bash", "-c", "true"], check=True)
        print(f"processor time without a sandbox, ms | {1e3 * (processor_s([]) - before) / (commands // 4):.2f}")
        began = time.perf_counter()
    print(f"all closed, s | {time.perf_counter() - began:.2f}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    print(f"processor time of all processes that have ended, s | {seconds:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", type=int, default=64)
    parser.add_argument("--commands", type=int, default=1280)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.sandboxes, arguments.commands))


if __name__ == "__main__":
    main()
