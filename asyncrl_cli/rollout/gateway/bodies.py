"""A request's body: it has a limit, a deadline, and a form."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from asyncrl_cli.rollout.gateway.errors import CLIENT_GONE, ApiError, invalid
from asyncrl_cli.rollout.gateway.protocol import Wire

BODY_S = 60.0
"""Seconds in which a request's body must arrive."""

W = TypeVar("W", bound=Wire)


async def read_body(request: Request, kind: type[W], limit: int) -> W:
    """The request's body, of at most ``limit`` bytes. Raises ``ApiError`` when it is too large, late, or wrong."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise ApiError(413, f"the body has more than {limit} bytes", code="request_too_large")
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s", code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client is gone", code="client_gone") from None
    try:
        return kind.model_validate_json(b"".join(parts))
    except ValidationError as error:
        raise invalid(error) from None
