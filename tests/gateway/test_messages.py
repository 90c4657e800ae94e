"""The Messages API over real HTTP with Anthropic's client, beyond the golden pairs."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from gateway_stand_ins import KEY, MODEL, Engine, Served, key_of, served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASKED: Any = {"model": MODEL, "max_tokens": 50, "messages": HELLO}


def client_of(there: Served, session: str | None = None, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's own client, without retries."""
    base_url = there.gateway.url if session is None else f"{there.gateway.url}/sessions/{session}"
    given: dict[str, Any] = {"base_url": base_url, "api_key": key_of(session), "max_retries": 0}
    return anthropic.AsyncAnthropic(**(given | options))


async def test_keys_and_versions() -> None:
    async with served() as there:
        there.session("7-0")
        path, body = "/v1/messages?beta=true", ASKED
        for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
            named = headers | {"anthropic-version": "2023-06-01", "anthropic-beta": "x-2025-01-01"}
            there.http.headers.clear()
            assert (await there.http.post(path, json=body, headers=named)).status_code == 200
        both = {"x-api-key": key_of("7-0"), "authorization": "Bearer of-another-user"}
        assert (await there.http.post("/sessions/7-0/v1/messages", json=body, headers=both)).status_code == 200


async def test_errors_have_anthropics_shape_and_classes() -> None:
    async with served(max_body_mb=1) as there, client_of(there) as client:
        there.session("7-0")
        there.session("9-0")
        there.sessions.close("9-0")
        long, large = ([{"role": "user", "content": "x" * size}] for size in (5_000, 2**20))
        wrong: list[tuple[Any, dict[str, Any], type[anthropic.APIStatusError], str, str]] = [
            (client, {"messages": long}, anthropic.BadRequestError, "invalid_request_error", "prompt is too long"),
            (client, {"messages": large}, anthropic.RequestTooLargeError, "request_too_large", "more than"),
            (client_of(there, api_key="no"), {}, anthropic.AuthenticationError, "authentication_error", "wrong"),
            (client_of(there, "7-0", api_key=KEY), {}, anthropic.AuthenticationError, "authentication_error", "w"),
            (client_of(there, "1-1"), {}, anthropic.NotFoundError, "not_found_error", "no session"),
            (client_of(there, "9-0"), {}, anthropic.APIStatusError, "not_found_error", "has ended"),
        ]
        for own, changes, kind, name, message in wrong:
            with pytest.raises(kind, match=message) as raised:
                await own.messages.create(**(ASKED | changes))
            body: Any = raised.value.body
            assert (body["type"], body["error"]["type"]) == ("error", name)
            assert body["request_id"] == raised.value.request_id
            assert raised.value.request_id, "it is also in the header"
            if not changes:
                with pytest.raises(kind, match=message):
                    await own.messages.count_tokens(model=MODEL, messages=HELLO)
        for method in ("GET", "PUT", "DELETE"):
            answer = await there.http.request(method, "/v1/messages")
            assert (answer.status_code, answer.json()["type"], answer.headers["allow"]) == (405, "error", "POST")
        answer = await there.post("/v1/messages", content=b"{")
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        there.engine.fails = RuntimeError("a fault")
        with pytest.raises(anthropic.InternalServerError, match="RuntimeError in the gateway"):
            await client.messages.create(**ASKED)


@pytest.mark.parametrize("stream", [False, True])
async def test_deep_arguments_are_a_call_like_any_other(stream: bool) -> None:
    deep = "[" * 800 + "1" + "]" * 800
    call = '<tool_call>{"name": "find", "arguments": {"a": ' + deep + "}}</tool_call>"
    engine = Engine(lambda *_: call)
    async with served(engine) as there:
        asked = ASKED | {
            "tools": [{"name": "find", "input_schema": {"type": "object"}}],
            "stream": stream,
            "max_tokens": 2_000,
        }
        answer = await there.post("/v1/messages", asked)
        assert answer.status_code == 200, answer.text
        assert "[" * 800 + "1]" in answer.text.replace("\\", "")
        assert '"stop_reason":"tool_use"' in answer.text
