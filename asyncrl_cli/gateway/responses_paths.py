"""The path of OpenAI's Responses API."""

# Annotations are not postponed here: FastAPI reads those of functions inside of functions.

import secrets
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from asyncrl_cli.gateway import openapi
from asyncrl_cli.gateway.errors import invalid_value
from asyncrl_cli.gateway.protocol import MAX_MESSAGES
from asyncrl_cli.gateway.responses_answer import Repeated, ResponsesAnswer
from asyncrl_cli.gateway.responses_items import chat_tools, messages_of
from asyncrl_cli.gateway.responses_kept import Kept, KeptBySession
from asyncrl_cli.gateway.responses_protocol import ResponsesRequest
from asyncrl_cli.gateway.service import Prepared, Service, SessionOf, render_chat, respond, session_for
from asyncrl_cli.gateway.session import CallOptions, Render, Session
from asyncrl_cli.records.prompt import Message


def add_responses(router: APIRouter, service: Service, session_of: SessionOf) -> None:
    """Add the path to a router."""
    kept = KeptBySession()
    OwnSession = Annotated[Session | None, Depends(session_of)]

    @router.post("/responses", **openapi.RESPONSES)
    async def responses(request: Request, session: OwnSession) -> Response:
        """The model's response to a text or to items."""
        async with service.bodies.read(request, ResponsesRequest) as (body, render):
            prepared = await _prepare(service, session, body, render, kept.of(session))
            del body
        return await respond(service, request, prepared)


async def _prepare(
    service: Service, named: Session | None, body: ResponsesRequest, render: Render, kept: Kept
) -> Prepared:
    session = session_for(service, named, body)
    before = () if body.previous_response_id is None else kept.get(body.previous_response_id)
    tools = chat_tools(body.offered_tools()) or None
    # Without the instructions: those of a response are not taken over by the next one.
    conversation = [*before, *await render(lambda: messages_of(body.input))]
    if len(conversation) > MAX_MESSAGES:
        raise invalid_value(f"a conversation of more than {MAX_MESSAGES} messages", "input")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    rendered = await render_chat(session, [*instructions, *conversation], tools, render, param="input")

    def keep(response_id: str, reply: Message) -> None:
        kept.add(response_id, (*conversation, reply))

    asked = Repeated.of(body, service.model, session.fixed_sampling)
    answer = ResponsesAnswer(asked, secrets.token_hex(16), service.chat.decode, keep if asked.store else None)
    options = CallOptions(max_tokens=body.max_output_tokens, temperature=body.temperature, seed=body.seed)
    return Prepared(session, named is None, [rendered], options, answer, bool(body.stream))
