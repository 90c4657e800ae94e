"""Unmodified programs over `/v1/responses`: what they send, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from gateway_stand_ins import MODEL, Engine, chat_format, in_time, served, until
from pydantic import BaseModel
from test_responses import FIND, PATCH, answered, calling, events, says

from asyncrl_cli.rollout.client import GenerationFailed

CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No network."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs.",
            "strict": False,
            "parameters": {"type": "object"},
        },
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": PATCH["format"]},
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__x", "description": "", "tools": [FIND | {"defer_loading": True}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
"""A request of Codex CLI, with every kind of tool that it has."""


def test_codex_is_served_in_a_session() -> None:
    async def test() -> None:
        script = [calling("shell", {"command": ["ls"]}, "Look."), calling("apply_patch", {"input": "*** Begin"})]
        script += [calling("mcp__x.find", {"q": "1"}), "Ok."]
        async with served(says(*script)) as there:
            session = there.session("7-0")
            history: list[Any] = list(CODEX["input"])
            namespaces: list[str | None] = []
            for _ in script:
                last = (await events(there, "7-0", **(CODEX | {"input": history})))[-1]
                assert last.type == "response.completed"
                namespaces += [item.namespace for item in last.response.output if item.type == "function_call"]
                for item in last.response.output:
                    kept = item.model_dump(exclude_none=True, exclude={"id", "status"})  # Codex sends neither of them
                    history.append(kept)
                    if "call_id" in kept:
                        kind = f"{item.type}_output"
                        history.append({"type": kind, "call_id": item.call_id, "output": "Exit code: 0"})
            rollout = session.rollout()
            assert rollout is not None and len(rollout.sequences) == 1
            assert namespaces == [None, "mcp__x"]
            prompt = chat_format().decode(there.engine.asked[0].prompt_ids)
            assert prompt.startswith("[shell][apply_patch][mcp__x.find]s:You are a coding agent.\n\nNo network."), (
                "only what it can use"
            )

    in_time(test)


def test_agents_with_their_default_model_are_served() -> None:
    """openai-agents uses the Responses API by default."""
    from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled

    @function_tool
    def find(q: str) -> str:
        return f"{q} found"

    async def test() -> None:
        script = [calling("find", {"q": "x"}), calling("find", {"q": "y"}, "And"), "Both."] * 3
        async with served(says(*script)) as there:
            sessions = [there.session(f"7-{number}") for number in range(3)]
            for number in range(3):
                async with there.client(f"7-{number}") as client:
                    set_default_openai_client(client, use_for_tracing=False)
                    agent = Agent(name="a", instructions="Find.", model=MODEL, tools=[find])
                    if number == 1:
                        streamed = Runner.run_streamed(agent, "x and y")
                        kinds = [event.type async for event in streamed.stream_events()]
                        assert "raw_response_event" in kinds
                        assert streamed.final_output == "Both."
                    else:
                        by_id = {"auto_previous_response_id": True} if number == 2 else {}
                        assert (await Runner.run(agent, "x and y", **by_id)).final_output == "Both."
            for session in sessions:
                rollout = session.rollout()
                assert rollout is not None and len(rollout.sequences) == 1
                assert session.calls == 3

    set_tracing_disabled(True)
    in_time(test)


def test_replies_can_be_parsed() -> None:
    class Find(BaseModel):
        q: str

    async def test() -> None:
        async with served(says(calling("Find", {"q": "x"}))) as there, there.client() as client:
            tools: Any = [openai.pydantic_function_tool(Find)]
            response: Any = await client.responses.parse(model=MODEL, input="go", tools=tools)
            (call,) = response.output
            assert call.parsed_arguments == Find(q="x")

    in_time(test)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "1"}]}, "invalid_value", "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "invalid_value",
            "input",
        ),
        ({"input": []}, "invalid_value", None),
        ({"input": None}, "invalid_value", "input"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [FIND]}, "invalid_value", None),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"top_p": 0.5}, "unsupported_parameter", "top_p"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_parameter", "include"),
        ({"tools": [FIND, {"type": "web_search"}]}, "unsupported_parameter", "tools.1.type"),
        ({"tool_choice": {"type": "web_search"}}, "unsupported_parameter", "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "unsupported_parameter", "text.format"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], code: str, param: str | None) -> None:
    async def test() -> None:
        async with served() as there:
            answer = await there.post("/v1/responses", {"input": "a", **changes})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
            assert not there.engine.asked

    in_time(test)


def test_a_session_of_training_overrides_what_changes_the_distribution() -> None:
    async def test() -> None:
        async with served(Engine()) as there:
            there.session("7-0")
            body = {"top_p": 0.5, "temperature": 0.0, "tools": [{"type": "web_search"}]}
            response = await answered(there, "7-0", input="a", tool_choice={"type": "web_search"}, **body)
            assert (response.temperature, response.top_p, response.tools) == (None, 1.0, [])
            (asked,) = there.engine.asked
            assert asked.sampling.temperature == 1.0
            answer = await there.post("/v1/responses", {"input": "a", "background": True}, "7-0")
            assert answer.status_code == 400, "what no session can serve"

    in_time(test)


def test_failures_have_openais_shape() -> None:
    async def test() -> None:
        async with served(Engine(fails=GenerationFailed("no engine"))) as there, there.client() as client:
            with pytest.raises(openai.InternalServerError, match="no engine"):
                await client.responses.create(model=MODEL, input="a", stream=True)
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.responses.create(model="other", input="a")
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.responses.create(model=MODEL, input="a" * 5000)
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="x").responses.create(model=MODEL, input="a")
            with pytest.raises(openai.NotFoundError, match="no such path"):
                await client.responses.retrieve("resp_1")

    in_time(test)


def test_a_failure_in_a_stream_is_its_last_event() -> None:
    async def test() -> None:
        engine = Engine(lambda prompt, request: "half of this", held=asyncio.Event())
        async with served(engine) as there, there.client("7-0") as client:
            there.session("7-0")
            stream = await client.responses.create(model=MODEL, input="a", stream=True)
            kinds = []
            async for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    there.sessions.close("7-0")
            assert kinds[-1] == "response.failed"
            assert event.response.error is not None and "has ended" in event.response.error.message
            await until(lambda: engine.running == 0)

    in_time(test)
