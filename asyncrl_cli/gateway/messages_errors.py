"""Errors on the paths of Anthropic's API: ``{"type": "error", "error": {...}, "request_id"}``.

``MessagesRoute`` answers everything that goes wrong on such a path, also before its own code runs: a wrong key, an
unknown session, another method.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from asyncrl_cli.gateway.errors import ApiError, as_api_error

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    413: "request_too_large",
    503: "api_error",
    529: "overloaded_error",
}
"""Anthropic's names. Of other statuses those below 500 are ``invalid_request_error``, and the rest ``api_error``."""
STATUSES = {"overloaded": 529}
"""Statuses of Anthropic's API that OpenAI's does not have, by the error's code."""
TOO_LONG = "prompt is too long"
"""Programs look for these words to know that they have to shorten their history."""


class ErrorDetails(TypedDict):
    """The error's code in this gateway, such as ``session_ended``."""

    error_code: str


class MessagesErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str
    details: ErrorDetails | None


class MessagesError(TypedDict):
    """An error, as Anthropic's API has it."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


def error_status(error: ApiError) -> int:
    """The status of an error's answer."""
    return STATUSES.get(error.code or "", error.status)


def error_body(error: ApiError, request_id: str) -> MessagesError:
    """The answer's body."""
    status = error_status(error)
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = f"{TOO_LONG}: {error.message}" if error.code == "context_length_exceeded" else error.message
    details: ErrorDetails | None = {"error_code": error.code} if error.code else None
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "details": details},
        "request_id": request_id,
    }


class MessagesRoute(APIRoute):
    """A path of Anthropic's API. Its handlers find the request's id in ``request.state.request_id``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with errors in Anthropic's shape."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            request_id = request.state.request_id = _new_id()
            try:
                response = await answer(request)
            except Exception as error:  # its answer says what it was
                return _response(as_api_error(error), request_id)
            response.headers["request-id"] = request_id
            return response

        return handler

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, also a request of another method."""
        if self.methods and scope["method"] not in self.methods:
            error = ApiError(405, f"{scope['method']} is not allowed here", code="method_not_allowed")
            response = _response(error, _new_id())
            response.headers["allow"] = ", ".join(sorted(self.methods))
            await response(scope, receive, send)
        else:
            await super().handle(scope, receive, send)


def _new_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def _response(error: ApiError, request_id: str) -> JSONResponse:
    return JSONResponse(error_body(error, request_id), error_status(error), {"request-id": request_id})
