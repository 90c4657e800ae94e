"""`/v1/responses`: OpenAI's own client gets answers, and its own models accept them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_stand_ins import MODEL, Engine, Served, in_time, served
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FIND: Any = {
    "type": "function",
    "name": "find",
    "description": "Finds.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    "strict": False,
}
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}


def says(*replies: str) -> Engine:
    """A model that answers one call after another."""
    left = iter(replies)
    return Engine(lambda prompt, request: next(left))


def calling(name: str, arguments: Any, before: str = "") -> str:
    return f"{before}<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def answered(there: Served, session: str | None = None, **body: Any) -> Response:
    """An answer, parsed by OpenAI's model."""
    answer = await there.post("/v1/responses", {"model": MODEL, **body}, session)
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json(), strict=True)


async def events(there: Served, session: str | None = None, **body: Any) -> list[Any]:
    """The events of a stream, parsed by OpenAI's models."""
    answer = await there.post("/v1/responses", {"model": MODEL, "stream": True, **body}, session)
    assert answer.status_code == 200, answer.text
    named = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        named.append(EVENT.validate_python(event, strict=True))
    assert [event.sequence_number for event in named] == list(range(len(named)))
    return named


def test_a_text_is_answered() -> None:
    async def test() -> None:
        async with served(says("It is 7.")) as there:
            response = await answered(there, input="3+4?", instructions="Be brief.", metadata={"a": "b"})
            assert response.output_text == "It is 7."
            assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
            assert response.model == MODEL
            assert response.metadata == {"a": "b"}
            assert response.instructions == "Be brief."
            (item,) = response.output
            assert item.type == "message" and item.status == "completed"
            (asked,) = there.engine.asked
            usage = response.usage
            assert usage is not None
            assert usage.input_tokens == len(asked.prompt_ids)
            assert usage.output_tokens == len("It is 7.") + 1
            assert usage.total_tokens == usage.input_tokens + usage.output_tokens
            assert usage.output_tokens_details.reasoning_tokens == 0

    in_time(test)


def test_a_stream_has_all_events_in_their_order() -> None:
    async def test() -> None:
        async with served(says("It is 7.")) as there:
            got = await events(there, input="3+4?")
            kinds = [event.type for event in got if event.type != "response.output_text.delta"]
            assert kinds == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
            deltas = [event.delta for event in got if event.type == "response.output_text.delta"]
            assert len(deltas) > 1
            assert "".join(deltas) == "It is 7."
            assert got[-1].response.output == [got[-2].item]
            assert got[-1].response.id == got[0].response.id

    in_time(test)


def test_calls_of_tools_are_items() -> None:
    async def test() -> None:
        async with served(says(*[calling("find", {"q": "x"}, "So:"), calling("patch", {"input": "+1"})] * 2)) as there:
            tools = [FIND, PATCH]
            response = await answered(there, input="go", tools=tools, tool_choice="auto", parallel_tool_calls=False)
            message, call = response.output
            assert message.type == "message" and response.output_text == "So:"
            assert call.type == "function_call" and json.loads(call.arguments) == {"q": "x"}
            assert response.status == "completed"
            assert response.parallel_tool_calls is False
            (custom,) = (await answered(there, input="go", tools=tools)).output
            assert custom.type == "custom_tool_call" and custom.input == "+1"

            got = await events(there, input="go", tools=tools)
            assert [event.type for event in got][-6:] == [
                "response.output_item.done",
                "response.output_item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.output_item.done",
                "response.completed",
            ]
            assert [event.output_index for event in got if event.type == "response.output_item.done"] == [0, 1]
            got = await events(there, input="go", tools=tools)
            assert [event.type for event in got][2:-2] == [
                "response.output_item.added",
                "response.custom_tool_call_input.delta",
                "response.custom_tool_call_input.done",
            ]

    in_time(test)


def test_a_reply_that_is_cut_is_incomplete() -> None:
    async def test() -> None:
        async with served(says("far too long", "far too long")) as there:
            response = await answered(there, input="go", max_output_tokens=3)
            assert response.status == "incomplete"
            assert response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"
            assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
            assert response.output_text == "far"
            last = (await events(there, input="go", max_output_tokens=3))[-1]
            assert last.type == "response.incomplete"
            assert last.response.usage.output_tokens == 3

    in_time(test)


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_json_does_not_have_are_null_in_what_is_repeated(stream: bool) -> None:
    tools = '[{"type": "function", "name": "f", "parameters": {"a": [1e999, 2]}}]'
    body = '{"input": "hi", "stream": ' + json.dumps(stream) + ', "tools": ' + tools + "}"

    async def test() -> None:
        async with served() as there:
            answer = await there.post("/v1/responses", content=body)
            assert answer.status_code == 200, answer.text
            last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
            (tool,) = (json.loads(last)["response"] if stream else answer.json())["tools"]
            assert tool["parameters"] == {"a": [None, 2]}

    in_time(test)
