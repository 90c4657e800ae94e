"""Connections that waste resources: silent, slow, too many, and some that never read."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from gateway_stand_ins import KEY, Engine, Served, key_of, served, until

from asyncrl_cli.gateway.connections import MAX_CONNECTIONS, ConnectionLimits

pytestmark = pytest.mark.slow

LONG_DEADLINES = ConnectionLimits(head_s=60, body_s=60, idle_s=60, unread_s=60)
"""Deadlines that no test reaches; each test shortens its own."""
AT_ONCE = 0.05
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode()
BODY = b'{"prompt": "x"}'
WHOLE = HEAD + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(there: Served) -> Streams:
    host, port = there.gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def closed(streams: Streams) -> bytes:
    """Read until the server closes the connection; returns the data."""
    try:
        return await streams[0].read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD + b"\r\n"])
async def test_a_head_has_a_deadline(sent: bytes) -> None:
    async with served(limits=replace(LONG_DEADLINES, head_s=AT_ONCE)) as there:
        streams = await connect(there)
        streams[1].write(sent)
        assert await closed(streams) == b""


async def test_later_heads_and_unread_answers_have_deadlines() -> None:
    async with served(limits=replace(LONG_DEADLINES, head_s=AT_ONCE)) as there:
        second = await connect(there)
        second[1].write(WHOLE)
        await second[0].readuntil(b'"usage"')
        second[1].write(b"GET /v1/models")
        await closed(second)
        refused = await connect(there)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        refused[1].write(head)
        assert b" 401 " in await refused[0].readline()
        refused[1].write(b"x")
        await closed(refused)


async def test_a_body_has_a_deadline() -> None:
    async with served(limits=replace(LONG_DEADLINES, body_s=AT_ONCE)) as there:
        late = await connect(there)
        late[1].write(WHOLE[:-1])
        assert b" 408 " in await late[0].readline()
        late[1].close()


async def test_a_declared_length_is_refused_before_the_body_is_sent() -> None:
    async with served(limits=LONG_DEADLINES, max_body_mb=1) as there:
        streams = await connect(there)
        streams[1].write(HEAD + b"\r\nContent-Length: 1048577\r\n\r\n")
        assert b" 413 " in await streams[0].readline()
        streams[1].close()


async def test_above_the_cap_the_longest_idle_connection_is_closed_and_busy_ones_stay() -> None:
    engine = Engine(held=asyncio.Event())
    async with served(engine, limits=replace(LONG_DEADLINES, max_connections=50)) as there:
        busy = await connect(there)
        busy[1].write(WHOLE)
        await until(lambda: engine.running == 1)
        silent = [await connect(there) for _ in range(600)]
        assert await closed(silent[0]) == b""
        last = await connect(there)
        last[1].write(WHOLE)
        await until(lambda: engine.running == 2)
        assert engine.held is not None
        engine.held.set()
        for served_ in (busy, last):
            assert b" 200 " in await served_[0].readline()
        asked = await there.post("/v1/completions", {"prompt": "x"})
        assert asked.status_code == 200
        silent[-1][1].write(WHOLE)
        assert b" 200 " in await silent[-1][0].readline(), "the newest connections are still open"
        for _, writer in (busy, last, *silent):
            writer.close()


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    async with served(limits=replace(LONG_DEADLINES, unread_s=AT_ONCE)) as there:
        gateway: Any = there.gateway
        connections = gateway._server.server_state.connections
        _, writer = await connect(there)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        # Each answer repeats the long path, so the answers soon fill the buffers of both sockets.
        writer.write(b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 8000) * 2000)
        await until(lambda: len(connections) == 1)
        await until(lambda: not connections)
        writer.close()


def test_the_cap_follows_from_the_limit_of_descriptors() -> None:
    command = (
        "import resource; from asyncrl_cli.gateway.connections import raise_descriptor_limit as up;"
        "print(up(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )

    def under(soft: int, hard: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", command],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    assert under(100, 256) == "128 256"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard >= 2 * MAX_CONNECTIONS:
        assert under(100, hard).startswith(f"{MAX_CONNECTIONS} ")


async def test_a_key_opens_its_own_session_and_nothing_else() -> None:
    async with served(plain=False) as there:
        mine, other = there.session("7-0"), there.session("7-1")
        asked = {"messages": [{"role": "user", "content": "hello"}]}
        path = "/v1/chat/completions"
        assert (await there.post(path, asked, "7-0")).status_code == 200
        own = {"Authorization": f"Bearer {key_of('7-0')}"}
        for name in ("7-1", "7-1~1", "7-", "", "9-9", "7-0/", "7-0/../7-1", "7-0%2f"):
            answer = await there.http.post(f"/sessions/{name}{path}", json=asked, headers=own)
            assert answer.status_code == 401, (name, answer.text)
        for free in (path, "/v1/completions", "/v1/models"):
            for method in ("GET", "POST"):
                answer = await there.http.request(method, free, json=asked, headers=own)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), free
        named = own | {"X-Asyncrl-Session": "7-1"}
        await there.http.post(f"/sessions/7-0{path}", json=asked, headers=named)
        assert (mine.calls, other.calls) == (2, 0)
        there.sessions.close("7-1")
        assert (await there.post(path, asked, "7-1")).status_code == 410
        assert not there.opened
