"""The Messages API over real HTTP, with Anthropic's own client: answers, streams, tools, conversations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from gateway_stand_ins import KEY, MODEL, Engine, Served, in_time, key_of, served

from asyncrl_cli.records.generation import RolloutRequest
from asyncrl_cli.rollout.client import GenerationFailed

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>{"name": "calc", "arguments": {"x": 1.0, "of": {"u": []}}}</tool_call>'
CALC: Any = {"name": "calc", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
ASKED: Any = {"model": MODEL, "max_tokens": 50, "messages": HELLO}


def client_of(there: Served, session: str | None = None, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's own client, without retries."""
    base_url = there.gateway.url if session is None else f"{there.gateway.url}/sessions/{session}"
    given: dict[str, Any] = {"base_url": base_url, "api_key": key_of(session), "max_retries": 0}
    return anthropic.AsyncAnthropic(**(given | options))


async def ask(client: anthropic.AsyncAnthropic, stream: bool, **asked: Any) -> anthropic.types.Message:
    """One message, streamed or not."""
    if not stream:
        return await client.messages.create(**(ASKED | asked))
    async with client.messages.stream(**(ASKED | asked)) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_messages(stream: bool) -> None:
    async def test() -> None:
        async with served(Engine(lambda *_: "one, two, three")) as there, client_of(there) as client:
            answer = await ask(client, stream, system="be brief")
            assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "end_turn")
            assert [(block.type, block.text) for block in answer.content] == [("text", "one, two, three")]  # type: ignore[union-attr]
            assert answer.usage.output_tokens == len("one, two, three") + 1
            counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, system="be brief")
            assert counted.input_tokens == answer.usage.input_tokens == len("s:be brief\nu:hello\na:")
            stopped = await ask(client, stream, stop_sequences=["!", ", three"])
            assert (stopped.content[0].text, stopped.stop_reason) == ("one, two", "stop_sequence")  # type: ignore[union-attr]
            assert stopped.stop_sequence == ", three"
            cut = await ask(client, stream, max_tokens=3)
            assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("one", "max_tokens", None)  # type: ignore[union-attr]
            more = await ask(client, stream, max_tokens=4_000, extra_body={"temperature": 0.5})
            assert more.stop_reason == "end_turn", "a limit above the context length is reduced to it"
            assert there.engine.asked[-1].sampling.temperature == 0.5

    in_time(test)


def test_text_is_streamed_while_it_is_generated() -> None:
    async def test() -> None:
        async with served(Engine(lambda *_: "abcdefgh")) as there, client_of(there) as client:
            kinds, texts = [], []
            async for event in await client.messages.create(**ASKED, stream=True):
                kinds.append(event.type)
                if event.type == "content_block_delta" and event.delta.type == "text_delta":
                    texts.append(event.delta.text)
            assert len(texts) > 2
            assert "".join(texts) == "abcdefgh"
            assert kinds[:2] == ["message_start", "content_block_start"]
            assert kinds[2:-3] == ["content_block_delta"] * len(texts)
            assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]

    in_time(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_continues_its_tokens(stream: bool) -> None:
    def script(prompt: str, _: RolloutRequest) -> str:
        return "It is 2." if "t:2" in prompt else "  " + CALL

    async def test() -> None:
        async with served(Engine(script)) as there, client_of(there, "7-0") as client:
            session = there.session()
            asked: dict[str, Any] = {"tools": [CALC, SEARCH], "model": "claude-of-this-year", "max_tokens": 900}
            first = await ask(client, stream, **asked)
            assert first.stop_reason == "tool_use"
            (call,) = [block for block in first.content if block.type == "tool_use"]
            assert (call.name, call.input) == ("calc", {"x": 1, "of": {"u": []}})
            # As Claude Code sends it: without the blank text before the call, and with 1 instead of 1.0.
            back: Any = [json.loads(call.to_json()) | {"input": {"x": 1, "of": {"u": []}}}]
            result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
            marked = [CALC | {"cache_control": {"type": "ephemeral"}}, SEARCH]
            history = [*HELLO, {"role": "assistant", "content": back}, {"role": "user", "content": [result]}]
            counted = await client.messages.count_tokens(model="claude-small", messages=history, tools=marked)
            second = await ask(client, stream, **(asked | {"messages": history, "tools": marked}))
            assert second.content[0].text == "It is 2."  # type: ignore[union-attr]
            assert second.usage.input_tokens == counted.input_tokens
            history += [second.to_param(), {"role": "user", "content": "thanks"}]
            await ask(client, stream, **(asked | {"messages": history}))
            rollout = session.rollout()
            assert rollout is not None
            assert rollout.branches == (), "every call continues the previous one"
            assert session.calls == 3

    in_time(test)


def test_keys_and_versions() -> None:
    async def test() -> None:
        async with served() as there:
            there.session("7-0")
            path, body = "/v1/messages?beta=true", ASKED
            for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
                named = headers | {"anthropic-version": "2023-06-01", "anthropic-beta": "x-2025-01-01"}
                there.http.headers.clear()
                assert (await there.http.post(path, json=body, headers=named)).status_code == 200
            both = {"x-api-key": key_of("7-0"), "authorization": "Bearer of-another-user"}
            assert (await there.http.post("/sessions/7-0/v1/messages", json=body, headers=both)).status_code == 200
            assert (await there.http.get("/v1/models", headers={"x-api-key": KEY})).json()["object"] == "list"
            async with client_of(there) as client:
                (model,) = [model async for model in client.models.list()]
                assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
                assert (await client.models.retrieve(MODEL)).id == MODEL
                with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                    await client.models.retrieve("claude")

    in_time(test)


def test_errors_have_anthropics_shape_and_classes() -> None:
    async def test() -> None:
        async with served(max_body_mb=1) as there, client_of(there) as client:
            there.session("7-0")
            there.session("8-0", max_calls=1)
            there.session("9-0")
            there.sessions.close("9-0")
            image = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
            long, large = ([{"role": "user", "content": "x" * size}] for size in (5_000, 2**20))
            wrong: list[tuple[Any, dict[str, Any], type[anthropic.APIStatusError], str, str]] = [
                (client, {"model": "claude"}, anthropic.NotFoundError, "not_found_error", "does not exist"),
                (client, {"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
                (client, {"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
                (client, {"messages": [image]}, anthropic.BadRequestError, "invalid_request_error", "type image"),
                (client, {"messages": long}, anthropic.BadRequestError, "invalid_request_error", "prompt is too long"),
                (client, {"messages": large}, anthropic.RequestTooLargeError, "request_too_large", "more than"),
                (client, {"tools": [SEARCH]}, anthropic.BadRequestError, "invalid_request_error", "web_search"),
                (client, {"extra_body": {"top_p": 0.5}}, anthropic.BadRequestError, "invalid_request_error", "top_p"),
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
            async with client_of(there, "8-0") as own:
                await own.messages.create(**ASKED)
                with pytest.raises(anthropic.BadRequestError) as limited:
                    await own.messages.create(**ASKED)
                assert limited.value.error_code == "max_calls_exceeded"
            for method in ("GET", "PUT", "DELETE"):
                answer = await there.http.request(method, "/v1/messages")
                assert (answer.status_code, answer.json()["type"], answer.headers["allow"]) == (405, "error", "POST")
            answer = await there.post("/v1/messages", content=b"{")
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            there.engine.fails = RuntimeError("a fault")
            with pytest.raises(anthropic.InternalServerError, match="RuntimeError in the gateway"):
                await client.messages.create(**ASKED)
            there.engine.fails = GenerationFailed("no engine")
            for stream in (False, True):
                with pytest.raises(anthropic.ServiceUnavailableError, match="no engine"):
                    await client.messages.create(**ASKED, stream=stream)
            assert (await there.http.get("/health")).status_code == 200

    in_time(test)


def test_a_failure_within_a_stream_is_an_event() -> None:
    async def test() -> None:
        async with served(Engine(held=asyncio.Event())) as there, client_of(there, "7-0") as client:
            there.session()
            texts = []

            async def read() -> None:
                async for event in await client.messages.create(**ASKED, stream=True):
                    if event.type == "content_block_delta":
                        texts.append(event)
                        there.sessions.close("7-0")

            with pytest.raises(anthropic.APIStatusError, match="has ended") as raised:
                await read()
            assert texts
            body: Any = raised.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")

    in_time(test)


def test_sessions_of_training_sample_as_the_run_says() -> None:
    async def test() -> None:
        async with served() as there, client_of(there, "7-0") as client:
            there.session()
            await client.messages.create(**ASKED, extra_body={"temperature": 0.1, "top_p": 0.5, "top_k": 3})
            assert there.engine.asked[-1].sampling.temperature == 1.0

    in_time(test)


@pytest.mark.parametrize("stream", [False, True])
def test_deep_arguments_are_a_call_like_any_other(stream: bool) -> None:
    deep = "[" * 800 + "1" + "]" * 800
    call = '<tool_call>{"name": "find", "arguments": {"a": ' + deep + "}}</tool_call>"
    engine = Engine(lambda *_: call)

    async def test() -> None:
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

    in_time(test)
