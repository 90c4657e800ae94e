"""Every refusal has OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}`` under the right status code."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from asyncrl_cli.rollout.client import GenerationFailed

if TYPE_CHECKING:
    from fastapi import FastAPI

CLIENT_GONE = 499
"""The status under which metrics count answers whose client has left. Never sent."""

log = logging.getLogger(__name__)


class ErrorDetail(BaseModel):
    """What went wrong; ``param`` names the request's key."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An error, as OpenAI's API has it."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        """``code`` is OpenAI's error code, such as ``model_not_found``."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        """The answer's body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status, headers=dict(headers or {}))


def invalid_value(message: str, param: str | None = None) -> ApiError:
    """A request with a wrong value."""
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ApiError:
    """A request that asks for what no policy, or not this session, can serve."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def as_api_error(error: BaseException) -> ApiError:
    """The answer to an exception; an unexpected one is logged with its traceback."""
    if isinstance(error, BaseExceptionGroup):  # several prompts in one request
        return as_api_error(error.exceptions[0])
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationFailed):
        return ApiError(503, f"the generation failed: {error}", code="generation_failed")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__} in the gateway; see logs/gateway.log", code="internal_error")


TYPE_NAME = re.compile(r"str|int|bool|float|(?!\d).*[^a-z_].*")
"""Parts of pydantic's error locations that name one of several types of a value: neither a key nor an index."""


def malformed(error: ValidationError) -> ApiError:
    """The answer to a malformed body: its first error."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    param = _location(errors[0]["loc"])
    # Where a value may be of several types, each says why it is none of them: the type that fits best fails deepest.
    alike = [one for one in errors if _location(one["loc"]) == param]
    deepest = max(len(one["loc"]) for one in alike)
    reasons = dict.fromkeys(one["msg"] for one in alike if len(one["loc"]) == deepest)
    message = "; or: ".join(list(reasons)[:4])
    return invalid_value(f"{param}: {message}" if param else message, param or None)


def _location(loc: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in takewhile(lambda part: not TYPE_NAME.fullmatch(str(part)), loc))


HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def install(app: FastAPI) -> None:
    """Have an application answer expected errors in this shape; ``metrics.Watched`` answers the others."""

    async def refused(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed here"}
        answer = ApiError(
            error.status_code, message.get(error.status_code, str(error.detail)), code=HTTP_CODES.get(error.status_code)
        )
        return answer.response(error.headers)

    for kind in (ApiError, GenerationFailed):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(HTTPException, http_error)
