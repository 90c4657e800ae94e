"""The OpenAPI document: FastAPI's, plus the request bodies that ``bodies.Bodies`` reads, and all errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from asyncrl_cli.gateway.errors import ErrorAnswer, MessagesError
from asyncrl_cli.gateway.messages_reply import MessageAnswer
from asyncrl_cli.gateway.messages_request import CountRequest, MessagesRequest
from asyncrl_cli.gateway.openai_reply import ChatChunk, ChatCompletion, Completion
from asyncrl_cli.gateway.openai_request import ChatRequest, CompletionRequest
from asyncrl_cli.gateway.responses_reply import ModelResponse
from asyncrl_cli.gateway.responses_request import ResponsesRequest
from asyncrl_cli.gateway.wire import Wire

REFERENCE = "#/components/schemas/{model}"
BODIES: tuple[type[Wire], ...] = (ChatRequest, CompletionRequest, ResponsesRequest, CountRequest, MessagesRequest)

DESCRIPTIONS = {
    400: "The request is invalid, or has a key that cannot be honoured.",
    401: "No API key, or a wrong one.",
    404: "No such model, or no such session.",
    408: "The body did not arrive in time.",
    410: "The session has ended.",
    413: "The body is too large.",
    500: "An error in the gateway.",
    503: "The engines failed repeatedly, or the server is stopping.",
    529: "A large body waited too long for others.",
}


def errors(model: Any, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a path, in its API's format; without ``statuses``, all errors of a generation."""
    found = statuses or [status for status in DESCRIPTIONS if status != 529 or model is MessagesError]
    return {status: {"model": model, "description": DESCRIPTIONS[status]} for status in found}


METRICS = errors(ErrorAnswer, 400, 401) | {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format."}
}
MODELS = errors(ErrorAnswer, 400, 401, 404, 410)


def generation(answer: Any, events: str, body: type[Wire], error: Any = ErrorAnswer) -> dict[str, Any]:
    """Keyword arguments for a route that generates; ``events`` describes the data of a stream's events."""
    data = {"type": "string", "description": events}
    one_event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    content = {"text/event-stream": {"schema": one_event}}
    answered = {"model": answer, "description": "The generated answer.", "content": content}
    return {"responses": {200: answered, **errors(error)}, "openapi_extra": request_body(body)}


def request_body(body: type[Wire]) -> dict[str, Any]:
    """OpenAPI's entry for a body that the route reads itself."""
    schema = {"$ref": REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


DATA = "A {} as JSON, an error, or at the end `[DONE]`."
CHAT = generation(ChatCompletion, DATA.format(ChatChunk.__name__), ChatRequest)
COMPLETION = generation(Completion, DATA.format(Completion.__name__), CompletionRequest)
RESPONSES = generation(ModelResponse, "An event of OpenAI's Responses API as JSON.", ResponsesRequest)
MESSAGES = generation(
    MessageAnswer, "An event of Anthropic's Messages API as JSON.", MessagesRequest, error=MessagesError
)
COUNT_TOKENS: dict[str, Any] = {"responses": errors(MessagesError), "openapi_extra": request_body(CountRequest)}


ITEMS = {
    ("ModelResponse", "output"): ("MessageItem", "ReasoningItem", "FunctionCallItem", "CustomToolCallItem"),
    ("MessageAnswer", "content"): ("TextBlock", "ThinkingBlock", "ToolUseBlock"),
}
"""Lists in answers, with the request models of their entries, because clients send the entries back."""


def install(app: FastAPI) -> None:
    """Set the application's OpenAPI document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=REFERENCE)
            schemas = document["components"]["schemas"]
            schemas |= bodies["$defs"]
            for (answer, key), parts in ITEMS.items():
                references = [{"$ref": REFERENCE.format(model=part)} for part in parts]
                schemas[answer]["properties"][key]["items"] = {"anyOf": references}
            # A malformed request gets 400 in the API's format, instead of FastAPI's 422.
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
