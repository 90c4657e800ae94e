"""The driver's side of `asyncrl scale`: requests in the run's folder, answered there."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asyncrl_cli.orchestrator.engine_pool import EnginePool
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.scaling import ScaleAnswer, answer_request, pending_request, remember_wanted, wanted_engines

LOOK_S = 1.0
"""Seconds between two looks for a request."""


async def answer_scale_requests(run: RunDirectory, pool: EnginePool) -> None:
    """Set the pool's target to the number that an earlier driver was asked for; then answer requests: carry them out,
    or refuse them. Never ends."""
    if (wanted := wanted_engines(run, pool.bounds)) is not None:
        pool.want(wanted)
    while True:
        await asyncio.sleep(LOOK_S)
        request = await asyncio.to_thread(pending_request, run)
        if request is None:
            continue
        # A full disk must not end the run; the command that made the request notices the missing answer.
        with suppress(OSError):
            try:
                pool.want(request.engines)
            except ValueError as refused:
                answer = ScaleAnswer(request.id, False, str(refused))
            else:
                await asyncio.to_thread(remember_wanted, run, request.engines, pool.bounds)
                answer = ScaleAnswer(request.id, True)
            await asyncio.to_thread(answer_request, run, answer)
