"""Agents that are third-party libraries: the `openai` client, smolagents and openai-agents, unmodified.

Each computes a sum of the template calculator-agent with its own loop and its own way of describing tools to the model.

The module is copied into the folder of the run's spec and imported by the run's processes, so it imports no
other module of the tests.
"""

from __future__ import annotations

import asyncio
import json
import operator
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from asyncrl_cli.tasks.base import ModelAccess

TURNS = 3
SYSTEM = "Use the tool calc for one operation at a time. Answer with # and the number."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calc(e: str) -> str:
    """One multiplication, addition or subtraction of integers.

    Args:
        e: such as 12*34, 408-56 or -7+9
    """
    match = re.fullmatch(r"\s*(-?\d{1,12})([*+-])(\d{1,12})\s*", e)
    return str(OPERATIONS[match[2]](int(match[1]), int(match[3]))) if match else "error"


async def plain(question: str, access: ModelAccess, streamed: bool = False) -> None:
    """A loop over the `openai` client."""
    import openai
    from smolagents.models import get_tool_json_schema

    definition = get_tool_json_schema(_smol_tool())
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    async with _client(access) as client:
        for _ in range(TURNS):
            request: dict[str, Any] = {"model": access.model, "messages": messages, "tools": [definition]}
            if streamed:
                request["stream_options"] = {"include_usage": True}
                async with client.chat.completions.stream(**request) as stream:
                    try:
                        message = (await stream.get_final_completion()).choices[0].message
                    except openai.LengthFinishReasonError:
                        return  # the client's stream helper raises this for every truncated reply
            else:
                message = (await client.chat.completions.create(**request)).choices[0].message
            if not message.tool_calls:
                return
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
            messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
            for call in calls:
                try:
                    result = calc(**json.loads(call["function"]["arguments"]))
                except (ValueError, TypeError):
                    result = "error"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def streaming(question: str, access: ModelAccess) -> None:
    """The same with streamed replies."""
    await plain(question, access, streamed=True)


async def smolagents(question: str, access: ModelAccess) -> None:
    """smolagents' ``ToolCallingAgent``, which is synchronous, in a thread."""
    from smolagents import AgentError, LogLevel, OpenAIServerModel, ToolCallingAgent
    from smolagents.utils import AgentGenerationError

    def run() -> None:
        model = OpenAIServerModel(
            access.model, api_base=access.base_url, api_key=access.api_key, client_kwargs={"max_retries": 0}
        )
        agent = ToolCallingAgent([_smol_tool()], model, max_steps=TURNS - 1, verbosity_level=LogLevel.OFF)
        try:
            agent.run(question)
        except AgentGenerationError:
            raise  # an error of the server
        except AgentError:
            pass  # an error in the model's reply

    await asyncio.to_thread(run)


async def openai_agents(question: str, access: ModelAccess) -> None:
    """openai-agents' ``Runner``, over chat completions."""
    from agents import OpenAIChatCompletionsModel

    async with _client(access) as client:
        await _run_agent(question, OpenAIChatCompletionsModel(access.model, client))


async def openai_agents_responses(question: str, access: ModelAccess) -> None:
    """The same over the Responses API, its default."""
    from agents import OpenAIResponsesModel

    async with _client(access) as client:
        await _run_agent(question, OpenAIResponsesModel(access.model, client))


async def _run_agent(question: str, model: Any) -> None:
    from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="calculator", instructions=SYSTEM, tools=[function_tool(calc)], model=model)
    with suppress(MaxTurnsExceeded, ModelBehaviorError):  # errors in the model's reply
        await Runner.run(agent, question, max_turns=TURNS)


LIBRARIES: dict[str, Callable[[str, ModelAccess], Awaitable[None]]] = {
    agent.__name__: agent for agent in (plain, streaming, smolagents, openai_agents, openai_agents_responses)
}


def _client(access: ModelAccess) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


def _smol_tool() -> Any:
    from smolagents import tool

    return tool(calc)
