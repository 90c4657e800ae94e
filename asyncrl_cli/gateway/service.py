"""What the gateway serves, and the way of a request from its prompts to the answer: the same for every API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from asyncrl_cli.gateway.answers import encoded, usage
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.errors import ApiError, invalid_value
from asyncrl_cli.gateway.metrics import Metrics
from asyncrl_cli.gateway.protocol import Request as Body
from asyncrl_cli.gateway.requests import Answer, Bodies, Calls, Pieces, Prompts, stream
from asyncrl_cli.gateway.session import CallOptions, OnPart, Render, Rendered, Session
from asyncrl_cli.gateway.sessions import Sessions
from asyncrl_cli.gateway.tool_calls import Tools
from asyncrl_cli.records.prompt import Message

SessionOf = Callable[..., Awaitable[Session | None]]
"""The dependency that finds a call's session, if it has one."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the gateway serves.

    Args:
        sessions: the open sessions of rollouts.
        secret: their keys are derived from it.
        new_session: makes the session of a call that names none; it is closed after the call.
        api_key: the bearer token of such calls; None: there are no such calls.
        chat: the model's chat format.
        model: the name that clients use.
        bodies: reads requests.
    """

    sessions: Sessions
    secret: bytes
    new_session: Callable[[], Session]
    api_key: str | None
    chat: ChatFormat
    model: str
    bodies: Bodies
    calls: Calls = field(default_factory=Calls)
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is kept of a request once its prompts are tokens. ``own``: the session is this call's alone, and ends with
    it."""

    session: Session
    own: bool
    rendered: list[Rendered]
    options: CallOptions
    answer: Answer
    stream: bool


def check_model(service: Service, session: Session | None, model: str | None) -> None:
    """Raise ``ApiError`` for a model that is not served; a request need not name one.

    In a session every name means its one policy: programs bring their own names, and some use several (decision
    0069). Without a session another name is probably a mistake.
    """
    if session is None and model not in (None, service.model):
        message = f"the model {model!r} does not exist; there is {service.model!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


def session_for(service: Service, named: Session | None, body: Body) -> Session:
    """The session of a request: the one that its path names, or a new one.

    Raises ``ApiError`` for a model that is not served, and for a key that cannot be honoured.
    """
    check_model(service, named, body.model)
    body.refuse_unsupported(named is not None and named.fixed_sampling, service.chat.template_kwargs)
    return named or service.new_session()


async def render_chat(
    session: Session, messages: Sequence[Message], tools: Tools | None, render: Render, param: str = "messages"
) -> Rendered:
    """The prompt of a conversation, which ``param`` of the request has. Raises ``ApiError``."""
    if messages and messages[-1]["role"] == "assistant":
        message = f"{param}: the last message must not be the assistant's: a reply cannot be prefilled or continued"
        raise invalid_value(message, param)
    return await session.render_chat(messages, tools, render)


async def respond(service: Service, request: Request, prepared: Prepared) -> Response:
    """Generate, and answer.

    The request's body must have been read, and freed: only a few large ones may be in memory (decision 0022).
    """
    session, options, answer = prepared.session, prepared.options, prepared.answer

    def used(prompts: Prompts) -> None:
        service.metrics.used(usage(prompts))

    async def generate(on_part: OnPart | None) -> Prompts:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(session.answer(rendered, options, _counted(on_part, index * options.n)))
                    for index, rendered in enumerate(prepared.rendered)
                ]
            return [task.result() for task in tasks]
        finally:
            if prepared.own:
                session.close()

    if prepared.stream:
        pieces: Pieces = asyncio.Queue()
        on_part: OnPart = lambda choice, part: pieces.put_nowait((choice, part))  # noqa: E731
        call = service.calls.begin(request, generate(on_part))
        return await stream(call, pieces, answer, used)
    prompts = await service.calls.begin(request, generate(None)).result()
    used(prompts)
    return Response(encoded(answer.complete(prompts)), media_type="application/json")


def _counted(on_part: OnPart | None, first: int) -> OnPart | None:
    """For a prompt whose choices are counted from ``first``."""
    return on_part and (lambda choice, part: on_part(first + choice, part))
