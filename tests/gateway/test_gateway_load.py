"""Clients that disconnect, sessions that end during a call, and a gateway that stops."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from conversation_stand_ins import rollout_of
from gateway_stand_ins import MODEL, Engine, key_of, served, until

from asyncrl_cli.gateway.sessions import session_url

pytestmark = pytest.mark.slow

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_clients_generation_is_cancelled(stream: bool) -> None:
    engine = Engine(held=asyncio.Event())
    async with served(engine) as there:
        session = there.session("7-0")
        async with httpx.AsyncClient(
            base_url=session_url(there.gateway.url, "7-0"), headers={"Authorization": f"Bearer {key_of('7-0')}"}
        ) as client:
            call = asyncio.create_task(_read_on(client, CHAT | {"stream": stream}))
            await until(lambda: engine.running == 1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await until(lambda: engine.cancelled == 1)
        assert engine.running == 0
        engine.held = None
        again = await there.client("7-0").chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert again.choices[0].message.content.startswith("hello"), "the session continues"
        rollout = rollout_of(session)
        assert not rollout.branches


async def _read_on(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "chat/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            pass


@pytest.mark.parametrize(
    ("path", "body", "failure"),
    [
        (PATH, CHAT, '"code":"session_ended"'),
        ("/v1/responses", {"input": "hello"}, '"type":"response.failed"'),
        ("/v1/messages", CHAT | {"max_tokens": 50}, '"error_code":"session_ended"'),
    ],
)
async def test_a_failure_during_a_stream_is_its_last_event(path: str, body: Any, failure: str) -> None:
    engine = Engine(held=asyncio.Event())
    async with served(engine) as there:
        there.session("7-0")
        key = {"Authorization": f"Bearer {key_of('7-0')}"}
        async with there.http.stream(
            "POST", "/sessions/7-0" + path, json=body | {"stream": True}, headers=key
        ) as answer:
            assert answer.status_code == 200
            there.sessions.close("7-0")
            lines = [line async for line in answer.aiter_lines() if line]
        assert failure in lines[-1] and "has ended" in lines[-1]


async def test_stopping_answers_waiting_clients_and_leaves_no_task() -> None:
    engine = Engine(held=asyncio.Event())
    before = asyncio.all_tasks()
    async with served(engine) as there:
        call = asyncio.create_task(there.post(PATH, CHAT))
        stuck = await asyncio.open_connection(*there.gateway.url.removeprefix("http://").split(":"))
        stuck[1].write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")
        await until(lambda: engine.running == 1)
        async with asyncio.timeout(6):
            await there.gateway.stop()
        answer = await call
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(there.gateway.url + "/health")
        stuck[1].close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
