"""Ctrl-C and SIGTERM: they end what is under way in order."""

from __future__ import annotations

import asyncio
import signal
from typing import Any


class Interrupted(Exception):
    """The user stopped the run."""


def stop_on_signals() -> asyncio.Event:
    """An event that Ctrl-C and SIGTERM set. A second Ctrl-C ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop


async def until_stopped(work: Any, stop: asyncio.Event) -> Any:
    """The result of ``work``; raises ``Interrupted`` when ``stop`` comes first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        stopping.cancel()
        return working.result()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    raise Interrupted
