"""One request's generation: it ends when it is done, when its client is gone, or when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asyncrl_cli.gateway.answers import END_OF_STREAM, event
from asyncrl_cli.gateway.errors import CLIENT_GONE, ApiError, as_api_error
from asyncrl_cli.gateway.session import Reply

Prompts = Sequence[Sequence[Reply]]
"""The replies to each prompt of a request."""
OnText = Callable[[int, str], None]
"""Gets a choice's index, counted over all prompts, and its next piece of text."""


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
        """End them; their clients are told that the server stops."""
        for task in self._tasks:
            task.cancel()


class Call:
    """A generation under way, and an eye on its client."""

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
        """Stop whatever still runs."""
        self.task.cancel()
        self._gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Streamed(Protocol):
    """How an answer is said in events (``answers.ChatAnswer``, ``answers.TextAnswer``)."""

    def opening(self, choice: int) -> bytes: ...
    def piece(self, choice: int, text: str) -> bytes: ...
    def closing(self, choice: int, reply: Reply, sent: str) -> Iterator[bytes]: ...
    def used(self, prompts: Prompts) -> bytes: ...


class Pieces:
    """Text as it comes, and then the end. ``on_text`` may be called until the generation's task is done."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()

    def on_text(self, choice: int, text: str) -> None:
        """Take a piece."""
        self._queue.put_nowait((choice, text))

    def end_with(self, call: Call) -> None:
        """The pieces end when the generation does."""
        call.task.add_done_callback(lambda _: self._queue.put_nowait(None))

    async def next(self) -> tuple[int, str] | None:
        """The next piece; None after the last one."""
        return await self._queue.get()


async def stream(
    call: Call, pieces: Pieces, answer: Streamed, with_usage: bool, used: Callable[[Prompts], None]
) -> Response:
    """The streamed answer. What fails before there is any text is raised, so that it gets its own status code."""
    pieces.end_with(call)
    try:
        first = await pieces.next()
        if first is None:
            await call.result()
    except BaseException:
        call.end()
        raise
    return EventStream(_events(call, pieces, first, answer, with_usage, used))


async def _events(
    call: Call,
    pieces: Pieces,
    piece: tuple[int, str] | None,
    answer: Streamed,
    with_usage: bool,
    used: Callable[[Prompts], None],
) -> AsyncGenerator[bytes, None]:
    sent: dict[int, str] = {}
    try:
        while piece is not None:
            choice, text = piece
            if choice not in sent:
                yield answer.opening(choice)
            sent[choice] = sent.get(choice, "") + text
            yield answer.piece(choice, text)
            piece = await pieces.next()
        prompts = await call.result()
    except Exception as error:
        yield event(as_api_error(error).body())
        return
    finally:
        call.end()
    used(prompts)
    for choice, reply in enumerate(reply for replies in prompts for reply in replies):
        if choice not in sent:
            yield answer.opening(choice)
        for closing in answer.closing(choice, reply, sent.get(choice, "")):
            yield closing
    if with_usage:
        yield answer.used(prompts)
    yield END_OF_STREAM


class EventStream(Response):
    """Server-sent events. Nothing is sent to a client that is gone; its ``Call`` ends by itself."""

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
