"""Only a few large bodies are read at a time, and a client's wait for others does not count for its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asyncrl_cli.gateway import bodies
from asyncrl_cli.gateway.bodies import LARGE, Bodies
from asyncrl_cli.gateway.errors import ApiError

LIMIT_S = 0.05
"""Deadline of a body in these tests."""


class Upload:
    """A request with a large body in two parts."""

    headers: dict[str, str] = {}  # noqa: RUF012

    async def stream(self) -> AsyncIterator[bytes]:
        yield b"x" * LARGE
        yield b"x"


async def test_waiting_for_room_is_not_counted_against_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LARGE_AT_ONCE", 1)
    upload: Any = Upload()
    reader = Bodies(10 * LARGE, LIMIT_S)
    async with AsyncExitStack() as first:
        await reader._read(upload, first)
        second = asyncio.create_task(reader._read(upload, AsyncExitStack()))
        done, _ = await asyncio.wait({second}, timeout=4 * LIMIT_S)
        assert not done
    assert len(await second) == LARGE + 1
    monkeypatch.setattr(bodies, "ROOM_S", LIMIT_S)
    with pytest.raises(ApiError, match="no room") as refused:
        await reader._read(upload, AsyncExitStack())
    assert refused.value.status == 503
