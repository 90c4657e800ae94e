"""The application: which path does what.

A request ends in bounded time: its body must arrive in time (bodies.py), and its generation is bounded by the session's
limits and by the engines' watch over each other; it is cancelled when its client is gone.
"""

# Annotations are not postponed here: FastAPI reads those of functions inside of functions.

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Request
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from asyncrl_cli import __version__
from asyncrl_cli.rollout.chat import ChatFormat
from asyncrl_cli.rollout.gateway import document, errors
from asyncrl_cli.rollout.gateway.answers import ChatAnswer, Model, ModelList, TextAnswer, TokenTexts, encoded, usage
from asyncrl_cli.rollout.gateway.bodies import read_body
from asyncrl_cli.rollout.gateway.calls import Calls, OnText, Pieces, Prompts, stream
from asyncrl_cli.rollout.gateway.errors import ApiError
from asyncrl_cli.rollout.gateway.metrics import Metrics, Watched
from asyncrl_cli.rollout.gateway.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    refuse_unsupported,
)
from asyncrl_cli.rollout.session import CallOptions, Session, Sessions

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of `/v1/completions` when it is left out, as OpenAI has it."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the gateway serves.

    Args:
        sessions: the rollouts that have a session.
        new_session: makes the session of a call that names none; it is closed after the call.
        chat: the model's chat format.
        model: the name that clients use.
        api_key: the bearer token that they need.
        max_body_bytes: larger bodies are refused.
    """

    sessions: Sessions
    new_session: Callable[[], Session]
    chat: ChatFormat
    model: str
    api_key: str
    max_body_bytes: int = 16 * 2**20
    calls: Calls = field(default_factory=Calls)
    metrics: Metrics = field(default_factory=Metrics)


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
    document.install(app)
    app.add_middleware(Watched, metrics=service.metrics)
    key = Depends(_key_needed(service.api_key))
    app.include_router(_openai(service, _named_in_header), prefix="/v1", tags=["OpenAI"], dependencies=[key])
    app.include_router(
        _openai(service, _named_in_path), prefix="/sessions/{session_id:path}/v1", tags=["sessions"], dependencies=[key]
    )

    @app.get("/health", tags=["operation"])
    async def health() -> dict[str, str]:
        """Whether the gateway is up. Needs no key."""
        return {"status": "ok"}

    @app.get("/metrics", tags=["operation"], dependencies=[key], responses=document.METRICS)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _named_in_header(
    x_asyncrl_session: Annotated[str | None, Header(description="The session that the call belongs to.")] = None,
) -> str | None:
    return x_asyncrl_session


async def _named_in_path(session_id: Annotated[str, Path(description="The session that the call belongs to.")]) -> str:
    return session_id


def _key_needed(api_key: str) -> Callable[..., Awaitable[None]]:
    bearer = HTTPBearer(auto_error=False, description="The run's API key.")

    async def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        given = credentials.credentials if credentials else ""
        if not secrets.compare_digest(given.encode(), api_key.encode()):
            what = "wrong API key" if given else "no API key: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, what, code="invalid_api_key")

    return check


def _openai(service: Service, session_name: Callable[..., Awaitable[str | None]]) -> APIRouter:
    """The paths that OpenAI's API has. ``session_name`` is the dependency that says which session a call names."""
    router = APIRouter()
    texts = TokenTexts(service.chat.decode)
    created = int(time.time())
    SessionName = Annotated[str | None, Depends(session_name)]

    def described(session_name: str | None) -> Model:
        if session_name is not None:
            service.sessions.get(session_name)  # says it when there is none
        return {"id": service.model, "object": "model", "created": created, "owned_by": "asyncrl"}

    @router.get("/models", responses=document.ERRORS | document.SESSION_ERRORS)
    async def models(session: SessionName) -> ModelList:
        """The one model there is."""
        return {"object": "list", "data": [described(session)]}

    @router.get("/models/{model:path}", responses=document.ERRORS | document.SESSION_ERRORS)
    async def model(model: str, session: SessionName) -> Model:
        """The model, by its name."""
        _check_model(service, model)
        return described(session)

    @router.post("/chat/completions", **document.CHAT)
    async def chat_completions(request: Request, session: SessionName) -> Response:
        """The model's reply to a conversation."""
        body = await read_body(request, ChatRequest, service.max_body_bytes)
        _check_model(service, body.model)
        options = _options(body, body.max_completion_tokens or body.max_tokens)
        messages, tools = [message.plain() for message in body.messages], body.offered_tools()

        async def generate(on_text: OnText | None) -> Prompts:
            with _session(service, session, body) as one:
                return [await one.chat(messages, tools, options, on_text)]

        # What a tool call looks like is known only when it is whole.
        return await _answer(service, request, body, generate, ChatAnswer(body, service.model, texts), tools is None)

    @router.post("/completions", **document.COMPLETION)
    async def completions(request: Request, session: SessionName) -> Response:
        """Text that goes on from a prompt."""
        body = await read_body(request, CompletionRequest, service.max_body_bytes)
        _check_model(service, body.model)
        options = _options(body, body.max_tokens or DEFAULT_COMPLETION_TOKENS)

        async def generate(on_text: OnText | None) -> Prompts:
            with _session(service, session, body) as one:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(one.complete(prompt, options, _counted(on_text, index * options.n)))
                        for index, prompt in enumerate(body.prompts())
                    ]
                return [task.result() for task in tasks]

        return await _answer(service, request, body, generate, TextAnswer(body, service.model, texts), True)

    return router


async def _answer(
    service: Service,
    request: Request,
    body: GenerationRequest,
    generate: Callable[[OnText | None], Coroutine[Any, Any, Prompts]],
    answer: ChatAnswer | TextAnswer,
    in_pieces: bool,
) -> Response:
    def used(prompts: Prompts) -> None:
        service.metrics.used(usage(prompts))

    if body.stream:
        pieces = Pieces()
        call = service.calls.begin(request, generate(pieces.on_text if in_pieces else None))
        return await stream(call, pieces, answer, body.with_usage, used)
    prompts = await service.calls.begin(request, generate(None)).result()
    used(prompts)
    return Response(encoded(answer.whole(prompts)), media_type="application/json")


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.model):
        message = f"the model {name!r} does not exist; there is {service.model!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


@contextmanager
def _session(service: Service, name: str | None, body: GenerationRequest) -> Iterator[Session]:
    session = service.new_session() if name is None else service.sessions.get(name)
    try:
        refuse_unsupported(body, session.fixed_sampling)
        yield session
    finally:
        if name is None:
            session.close()


def _options(body: GenerationRequest, max_tokens: int | None) -> CallOptions:
    return CallOptions(
        max_tokens=max_tokens, temperature=body.temperature, seed=body.seed, stop=body.stops, n=body.n or 1
    )


def _counted(on_text: OnText | None, first: int) -> OnText | None:
    """For a prompt whose choices are counted from ``first``."""
    return on_text and (lambda choice, text: on_text(first + choice, text))
