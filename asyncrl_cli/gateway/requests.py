"""One request: its body, its generation, and its streamed answer.

A body has a size limit and a deadline, and only a few large ones are in memory at a time. A generation ends when it is
done, when its client is gone, or when the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asyncrl_cli.gateway.errors import CLIENT_GONE, ApiError, as_api_error, malformed
from asyncrl_cli.gateway.protocol import Wire
from asyncrl_cli.gateway.session import Render, Reply
from asyncrl_cli.gateway.text_stream import Kind, Part

LARGE = 64 * 2**10
"""Bytes above which a body counts as large."""
LARGE_AT_ONCE = 16
"""Large bodies that are read, parsed or rendered at a time."""
ROOM_S = 120.0
"""Seconds that a large body waits for others, in addition to the time that it may take to arrive."""

Prompts = Sequence[Sequence[Reply]]
"""The replies to each prompt of a request."""
Pieces = asyncio.Queue[tuple[int, Part] | None]
"""Choices, counted over all prompts, and their next parts; then None when the generation has ended."""
Sent = Mapping[Kind, str]
"""What has been sent of a choice."""


class Answer(Protocol):
    """The answer to one request, in the form of its API: complete, or as server-sent events.

    The events of a choice are ``opening``, any number of ``piece`` and ``closing``. After those of all choices comes
    ``end``; ``failed`` comes instead of all that is missing.
    """

    def complete(self, prompts: Prompts) -> Any:
        """The JSON of the answer to a request that is not streamed."""

    def opening(self, choice: int) -> bytes:
        """The first events of a choice; empty when it needs none."""

    def piece(self, choice: int, part: Part) -> bytes:
        """More of a choice."""

    def closing(self, choice: int, reply: Reply, sent: Sent) -> Iterator[bytes]:
        """The last events of a choice, with all that has not been sent of its reply."""

    def end(self, prompts: Prompts) -> Iterator[bytes]:
        """The last events of the answer."""

    def failed(self, error: ApiError) -> bytes:
        """The event of a failure after the first event."""


T = TypeVar("T")
W = TypeVar("W", bound=Wire)


class Bodies:
    """Reads bodies of up to ``limit`` bytes, each within ``seconds``."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._room = asyncio.Semaphore(LARGE_AT_ONCE)
        # A large body delays only other large ones; one thread for each kind bounds the memory (decision 0022).
        self._threads = {large: ThreadPoolExecutor(1, thread_name_prefix="render") for large in (False, True)}

    @asynccontextmanager
    async def read(self, request: Request, kind: type[W]) -> AsyncIterator[tuple[W, Render]]:
        """A request's body, and where to render it; end the block as soon as it is rendered.

        Raises ``ApiError`` when it is too large, late, or malformed.
        """
        async with AsyncExitStack() as room:
            data = await self._read(request, room)
            large = len(data) > LARGE
            render, validate = self._render(large), partial(kind.model_validate_json, data)
            try:
                body = await render(validate) if large else validate()
            except ValidationError as error:
                raise malformed(error) from None
            yield body, render

    def close(self) -> None:
        """Start no further rendering."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, request: Request, room: AsyncExitStack) -> bytes:
        length = request.headers.get("content-length", "")
        parts, size = [], 0
        try:
            self._check(int(length) if length.isdecimal() and len(length) < 20 else 0)
            async with asyncio.timeout(self._seconds) as limit:
                async for part in request.stream():
                    self._check(size + len(part))
                    if size <= LARGE < size + len(part):
                        await self._wait_for_room(room, limit)
                    size += len(part)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._seconds:g} s", code="request_timeout") from None
        except ClientDisconnect:
            raise ApiError(CLIENT_GONE, "the client is gone", code="client_gone") from None
        return b"".join(parts)

    async def _wait_for_room(self, room: AsyncExitStack, limit: asyncio.Timeout) -> None:
        loop, when = asyncio.get_running_loop(), limit.when()
        assert when is not None
        left = when - loop.time()
        limit.reschedule(None)
        try:
            async with asyncio.timeout(ROOM_S):
                await room.enter_async_context(self._room)
        except TimeoutError:
            raise ApiError(503, f"no room for a large body within {ROOM_S:g} s", code="overloaded") from None
        limit.reschedule(loop.time() + left)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise ApiError(413, f"the body has more than {self._limit} bytes", code="request_too_large")

    def _render(self, large: bool) -> Render:
        threads = self._threads[large]

        async def render(work: Callable[[], T]) -> T:
            return await asyncio.get_running_loop().run_in_executor(threads, work)

        return render


class Calls:
    """The generations under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Prompts]] = set()

    def begin(self, request: Request, work: Coroutine[Any, Any, Prompts]) -> Call:
        """Start to generate. The request's body must have been read."""
        call = Call(request, work)
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)
        return call

    def cancel_all(self) -> None:
        """Cancel all; their clients get an error that the server stops."""
        for task in self._tasks:
            task.cancel()


class Call:
    """A generation under way, cancelled when its client disconnects."""

    def __init__(self, request: Request, work: Coroutine[Any, Any, Prompts]) -> None:
        self.task = asyncio.create_task(work)
        self._gone = asyncio.create_task(_disconnected(request))
        self._gone.add_done_callback(lambda _: self.task.cancel())

    async def result(self) -> Prompts:
        """What was generated. Raises what the generation raised, and ``ApiError`` when it was cancelled."""
        try:
            await asyncio.wait({self.task})
        finally:
            self.end()
        if not self.task.cancelled():
            return self.task.result()
        if self._gone.done() and not self._gone.cancelled():
            raise ApiError(CLIENT_GONE, "the client is gone", code="client_gone")
        raise ApiError(503, "the server is stopping", code="server_stopping")

    def end(self) -> None:
        """Cancel what still runs."""
        self.task.cancel()
        self._gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(call: Call, pieces: Pieces, answer: Answer, used: Callable[[Prompts], None]) -> Response:
    """The streamed answer. A failure before the first text is raised, so that it gets its own status code."""
    call.task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        first = await pieces.get()
        if first is None:
            await call.result()
    except BaseException:
        call.end()
        raise
    return EventStream(_events(call, pieces, first, answer, used))


async def _events(
    call: Call, pieces: Pieces, piece: tuple[int, Part] | None, answer: Answer, used: Callable[[Prompts], None]
) -> AsyncGenerator[bytes, None]:
    sent: dict[int, dict[Kind, str]] = {}
    try:
        while piece is not None:
            choice, part = piece
            if choice not in sent:
                sent[choice] = {}
                yield answer.opening(choice)
            sent[choice][part.kind] = sent[choice].get(part.kind, "") + part.text
            yield answer.piece(choice, part)
            piece = await pieces.get()
        prompts = await call.result()
        used(prompts)
        for choice, reply in enumerate(reply for replies in prompts for reply in replies):
            if choice not in sent:
                yield answer.opening(choice)
            for closing in answer.closing(choice, reply, sent.get(choice, {})):
                yield closing
        for last in answer.end(prompts):
            yield last
    except Exception as error:
        yield answer.failed(as_api_error(error))
    finally:
        call.end()


class EventStream(Response):
    """Server-sent events. The ``Call`` of a client that is gone ends by itself."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for one in events:
                if one:
                    await send({"type": "http.response.body", "body": one, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
