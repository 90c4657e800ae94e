"""`/v1/responses` over real HTTP: conversations, programs and refusals beyond the golden pairs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversation_stand_ins import rollout_of
from gateway_stand_ins import MODEL, Engine, Served, served
from openai.types.responses import Response

from asyncrl_cli.gateway.responses_reply import KeptResponses

pytestmark = pytest.mark.slow


def says(*replies: str) -> Engine:
    """A model that answers one call after another."""
    left = iter(replies)
    return Engine(lambda prompt, request: next(left))


async def answered(there: Served, session: str | None = None, **body: Any) -> Response:
    """An answer, parsed by OpenAI's model."""
    answer = await there.post("/v1/responses", {"model": MODEL, **body}, session)
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json(), strict=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_repeated_tools_have_null_for_numbers_that_json_lacks(stream: bool) -> None:
    tools = '[{"type": "function", "name": "f", "parameters": {"a": [1e999, 2]}}]'
    body = '{"input": "hi", "stream": ' + json.dumps(stream) + ', "tools": ' + tools + "}"
    async with served() as there:
        answer = await there.post("/v1/responses", content=body)
        assert answer.status_code == 200, answer.text
        last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
        (tool,) = (json.loads(last)["response"] if stream else answer.json())["tools"]
        assert tool["parameters"] == {"a": [None, 2]}


async def test_a_session_of_training_overrides_what_changes_the_distribution() -> None:
    async with served(Engine()) as there:
        there.session("7-0")
        body = {"top_p": 0.5, "temperature": 0.0, "tools": [{"type": "web_search"}]}
        response = await answered(there, "7-0", input="a", tool_choice={"type": "web_search"}, **body)
        assert (response.temperature, response.top_p, response.tools) == (None, 1.0, [])
        (asked,) = there.engine.asked
        assert asked.sampling.temperature == 1.0
        for extra in ({"background": True}, {"include": ["message.output_text.logprobs"]}, {"input": None}):
            answer = await there.post("/v1/responses", {"input": "a"} | extra, "7-0")
            assert answer.status_code == 400, "what no session can serve"


async def test_a_response_is_continued_in_its_own_session_alone() -> None:
    async with served(Engine()) as there:
        there.session("7-0")
        there.session("7-1")
        first = await answered(there, "7-0", input="a")
        assert (await answered(there, "7-0", input="b", previous_response_id=first.id)).previous_response_id == first.id
        plain = await answered(there, input="a")
        await answered(there, input="b", previous_response_id=plain.id)
        unkept = await answered(there, input="a", store=False)
        for session, response_id in (
            ("7-1", first.id),
            (None, first.id),
            ("7-0", plain.id),
            (None, unkept.id),
            (None, "x"),
        ):
            refused = await there.post("/v1/responses", {"input": "b", "previous_response_id": response_id}, session)
            assert refused.status_code == 404
            error = refused.json()["error"]
            assert error["code"] == "previous_response_not_found"
            assert error["param"] == "previous_response_id"
            assert response_id in error["message"]


async def test_instructions_are_not_taken_over() -> None:
    prompts: list[str] = []

    def script(prompt: str, request: Any) -> str:
        prompts.append(prompt)
        return "yes"

    async with served(Engine(script)) as there:
        there.session("7-0")
        first = await answered(there, "7-0", input="a", instructions="Old.")
        await answered(there, "7-0", input="b", instructions="New.", previous_response_id=first.id)
        assert "Old." in prompts[0]
        assert "Old." not in prompts[1] and "New." in prompts[1] and "u:a" in prompts[1]


async def test_a_conversation_may_change_its_api() -> None:
    async with served(says("one", "two")) as there, there.client("7-0") as client:
        session = there.session("7-0")
        await client.responses.create(model=MODEL, input="a", instructions="Be.")
        messages: Any = [
            {"role": "system", "content": "Be."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "b"},
        ]
        await client.chat.completions.create(model=MODEL, messages=messages)
        rollout = rollout_of(session)
        assert len(rollout.sequences) == 1


def test_kept_conversations_are_bounded() -> None:
    kept = KeptResponses(limit=300)
    small = [{"role": "user", "content": "x"}]
    for name in "ab":
        kept.add(name, small)
    kept.get("a")
    kept.add("c", [{"role": "user", "content": "x" * 60}])
    with pytest.raises(Exception, match="'b' not found"):
        kept.get("b")
    assert kept.get("a") == small
    kept.add("d", [{"role": "user", "content": "x" * 600}])
    assert len(kept.get("d")) == 1, "the newest is kept whatever its size"
    for name in "ac":
        with pytest.raises(Exception, match="not found"):
            kept.get(name)
