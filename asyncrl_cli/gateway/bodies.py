"""Read request bodies. Each has a size limit and a deadline, and only a few large ones are in memory at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from asyncrl_cli.gateway.errors import CLIENT_GONE, ApiError, malformed
from asyncrl_cli.gateway.session import Render
from asyncrl_cli.gateway.wire import Wire

LARGE = 64 * 2**10
"""A body with more bytes counts as large."""
LARGE_AT_ONCE = 16
"""Limit on the large bodies that are read, parsed or rendered at a time."""
ROOM_S = 120.0
"""Seconds that a large body may wait for others, in addition to the time to arrive."""

T = TypeVar("T")
W = TypeVar("W", bound=Wire)


class Bodies:
    """Reads bodies of up to ``limit`` bytes, each within ``seconds``."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._room_for_large = asyncio.Semaphore(LARGE_AT_ONCE)
        # Two threads: a large body delays only other large ones, and memory is bounded (decision 0016).
        self._threads = {large: ThreadPoolExecutor(1, thread_name_prefix="render") for large in (False, True)}

    @asynccontextmanager
    async def read(self, request: Request, body_type: type[W]) -> AsyncIterator[tuple[W, Render]]:
        """Yield a request's body, and a function that renders it in a thread. Leave the block once it is rendered,
        because a large body keeps others out until then.

        Raises ``ApiError`` if the body is too large, late, or malformed.
        """
        async with AsyncExitStack() as room:
            data = await self._read(request, room)
            large = len(data) > LARGE or b"base64" in data  # a small image may take long to decode
            render, validate = self._render(large), partial(body_type.model_validate_json, data)
            try:
                body = await render(validate) if large else validate()
            except ValidationError as error:
                raise malformed(error) from None
            yield body, render

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, request: Request, room: AsyncExitStack) -> bytes:
        length = request.headers.get("content-length", "")
        chunks, size = [], 0
        try:
            self._check(int(length) if length.isdecimal() and len(length) < 20 else 0)
            async with asyncio.timeout(self._seconds) as limit:
                async for chunk in request.stream():
                    self._check(size + len(chunk))
                    if size <= LARGE < size + len(chunk):
                        await self._wait_for_room(room, limit)
                    size += len(chunk)
                    chunks.append(chunk)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._seconds:g} s", code="request_timeout") from None
        except ClientDisconnect:
            raise ApiError(CLIENT_GONE, "the client is gone", code="client_gone") from None
        return b"".join(chunks)

    async def _wait_for_room(self, room: AsyncExitStack, limit: asyncio.Timeout) -> None:
        loop, deadline = asyncio.get_running_loop(), limit.when()
        assert deadline is not None
        remaining_s = deadline - loop.time()
        limit.reschedule(None)  # the client's deadline stands still while the server makes it wait
        try:
            async with asyncio.timeout(ROOM_S):
                await room.enter_async_context(self._room_for_large)
        except TimeoutError:
            raise ApiError(503, f"no room for a large body within {ROOM_S:g} s", code="overloaded") from None
        limit.reschedule(loop.time() + remaining_s)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise ApiError(413, f"the body has more than {self._limit} bytes", code="request_too_large")

    def _render(self, large: bool) -> Render:
        threads = self._threads[large]

        async def render(work: Callable[[], T]) -> T:
            return await asyncio.get_running_loop().run_in_executor(threads, work)

        return render
