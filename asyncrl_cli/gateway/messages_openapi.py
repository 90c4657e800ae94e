"""What the OpenAPI document has of Anthropic's paths: OpenAI's statuses, with errors in another shape."""

from __future__ import annotations

from typing import Any

from asyncrl_cli.gateway.messages_answer import MessageAnswer
from asyncrl_cli.gateway.messages_errors import MessagesError
from asyncrl_cli.gateway.messages_protocol import CountRequest, MessagesRequest
from asyncrl_cli.gateway.openapi import generation, request_body

MESSAGES = generation(MessageAnswer, "An event of Anthropic's Messages API as JSON.", MessagesRequest)
"""The keyword arguments of the route that generates."""
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: described | {"model": MessagesError} for status, described in MESSAGES["responses"].items() if status != 200
} | {529: {"model": MessagesError, "description": "A large body waited too long for others."}}
MESSAGES["responses"] |= _ERRORS
COUNT_TOKENS: dict[str, Any] = {"responses": _ERRORS, "openapi_extra": request_body(CountRequest)}
"""Those of the route that counts tokens."""
