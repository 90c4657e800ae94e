"""Errors of all APIs: one exception, rendered in the format of the request's API."""

from __future__ import annotations

import logging
import re
import secrets
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from asyncrl_cli.rollout.client import GenerationFailed

if TYPE_CHECKING:
    from fastapi import FastAPI

JsonObject = dict[str, Any]
"""An object of a request or an answer, in the format of its API."""
CLIENT_GONE = 499
"""Status of a request whose client has disconnected. Never sent."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    413: "request_too_large",
}
"""Anthropic's names. Other statuses are ``invalid_request_error`` below 500, and ``api_error`` from there."""
ANTHROPIC_TOO_LONG = "prompt is too long"
"""Client programs look for these words to decide that they must shorten their history."""
ANTHROPIC_VERSION = "anthropic-version"
"""A header that all clients of Anthropic's API send."""

log = logging.getLogger(__name__)


class ApiError(Exception):
    """An error to send to the client."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        """``code``: OpenAI's error code, such as ``model_not_found``. ``param``: the request's key."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def for_openai(self) -> JsonObject:
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    def for_responses(self) -> JsonObject:
        return {"code": "server_error" if self.status >= 500 else "invalid_prompt", "message": self.message}

    def for_anthropic(self, request_id: str) -> JsonObject:
        error_type = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        too_long = self.code == "context_length_exceeded"
        message = f"{ANTHROPIC_TOO_LONG}: {self.message}" if too_long else self.message
        details = {"error_code": self.code} if self.code else None
        error: JsonObject = {"type": error_type, "message": message, "details": details}
        return {"type": "error", "error": error, "request_id": request_id}


def invalid_value(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ApiError:
    """The error for a key that policies, or this session, cannot honour."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def as_api_error(error: BaseException) -> ApiError:
    """Convert any exception; an unexpected one is logged with its traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationFailed):
        return ApiError(503, f"the generation failed: {error}", code="generation_failed")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__} in the gateway; see logs/gateway.log", code="internal_error")


def new_request_id() -> str:
    """A request id for the header of an answer, as in Anthropic's API."""
    return f"req_{secrets.token_hex(12)}"


def is_anthropic(scope: Scope) -> bool:
    """True for requests of Anthropic's API. `/v1/models` is in both APIs; there the header decides."""
    path: str = scope["path"]
    if "/v1/models" in path:
        return any(name == ANTHROPIC_VERSION.encode() for name, _ in scope["headers"])
    return path.endswith(("/v1/messages", "/v1/messages/count_tokens"))


def error_response(scope: Scope, error: BaseException) -> JSONResponse:
    """The answer to a failed request, in the format of its API."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers |= error.headers or {}
        messages = {404: f"no such path: {scope['path']}", 405: f"{scope['method']} is not allowed here"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        error = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), code=code)
    answer = as_api_error(error)
    if not is_anthropic(scope):
        return JSONResponse(answer.for_openai(), answer.status, headers)
    request_id = new_request_id()
    headers["request-id"] = request_id
    return JSONResponse(answer.for_anthropic(request_id), answer.status, headers)


TYPE_NAME = re.compile(r"str|int|bool|float|(?!\d).*[^a-z_].*")
"""Parts of pydantic's error locations that are neither a key nor an index: they name one of several possible types."""


def malformed(error: ValidationError) -> ApiError:
    """The answer to a malformed body: its first error."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    param = _location(errors[0]["loc"])
    # If a value may have several types, each type reports an error. The type that fits best fails deepest.
    located_errors = [error_entry for error_entry in errors if _location(error_entry["loc"]) == param]
    deepest = max(len(error_entry["loc"]) for error_entry in located_errors)
    reasons = dict.fromkeys(error_entry["msg"] for error_entry in located_errors if len(error_entry["loc"]) == deepest)
    message = "; or: ".join(list(reasons)[:4])
    return invalid_value(f"{param}: {message}" if param else message, param or None)


def _location(loc: tuple[str | int, ...]) -> str:
    names = takewhile(lambda name: not TYPE_NAME.fullmatch(name), map(str, loc))
    return ".".join(name for name, _ in groupby(names))  # pydantic adds a tool's type, which is also its key


def install(app: FastAPI) -> None:
    """Make an application answer all errors in the format of the request's API."""

    async def refused(request: Request, error: Exception) -> Response:
        return error_response(request.scope, error)

    for error_type in (ApiError, GenerationFailed, HTTPException, Exception):
        app.add_exception_handler(error_type, refused)
