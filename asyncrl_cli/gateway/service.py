"""Request handling shared by all APIs, from prompt to answer.

A generation ends when it is complete, when its client disconnects, or when the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asyncrl_cli.data.images import ImageError, embedded
from asyncrl_cli.gateway.bodies import Bodies
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.errors import CLIENT_GONE, ApiError, as_api_error, invalid_value
from asyncrl_cli.gateway.reply_stream import ReplyPart
from asyncrl_cli.gateway.session import CallOptions, Render, Rendered, Reply, Session
from asyncrl_cli.gateway.sessions import OutsideClients, Sessions
from asyncrl_cli.gateway.wire import ChatBody, encoded
from asyncrl_cli.gateway.wire import Request as Body
from asyncrl_cli.records.prompt import ChatError, Message

T = TypeVar("T")
Prompts = Sequence[Sequence[Reply]]
"""The replies to each prompt of a request."""
PartQueue = asyncio.Queue[tuple[int, ReplyPart] | None]
"""A choice's index over all prompts, and its next part; None when the generation has ended."""


class ReplyFormat(Protocol):
    """The answer to one request, in its API's format: complete, or as server-sent events.

    The events of a choice are any number of ``part_events`` with its reasoning and content, then ``closing``. After all
    choices comes ``end``. After a failure, ``failed`` replaces all events that are missing.
    """

    @property
    def headers(self) -> Mapping[str, str]: ...

    def complete(self, prompts: Prompts) -> Any:
        """The complete answer, as JSON values."""

    def part_events(self, choice: int, reply_part: ReplyPart) -> bytes:
        """Events for more text of a choice."""

    def closing(self, choice: int, reply: Reply) -> bytes:
        """The last events of a choice; all of its events if it has no text."""

    def end(self, prompts: Prompts) -> bytes:
        """The last events of the answer."""

    def failed(self, error: ApiError) -> bytes:
        """The event for a failure after the first event."""


class ConnectedCall(Generic[T]):
    """Running work for a client, which is cancelled if the client disconnects."""

    def __init__(self, request: Request, work: Coroutine[Any, Any, T]) -> None:
        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        self.task = asyncio.create_task(work)
        self._disconnection = asyncio.create_task(disconnected())
        self._disconnection.add_done_callback(lambda _: self.task.cancel())

    async def result(self) -> T:
        """Wait for the result. Raises the work's exceptions, and ``ApiError`` if it was cancelled."""
        try:
            await asyncio.wait({self.task})
        finally:
            self.cancel()
        if not self.task.cancelled():
            return self.task.result()
        if self._disconnection.done() and not self._disconnection.cancelled():
            raise ApiError(CLIENT_GONE, "the client is gone", code="client_gone")
        raise ApiError(503, "the server is stopping", code="server_stopping")

    def cancel(self) -> None:
        self.task.cancel()
        self._disconnection.cancel()


@dataclass(frozen=True, slots=True)
class Service:
    """State shared by all requests.

    Args:
        sessions: the open sessions of rollouts.
        secret: the sessions' keys are derived from it.
        new_session: makes the session for a call without one; it is closed after the call.
        api_key: the key for calls without a session; None: such calls are not served.
        chat: the model's chat format.
        model: the model's name for clients.
        bodies: reads request bodies.
    """

    sessions: Sessions
    secret: bytes
    new_session: Callable[[], Session]
    api_key: str | None
    chat: ChatFormat
    model: str
    bodies: Bodies
    clients: OutsideClients | None = None
    """Access of programs outside of the run; None: they have none."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    """Running work for clients that may take long."""

    def check_model(self, session: Session | None, model: str | None) -> None:
        """Raise ``ApiError`` for a model that is not served; a request may omit the name.

        A session accepts every name, because programs have fixed names and some use several (decision 0016). Without a
        session another name is probably a mistake.
        """
        if session is None and model not in (None, self.model):
            message = f"the model {model!r} does not exist; there is {self.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def session_for(self, open_session: Session | None, body: Body) -> Session:
        """Return the session for a request: the session in its path, or a new one.

        Raises ``ApiError`` for a model that is not served, and for a key that cannot be honoured.
        """
        self.check_model(open_session, body.model)
        body.refuse_unsupported(open_session is not None and open_session.fixed_sampling)
        return open_session or self.new_session()


@dataclass(frozen=True, slots=True)
class Prepared:
    """The parts of a request that are kept after its prompts were rendered."""

    rendered: list[Rendered]
    options: CallOptions
    answer: ReplyFormat


async def render_chat(
    session: Session, body: ChatBody, messages: Sequence[Message], *, render: Render, param: str = "messages"
) -> Rendered:
    """Render a conversation. ``param``: the request's key for it, for errors. Raises ``ApiError``."""
    ends_with_reply = bool(messages) and messages[-1]["role"] == "assistant"
    if ends_with_reply != body.continues(ends_with_reply):
        raise invalid_value(f"{param}: {body.how_to_end}", param)
    try:
        messages, images = await render(partial(embedded, messages, session.max_pixels, session.admit_images))
    except (ChatError, ImageError) as error:
        raise invalid_value(f"{param}: {error}", param) from None
    return await session.render_chat(
        messages,
        body.offered_tools(),
        render,
        variables=body.chat_template_kwargs,
        continues=ends_with_reply,
        images=images,
    )


async def respond(
    service: Service, request: Request, session: Session, prepared: Prepared, *, closes_session: bool, stream: bool
) -> Response:
    """Generate and answer. A failure before a stream's first text is raised, and so still gets a status code.

    ``closes_session``: the session belongs to this call, and ends with it. The caller must have freed the request's
    body, because only a few large ones may be in memory (decision 0016).
    """
    parts_queue: PartQueue | None = asyncio.Queue() if stream else None

    async def generation() -> Prompts:
        try:
            return await _generate(session, prepared, parts_queue)
        finally:
            if closes_session:
                session.close()

    call = ConnectedCall(request, generation())
    service.calls.add(call.task)
    call.task.add_done_callback(service.calls.discard)
    answer = prepared.answer
    if parts_queue is None:
        complete = answer.complete(await call.result())
        return Response(encoded(complete), headers=dict(answer.headers), media_type="application/json")
    queue = parts_queue
    call.task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        first_part = await parts_queue.get()
        if first_part is None:
            await call.result()
    except BaseException:
        call.cancel()
        raise
    return EventStream(_events(call, parts_queue=parts_queue, reply_part=first_part, answer=answer), answer.headers)


async def _generate(session: Session, prepared: Prepared, parts_queue: PartQueue | None) -> Prompts:
    n = prepared.options.n
    on_part = None if parts_queue is None else lambda index, reply_part: parts_queue.put_nowait((index, reply_part))
    replies = await session.answer(prepared.rendered, prepared.options, on_part)
    return [replies[start : start + n] for start in range(0, len(replies), n)]


def token_counts(prompts: Prompts) -> tuple[int, int]:
    """Number of tokens in the prompts, each counted once, and in all replies."""
    prompt = sum(len(replies[0].prompt_ids) for replies in prompts)
    return prompt, sum(len(reply.token_ids) for replies in prompts for reply in replies)


async def _events(
    call: ConnectedCall[Prompts], parts_queue: PartQueue, reply_part: tuple[int, ReplyPart] | None, answer: ReplyFormat
) -> AsyncGenerator[bytes, None]:
    try:
        while reply_part is not None:
            yield answer.part_events(*reply_part)
            reply_part = await parts_queue.get()
        prompts = await call.result()
        for choice, reply in enumerate(reply for replies in prompts for reply in replies):
            yield answer.closing(choice, reply)
        yield answer.end(prompts)
    except Exception as error:
        yield answer.failed(as_api_error(error))
    finally:
        call.cancel()


class EventStream(Response):
    """Server-sent events. If the client disconnects, its ``ConnectedCall`` ends by itself."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event_bytes in events:
                if event_bytes:
                    await send({"type": "http.response.body", "body": event_bytes, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
