"""Choices have separate seeds, and sessions have separate settings."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_stand_ins import MODEL, Engine, served

from tests.gateway.conversation_stand_ins import ask_text

pytestmark = pytest.mark.slow

HELLO: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]


async def test_choices_are_separate() -> None:
    async with served() as there:
        create: Any = there.client().chat.completions.create
        asked = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 5}
        full = await create(**asked)
        texts = [choice.message.content for choice in full.choices]
        assert texts == ["hello (5)", "hello (6)", "hello (7)"], "each has its own seed"
        streamed = ["", "", ""]
        async for chunk in await create(**asked, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == texts


async def test_a_custom_tool_is_a_function_to_the_model_and_its_calls_are_text() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: x"}}
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": grammar}}
    calls = ['{"name": "patch", "arguments": {"input": "x"}}', '{"name": "patch", "arguments": {"other": 1}}']

    def script(prompt: str, request: Any) -> str:
        return "done" if "u:ok" in prompt else "".join(f"<tool_call>{call}</tool_call>" for call in calls)

    async with served(Engine(script)) as there:
        there.session("7-0")
        create: Any = there.client("7-0").chat.completions.create
        choice = {"type": "custom", "custom": {"name": "patch"}}
        ids = {"return_token_ids": True}
        full = await create(model=MODEL, messages=HELLO, tools=[tool], tool_choice=choice, extra_body=ids)
        first, second = full.choices[0].message.model_dump()["tool_calls"]
        assert first["type"] == "custom" and first["custom"] == {"name": "patch", "input": "x"}
        assert second["type"] == "function" and second["function"]["arguments"] == '{"other": 1}'
        chunks = [chunk async for chunk in await create(model=MODEL, messages=HELLO, tools=[tool], stream=True)]
        (delta,) = (chunk.choices[0].delta for chunk in chunks if chunk.choices[0].delta.tool_calls)
        assert [call.type for call in delta.tool_calls] == ["custom", "function"]
        reply = full.choices[0].message.model_dump(exclude_none=True)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in (first, second)]
        await create(model=MODEL, messages=[*HELLO, reply, *results, {"role": "user", "content": "ok"}], tools=[tool])
        begun = [*full.prompt_token_ids, *full.choices[0].token_ids]
        assert list(there.engine.asked[-1].prompt_ids[: len(begun)]) == begun, "the calls' exact tokens"


async def test_a_call_belongs_to_the_session_that_it_names() -> None:
    async with served() as there:
        by_path, other = there.session("7-0"), there.session("eval:3/1 ü")
        await there.client("7-0").chat.completions.create(model=MODEL, messages=HELLO)
        await there.client("eval:3/1 ü").chat.completions.create(model=MODEL, messages=HELLO)
        await there.client("7-0").completions.create(model=MODEL, prompt="x", temperature=0.1, top_p=0.5)
        assert (by_path.calls, other.calls) == (2, 1)
        assert not there.opened
        assert {request.sampling.temperature for request in there.engine.asked} == {1.0}, "the session's own"

        await there.client().completions.create(model=MODEL, prompt="x", temperature=0.1)
        assert there.engine.asked[-1].sampling.temperature == 0.1
        (own,) = there.opened
        with pytest.raises(Exception, match="has ended"):
            await ask_text(own, "y", None)  # type: ignore[arg-type]
