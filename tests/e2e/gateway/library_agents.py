"""A task whose agents are third-party libraries: the `openai` client, smolagents and openai-agents, unmodified.

Each computes a sum of the template calculator-agent with its own loop and its own way of describing tools to the model.
The HTTP answers to each library are written to a log, a line per session; the test compares this log with the journal.

The module is copied into the folder of the run's spec and imported by the run's processes, so it imports no
other module of the tests; calculator.py is copied, too.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
from calculator import Calculator

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import ModelAccess, RewardResult, Split

RETURN_IDS = {"return_token_ids": True}
"""The only addition to a library's requests: token ids are returned, for the log."""
TURNS = 3
SYSTEM = "Use the tool calc for one operation at a time. Answer with # and the number."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calc(e: str) -> str:
    """One multiplication, addition or subtraction of integers.

    Args:
        e: such as 12*34, 408-56 or -7+9
    """
    found = re.fullmatch(r"\s*(-?\d{1,12})([*+-])(\d{1,12})\s*", e)
    return str(OPERATIONS[found[2]](int(found[1]), int(found[3]))) if found else "error"


class Log:
    """The answers that one session received, in their order."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.errors: list[str] = []

    async def record(self, response: httpx.Response) -> None:
        """The hook of an asynchronous client."""
        await response.aread()
        self._note(response)

    def record_sync(self, response: httpx.Response) -> None:
        """The hook of a synchronous client."""
        response.read()
        self._note(response)

    def _note(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            self.errors.append(f"{response.status_code}: {response.text[:500]}")
        elif response.headers["content-type"].startswith("text/event-stream"):
            lines = response.text.splitlines()
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            self._add([json.loads(event) for event in events if event != "[DONE]"], streamed=True)
        else:
            self._add([response.json()], streamed=False)

    def _add(self, parts: Sequence[dict[str, Any]], streamed: bool) -> None:
        if failed := [part["error"] for part in parts if part.get("error")]:
            self.errors.append(f"in a stream: {failed[0]}")
        parts = [part.get("response", part) for part in parts]  # events of the Responses API contain a response
        choices = [choice for part in parts for choice in part.get("choices", ())]
        (prompt,) = [part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids")]
        (usage,) = [part["usage"] for part in parts if part.get("usage")]
        items = [item for part in parts for item in part.get("output", ())]
        self.calls.append(
            {
                "prompt": prompt,
                "sampled": [token for one in (*parts, *choices) for token in one.get("token_ids") or ()],
                "usage": [
                    usage.get("prompt_tokens", usage.get("input_tokens")),
                    usage.get("completion_tokens", usage.get("output_tokens")),
                ],
                "streamed": streamed,
                "calls_a_tool": any(
                    (choice.get("message") or choice.get("delta") or {}).get("tool_calls") for choice in choices
                )
                or any(item["type"] == "function_call" for item in items),
            }
        )


async def plain(question: str, access: ModelAccess, log: Log, streamed: bool = False) -> str:
    """A loop over the `openai` client."""
    import openai
    from smolagents.models import get_tool_json_schema

    definition = get_tool_json_schema(_smol_tool())
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    async with _client(access, log) as client:
        text = ""
        for _ in range(TURNS):
            wanted: dict[str, Any] = {"model": access.model, "messages": messages, "tools": [definition]}
            if streamed:
                async with client.chat.completions.stream(
                    **wanted, extra_body=RETURN_IDS, stream_options={"include_usage": True}
                ) as stream:
                    try:
                        message = (await stream.get_final_completion()).choices[0].message
                    except openai.LengthFinishReasonError:
                        return ""  # the client's stream helper raises this for every truncated reply
            else:
                completion = await client.chat.completions.create(**wanted, extra_body=RETURN_IDS)
                message = completion.choices[0].message
            text = message.content or ""
            if not message.tool_calls:
                return text
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
    return text


async def streaming(question: str, access: ModelAccess, log: Log) -> str:
    """The same with streamed replies."""
    return await plain(question, access, log, streamed=True)


async def smolagents(question: str, access: ModelAccess, log: Log) -> str:
    """smolagents' ``ToolCallingAgent``, which is synchronous, in a thread."""
    from smolagents import AgentError, LogLevel, OpenAIServerModel, ToolCallingAgent
    from smolagents.utils import AgentGenerationError

    def run() -> str:
        with httpx.Client(event_hooks={"response": [log.record_sync]}, timeout=600) as http:
            model = OpenAIServerModel(
                access.model,
                api_base=access.base_url,
                api_key=access.api_key,
                client_kwargs={"http_client": http, "max_retries": 0},
                extra_body=RETURN_IDS,
            )
            agent = ToolCallingAgent([_smol_tool()], model, max_steps=TURNS - 1, verbosity_level=LogLevel.OFF)
            try:
                return str(agent.run(question))
            except AgentGenerationError:
                raise  # an error of the server
            except AgentError:
                return ""  # an error in the model's reply

    return await asyncio.to_thread(run)


async def openai_agents(question: str, access: ModelAccess, log: Log) -> str:
    """openai-agents' ``Runner``, over chat completions."""
    from agents import OpenAIChatCompletionsModel

    async with _client(access, log) as client:
        return await _run_agent(question, OpenAIChatCompletionsModel(access.model, client))


async def openai_agents_responses(question: str, access: ModelAccess, log: Log) -> str:
    """The same over the Responses API, its default; the server keeps the conversation."""
    from agents import OpenAIResponsesModel

    async with _client(access, log) as client:
        return await _run_agent(question, OpenAIResponsesModel(access.model, client), auto_previous_response_id=True)


async def _run_agent(question: str, model: Any, **settings: Any) -> str:
    from agents import (
        Agent,
        MaxTurnsExceeded,
        ModelBehaviorError,
        ModelSettings,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    agent = Agent(
        name="calculator",
        instructions=SYSTEM,
        tools=[function_tool(calc)],
        model=model,
        model_settings=ModelSettings(extra_body=RETURN_IDS),
    )
    try:
        return str((await Runner.run(agent, question, max_turns=TURNS, **settings)).final_output)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return ""  # an error in the model's reply


LIBRARIES: tuple[Callable[[str, ModelAccess, Log], Awaitable[str]], ...] = (
    *(plain, streaming, smolagents),
    *(openai_agents, openai_agents_responses),
)


class LibraryAgents:
    """Sums, each answered by one of the libraries."""

    def __init__(self, log: str) -> None:
        """``log`` is the file that gets a line per session."""
        self._log = log
        self._sums = Calculator()

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        return self._sums.prompts(split, size)

    async def run(self, prompt: Prompt, model: ModelAccess) -> RewardResult:
        """One session; its reward is 1.0 for the right number behind a ``#``, and up to 0.5 for calls of the tool."""
        return await self.play(
            LIBRARIES[zlib.crc32(model.rollout_id.encode()) % len(LIBRARIES)].__name__, prompt, model
        )

    async def play(self, name: str, prompt: Prompt, model: ModelAccess) -> RewardResult:
        (library,) = (library for library in LIBRARIES if library.__name__ == name)
        log, text = Log(), ""
        try:
            text = await library(str(prompt.content), model, log)
        except Exception as error:
            log.errors.append(f"{type(error).__name__}: {error}")
        self.write({"library": name, "rollout": model.rollout_id, "uid": prompt.uid, **vars(log)})
        right = text.strip() == f"#{prompt.fields['answer']}"
        used = sum(call["calls_a_tool"] for call in log.calls)
        return RewardResult(1.0 if right else 0.5 * used / TURNS, {"calls": float(len(log.calls))})

    def write(self, session: Mapping[str, Any]) -> None:
        line = json.dumps(session).encode() + b"\n"
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            while line:
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)


def _client(access: ModelAccess, log: Log) -> Any:
    from openai import AsyncOpenAI

    http = httpx.AsyncClient(event_hooks={"response": [log.record]}, timeout=600)
    return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, http_client=http, max_retries=0)


def _smol_tool() -> Any:
    from smolagents import tool

    return tool(calc)
