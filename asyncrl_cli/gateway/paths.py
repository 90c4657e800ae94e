"""The paths of all APIs. Each converts its requests to chat messages, and renders the replies in its own format."""

# No postponed annotations here: FastAPI must evaluate the annotations of nested functions.

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from asyncrl_cli.gateway.errors import JsonObject, invalid_value, is_anthropic, new_request_id
from asyncrl_cli.gateway.messages_reply import MessagesAnswer
from asyncrl_cli.gateway.messages_request import CountRequest, MessagesRequest
from asyncrl_cli.gateway.openai_reply import AnswerOptions, ChatAnswer, TextAnswer
from asyncrl_cli.gateway.openai_request import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest
from asyncrl_cli.gateway.responses_reply import KeptResponses, ResponsesAnswer, begun_response
from asyncrl_cli.gateway.responses_request import ResponsesRequest
from asyncrl_cli.gateway.service import Prepared, Service, render_chat, respond
from asyncrl_cli.gateway.session import CallOptions, Render, Session
from asyncrl_cli.gateway.wire import MAX_MESSAGES, GenerationRequest
from asyncrl_cli.records.prompt import Message

SessionOf = Callable[..., Awaitable[Session | None]]
"""FastAPI dependency that finds the session of a call, if it has one."""

B = TypeVar("B", bound=GenerationRequest)
Prepare = Callable[[Session, B, Render], Awaitable[Prepared]]
"""Renders a request's prompts."""


def router_of(service: Service, session_of: SessionOf, responses_of: Callable[[Session], KeptResponses]) -> APIRouter:
    """The paths of all APIs, under one prefix. ``responses_of`` returns the responses that calls may continue."""
    router = APIRouter()
    _add_models(router, service, session_of)

    def add(path: str, request_type: type[B], prepare: Prepare[B]) -> None:
        async def reply(request: Request, open_session: Annotated[Session | None, Depends(session_of)]) -> Response:
            async with service.bodies.read(request, request_type) as (body, render):
                session = service.session_for(open_session, body)
                prepared = await prepare(session, body, render)
                stream = bool(body.stream)
                del body
            return await respond(
                service,
                request=request,
                session=session,
                prepared=prepared,
                closes_session=open_session is None,
                stream=stream,
            )

        name = path.strip("/").replace("/", "_")
        router.add_api_route(path, reply, methods=["POST"], name=name)

    async def chat(session: Session, body: ChatRequest, render: Render) -> Prepared:
        messages = [message.plain() for message in body.messages]
        rendered = await render_chat(session, body, messages, render=render)
        answer_options = AnswerOptions(
            token_ids=bool(body.return_token_ids),
            logprobs=bool(body.logprobs),
            top_logprobs=bool(body.top_logprobs),
            usage=body.with_usage,
        )
        options = body.options(body.max_completion_tokens or body.max_tokens)
        return Prepared([rendered], options, ChatAnswer(answer_options, service.model, service.chat))

    async def completion(session: Session, body: CompletionRequest, render: Render) -> Prepared:
        rendered = [
            await (session.render_text(prompt, render) if isinstance(prompt, str) else session.render_ids(prompt))
            for prompt in body.prompts()
        ]
        answer_options = AnswerOptions(
            token_ids=bool(body.return_token_ids),
            logprobs=body.logprobs is not None,
            top_logprobs=bool(body.logprobs),
            usage=body.with_usage,
        )
        options = body.options(body.max_tokens or DEFAULT_COMPLETION_TOKENS)
        return Prepared(rendered, options, TextAnswer(answer_options, service.model, service.chat))

    async def response(session: Session, body: ResponsesRequest, render: Render) -> Prepared:
        kept_responses = responses_of(session)
        earlier_messages = () if body.previous_response_id is None else kept_responses.get(body.previous_response_id)
        # Kept without the instructions: the next response does not take them over.
        conversation = [*earlier_messages, *await render(body.chat_messages)]
        if len(conversation) > MAX_MESSAGES:
            raise invalid_value(f"a conversation of more than {MAX_MESSAGES} messages", "input")
        instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
        messages = [*instructions, *conversation]
        rendered = await render_chat(session, body, messages, render=render, param="input")

        def keep(response_id: str, reply: Message) -> None:
            kept_responses.add(response_id, (*conversation, reply))

        answer = ResponsesAnswer(
            begun_response(body, service.model, session.fixed_sampling),
            body.client_tools(),
            service.chat.decode,
            token_ids=bool(body.return_token_ids),
            keep=None if body.store is False else keep,
        )
        options = CallOptions(max_tokens=body.max_output_tokens, temperature=body.temperature, seed=body.seed)
        return Prepared([rendered], options, answer)

    async def message(session: Session, body: MessagesRequest, render: Render) -> Prepared:
        rendered = await render_chat(session, body, body.chat_messages(), render=render)
        stops = tuple(body.stop_sequences or ())
        options = CallOptions(max_tokens=body.max_tokens, temperature=body.temperature, stop=stops)
        answer = MessagesAnswer(
            service.model, input_tokens=len(rendered.prompt_ids), stop_sequences=stops, decode=service.chat.decode
        )
        return Prepared([rendered], options, answer)

    add("/chat/completions", ChatRequest, chat)
    add("/completions", CompletionRequest, completion)
    add("/responses", ResponsesRequest, response)
    add("/messages", MessagesRequest, message)

    @router.post("/messages/count_tokens")
    async def count_tokens(
        request: Request, response: Response, session: Annotated[Session | None, Depends(session_of)]
    ) -> JsonObject:
        """The number of tokens in a request's prompt, which equals `input_tokens` of its answer."""
        async with service.bodies.read(request, CountRequest) as (body, render):
            counted_session = service.session_for(session, body)
            try:
                rendered = await render_chat(counted_session, body, body.chat_messages(), render=render)
            finally:
                if session is None:
                    counted_session.close()
        response.headers["request-id"] = new_request_id()
        return {"input_tokens": len(rendered.prompt_ids)}

    return router


def _add_models(router: APIRouter, service: Service, session_of: SessionOf) -> None:
    """Add the paths for models. Anthropic's clients get Anthropic's format."""
    name, started = service.model, datetime.now(UTC)
    openai_entry = {"id": name, "object": "model", "created": int(started.timestamp()), "owned_by": "asyncrl"}
    anthropic_entry = {"type": "model", "id": name, "display_name": name}
    anthropic_entry |= {"created_at": started.isoformat(timespec="seconds"), "lifecycle": "active"}

    def answer(request: Request, openai: Any, anthropic: Any) -> Response:
        if is_anthropic(request.scope):
            return JSONResponse(anthropic, headers={"request-id": new_request_id()})
        return JSONResponse(openai)

    @router.get("/models")
    async def models(request: Request, session: Annotated[Session | None, Depends(session_of)]) -> Response:
        """The served model."""
        anthropic_list = {"data": [anthropic_entry], "has_more": False, "first_id": name, "last_id": name}
        return answer(request, {"object": "list", "data": [openai_entry]}, anthropic_list)

    @router.get("/models/{model:path}")
    async def model(request: Request, model: str, session: Annotated[Session | None, Depends(session_of)]) -> Response:
        """The model with this name."""
        service.check_model(session, model)
        return answer(request, openai_entry, anthropic_entry)
