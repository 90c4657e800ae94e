"""The paths of OpenAI's API except the Responses API: models, chat completions and completions."""

# Annotations are not postponed here: FastAPI reads those of functions inside of functions.

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from asyncrl_cli.gateway import openapi
from asyncrl_cli.gateway.answers import ChatAnswer, Model, ModelList, TextAnswer, TokenTexts, Wanted, token_texts
from asyncrl_cli.gateway.protocol import ChatRequest, CompletionRequest, GenerationRequest
from asyncrl_cli.gateway.service import (
    Prepared,
    Service,
    SessionOf,
    check_model,
    render_chat,
    respond,
    session_for,
)
from asyncrl_cli.gateway.session import CallOptions, Render, Session

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of `/v1/completions` when it is omitted, as in OpenAI's API."""


def add_openai(router: APIRouter, service: Service, session_of: SessionOf) -> None:
    """Add the paths to a router."""
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
        check_model(service, session, model)
        return described

    @router.post("/chat/completions", **openapi.CHAT)
    async def chat_completions(request: Request, session: OwnSession) -> Response:
        """The model's reply to a conversation."""
        async with service.bodies.read(request, ChatRequest) as (body, render):
            prepared = await _prepare_chat(service, session, body, render, texts)
            del body
        return await respond(service, request, prepared)

    @router.post("/completions", **openapi.COMPLETION)
    async def completions(request: Request, session: OwnSession) -> Response:
        """Text that continues a prompt."""
        async with service.bodies.read(request, CompletionRequest) as (body, render):
            prepared = await _prepare_text(service, session, body, render, texts)
            del body
        return await respond(service, request, prepared)


async def _prepare_chat(
    service: Service, named: Session | None, body: ChatRequest, render: Render, texts: TokenTexts
) -> Prepared:
    session = session_for(service, named, body)
    messages = [message.plain() for message in body.messages]
    rendered = await render_chat(session, messages, body.offered_tools(), render)
    wanted = Wanted(bool(body.return_token_ids), bool(body.logprobs), bool(body.top_logprobs), body.with_usage)
    options = _options(body, body.max_completion_tokens or body.max_tokens)
    answer = ChatAnswer(wanted, service.model, texts)
    return Prepared(session, named is None, [rendered], options, answer, bool(body.stream))


async def _prepare_text(
    service: Service, named: Session | None, body: CompletionRequest, render: Render, texts: TokenTexts
) -> Prepared:
    session = session_for(service, named, body)
    rendered = [
        await (session.render_text(prompt, render) if isinstance(prompt, str) else session.render_ids(prompt))
        for prompt in body.prompts()
    ]
    wanted = Wanted(bool(body.return_token_ids), body.logprobs is not None, bool(body.logprobs), body.with_usage)
    options = _options(body, body.max_tokens or DEFAULT_COMPLETION_TOKENS)
    answer = TextAnswer(wanted, service.model, texts)
    return Prepared(session, named is None, rendered, options, answer, bool(body.stream))


def _options(body: GenerationRequest, max_tokens: int | None) -> CallOptions:
    return CallOptions(
        max_tokens=max_tokens,
        temperature=body.temperature,
        seed=body.seed,
        stop=body.stops,
        n=body.n or 1,
    )
