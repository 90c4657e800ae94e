"""The paths of Anthropic's Messages API."""

# Annotations are not postponed here: FastAPI reads those of functions inside of functions.

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from asyncrl_cli.gateway import openapi
from asyncrl_cli.gateway.messages_answer import MessagesAnswer, ModelEntries, ModelEntry, TokenCount
from asyncrl_cli.gateway.messages_blocks import chat_messages
from asyncrl_cli.gateway.messages_errors import MessagesRoute
from asyncrl_cli.gateway.messages_protocol import CountRequest, MessagesRequest
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

VERSION = b"anthropic-version"
"""The header that all of Anthropic's clients send."""


def add_messages(router: APIRouter, service: Service, session_of: SessionOf) -> None:
    """Add the paths to a router; before OpenAI's, which has paths of the same names."""
    messages_router = APIRouter(route_class=MessagesRoute)
    OwnSession = Annotated[Session | None, Depends(session_of)]

    @messages_router.post("/messages", **openapi.MESSAGES)
    async def messages(request: Request, session: OwnSession) -> Response:
        """The model's reply to a conversation, in the form of Anthropic's Messages API."""
        async with service.bodies.read(request, MessagesRequest) as (body, render):
            prepared = await _prepare(service, session, body, render, request.state.request_id)
            del body
        return await respond(service, request, prepared)

    @messages_router.post("/messages/count_tokens", **openapi.COUNT_TOKENS)
    async def count_tokens(request: Request, session: OwnSession) -> TokenCount:
        """The tokens of a request's prompt: `input_tokens` of the answer to it."""
        async with service.bodies.read(request, CountRequest) as (body, render):
            used = session_for(service, session, body)
            try:
                rendered = await used.render_chat(chat_messages(body), body.offered_tools(), render)
            finally:
                if session is None:
                    used.close()
        return {"input_tokens": len(rendered.prompt_ids)}

    router.include_router(messages_router)
    _add_models(router, service, OwnSession)


class _AnthropicsClients(MessagesRoute):
    """A path that exists only for Anthropic's clients."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        named = scope["type"] == "http" and any(name == VERSION for name, _ in scope["headers"])
        return super().matches(scope) if named else (Match.NONE, {})


def _add_models(router: APIRouter, service: Service, OwnSession: object) -> None:
    models_router = APIRouter(route_class=_AnthropicsClients)
    entry: ModelEntry = {
        "type": "model",
        "id": service.model,
        "display_name": service.model,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "lifecycle": "active",
    }

    # OpenAI's paths of the same names stand in the OpenAPI document.
    @models_router.get("/models", include_in_schema=False)
    async def models(session: OwnSession) -> ModelEntries:  # type: ignore[valid-type]
        """The served model."""
        return {"data": [entry], "has_more": False, "first_id": service.model, "last_id": service.model}

    @models_router.get("/models/{model:path}", include_in_schema=False)
    async def model(model: str, session: OwnSession) -> ModelEntry:  # type: ignore[valid-type]
        """The model, by its name."""
        check_model(service, session, model)
        return entry

    router.include_router(models_router)


async def _prepare(
    service: Service, named: Session | None, body: MessagesRequest, render: Render, request_id: str
) -> Prepared:
    session = session_for(service, named, body)
    rendered = await render_chat(session, chat_messages(body), body.offered_tools(), render)
    stops = tuple(body.stop_sequences or ())
    options = CallOptions(max_tokens=body.max_tokens, temperature=body.temperature, stop=stops)
    answer = MessagesAnswer(service.model, request_id, len(rendered.prompt_ids), stops, service.chat.decode)
    return Prepared(session, named is None, [rendered], options, answer, bool(body.stream))
