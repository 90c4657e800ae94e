"""The application: which path does what.

A request ends in bounded time: its body must arrive in time (bodies.py), and its generation is bounded by the session's
limits and by the engines' watch over each other; it is cancelled when its client is gone.
"""

# Annotations are not postponed here: FastAPI reads those of functions inside of functions.

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from asyncrl_cli import __version__
from asyncrl_cli.gateway import errors, openapi
from asyncrl_cli.gateway.answers import (
    Answer,
    ChatAnswer,
    Model,
    ModelList,
    TextAnswer,
    TokenTexts,
    Wanted,
    encoded,
    token_texts,
    usage,
)
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.metrics import Metrics, Watched
from asyncrl_cli.gateway.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    refuse_unsupported,
)
from asyncrl_cli.gateway.requests import Bodies, Calls, OnText, Pieces, Prompts, stream
from asyncrl_cli.gateway.session import CallOptions, Render, Rendered, Session
from asyncrl_cli.gateway.sessions import Sessions, same_key, session_key

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of `/v1/completions` when it is omitted, as in OpenAI's API."""


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
class _Prepared:
    """What is kept of a request once its prompts are tokens."""

    session: Session
    rendered: list[Rendered]
    options: CallOptions
    answer: Answer
    stream: bool
    with_usage: bool
    in_pieces: bool


def create_app(service: Service) -> FastAPI:
    """The application that serves OpenAI's API, with and without a session in the path."""
    app = FastAPI(
        title="asyncrl gateway",
        version=__version__,
        description="OpenAI-compatible access to a policy, also while it is trained.",
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    openapi.install(app)
    app.add_middleware(Watched, metrics=service.metrics)
    _add_sessions(app, service)
    if service.api_key is not None:
        _add_plain(app, service, service.api_key)

    @app.get("/health", tags=["operation"])
    async def health() -> dict[str, str]:
        """Whether the gateway is up. Needs no key."""
        return {"status": "ok"}

    return app


def _add_sessions(app: FastAPI, service: Service) -> None:
    """The paths of sessions, each of which has a key of its own."""
    Id = Annotated[str, Path(description="The session that the call belongs to.")]

    async def check(session_id: Id, credentials: Credentials) -> None:
        _check_key(credentials, session_key(service.secret, session_id))

    async def named(session_id: Id) -> Session:
        return service.sessions.get(session_id)

    router = _openai(service, named)
    app.include_router(
        router, prefix="/sessions/{session_id:path}/v1", tags=["sessions"], dependencies=[Depends(check)]
    )


def _add_plain(app: FastAPI, service: Service, api_key: str) -> None:
    """The paths of calls that belong to no session, and the server's metrics."""

    async def check(credentials: Credentials) -> None:
        _check_key(credentials, api_key)

    async def none() -> None:
        return None

    key = [Depends(check)]
    app.include_router(_openai(service, none), prefix="/v1", tags=["OpenAI"], dependencies=key)

    @app.get("/metrics", tags=["operation"], dependencies=key, responses=openapi.METRICS)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


Credentials = Annotated[
    HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False, description="The API key."))
]


def _check_key(credentials: HTTPAuthorizationCredentials | None, right: str) -> None:
    given = credentials.credentials if credentials else ""
    if not same_key(given, right):
        what = "wrong API key" if given else "no API key: send it as `Authorization: Bearer KEY`"
        raise ApiError(401, what, code="invalid_api_key")


def _openai(service: Service, session_of: Callable[..., Awaitable[Session | None]]) -> APIRouter:
    """The paths of OpenAI's API. ``session_of`` is the dependency that finds a call's session, if it has one."""
    router = APIRouter()
    texts = token_texts(service.chat.decode)
    created = int(time.time())
    OwnSession = Annotated[Session | None, Depends(session_of)]
    described: Model = {"id": service.model, "object": "model", "created": created, "owned_by": "asyncrl"}

    @router.get("/models", responses=openapi.ERRORS | openapi.SESSION_ERRORS)
    async def models(session: OwnSession) -> ModelList:
        """The served model."""
        return {"object": "list", "data": [described]}

    @router.get("/models/{model:path}", responses=openapi.ERRORS | openapi.SESSION_ERRORS)
    async def model(model: str, session: OwnSession) -> Model:
        """The model, by its name."""
        _check_model(service, model)
        return described

    @router.post("/chat/completions", **openapi.CHAT)
    async def chat_completions(request: Request, session: OwnSession) -> Response:
        """The model's reply to a conversation."""
        async with service.bodies.read(request, ChatRequest) as (body, render):
            prepared = await _prepare_chat(service, session, body, render, texts)
            del body  # before the generation: only a few large bodies may be in memory (decision 0022)
        return await _answer(service, request, prepared, own=session is None)

    @router.post("/completions", **openapi.COMPLETION)
    async def completions(request: Request, session: OwnSession) -> Response:
        """Text that continues a prompt."""
        async with service.bodies.read(request, CompletionRequest) as (body, render):
            prepared = await _prepare_text(service, session, body, render, texts)
            del body
        return await _answer(service, request, prepared, own=session is None)

    return router


def _session(service: Service, named: Session | None, body: GenerationRequest) -> Session:
    """The session of a request; a new one when it names none. Raises ``ApiError``."""
    _check_model(service, body.model)
    session = named or service.new_session()
    refuse_unsupported(body, session.fixed_sampling)
    return session


async def _prepare_chat(
    service: Service, named: Session | None, body: ChatRequest, render: Render, texts: TokenTexts
) -> _Prepared:
    session = _session(service, named, body)
    tools = body.offered_tools()
    rendered = await session.render_chat([message.plain() for message in body.messages], tools, render)
    wanted = Wanted(bool(body.return_token_ids), bool(body.logprobs), bool(body.top_logprobs))
    options = _options(body, body.max_completion_tokens or body.max_tokens)
    answer = ChatAnswer(wanted, service.model, texts)
    # Whether a reply calls a tool is known only at its end.
    return _Prepared(session, [rendered], options, answer, bool(body.stream), body.with_usage, in_pieces=tools is None)


async def _prepare_text(
    service: Service, named: Session | None, body: CompletionRequest, render: Render, texts: TokenTexts
) -> _Prepared:
    session = _session(service, named, body)
    rendered = [
        await (session.render_text(prompt, render) if isinstance(prompt, str) else session.render_ids(prompt))
        for prompt in body.prompts()
    ]
    wanted = Wanted(bool(body.return_token_ids), body.logprobs is not None, bool(body.logprobs))
    options = _options(body, body.max_tokens or DEFAULT_COMPLETION_TOKENS)
    answer = TextAnswer(wanted, service.model, texts)
    return _Prepared(session, rendered, options, answer, bool(body.stream), body.with_usage, in_pieces=True)


async def _answer(service: Service, request: Request, prepared: _Prepared, own: bool) -> Response:
    """Generate, and answer. A session that is the call's ``own`` ends with it."""
    session, options, answer = prepared.session, prepared.options, prepared.answer

    def used(prompts: Prompts) -> None:
        service.metrics.used(usage(prompts))

    async def generate(on_text: OnText | None) -> Prompts:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(session.answer(rendered, options, _counted(on_text, index * options.n)))
                    for index, rendered in enumerate(prepared.rendered)
                ]
            return [task.result() for task in tasks]
        finally:
            if own:
                session.close()

    if prepared.stream:
        pieces: Pieces = asyncio.Queue()
        on_text: OnText = lambda choice, text: pieces.put_nowait((choice, text))  # noqa: E731
        call = service.calls.begin(request, generate(on_text if prepared.in_pieces else None))
        return await stream(call, pieces, answer, prepared.with_usage, used)
    prompts = await service.calls.begin(request, generate(None)).result()
    used(prompts)
    return Response(encoded(answer.complete(prompts)), media_type="application/json")


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.model):
        message = f"the model {name!r} does not exist; there is {service.model!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


def _options(body: GenerationRequest, max_tokens: int | None) -> CallOptions:
    return CallOptions(
        max_tokens=max_tokens, temperature=body.temperature, seed=body.seed, stop=body.stops, n=body.n or 1
    )


def _counted(on_text: OnText | None, first: int) -> OnText | None:
    """For a prompt whose choices are counted from ``first``."""
    return on_text and (lambda choice, text: on_text(first + choice, text))
