"""Use the environments of an OpenEnv server.

Each episode is one session of the server, over its WebSocket. An observation becomes a message to the policy, and the
policy's reply becomes an action:

- if an action needs only one text, the whole reply is this text;
- otherwise the policy calls the tool ``act`` with the action's fields as arguments.

OpenEnv needs older packages than vLLM, so the server runs elsewhere. This file does not need OpenEnv.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import Split, Step
from asyncrl_cli.tasks.play import awaited
from asyncrl_cli.tasks.prompts import LazyPrompts

SEEDED = "(the environment speaks first)"
"""The prompt of the rows below, because a prompt cannot be empty. The policy does not see it."""
HELD_OUT = 2**30
"""The eval split's first seed."""


class OpenEnv:
    """The task. Every rollout of a group resets the environment with the same seed."""

    def __init__(self, url: str, instructions: str = "", observation: str = "", timeout_s: float = 60.0) -> None:
        """``url``: the server's URL. ``instructions``: a system message. ``observation``: the field of an observation
        that the policy reads; by default all fields, as JSON. ``timeout_s``: limit for one answer of the server.

        Raises ``TaskError`` if there is no OpenEnv server, or its observations lack this field.
        """
        self.url, self.instructions, self.observation = url.rstrip("/"), instructions, observation
        self.timeout_s = timeout_s
        try:
            with urllib.request.urlopen(f"{self.url}/schema", timeout=timeout_s) as answer:
                schema = json.load(answer)
            fields, self.action = schema["observation"]["properties"], dict(schema["action"])
            arguments = {name: one for name, one in self.action["properties"].items() if name != "metadata"}
        except (OSError, ValueError, LookupError, TypeError) as error:
            problem = f"no OpenEnv server answers at {self.url}: {type(error).__name__}: {error}"
            raise TaskError(
                problem, location="task.options.url", hint="start the server, or correct the URL"
            ) from error
        if observation and observation not in fields:
            problem = f"its observations have no field {observation!r}"
            raise TaskError(problem, location="task.options.observation", hint=f"they have {', '.join(fields)}")
        self.action["properties"] = arguments
        needed = self.action.get("required") or list(arguments)
        is_text = len(needed) == 1 and arguments[needed[0]].get("type") == "string"
        self.text_field = needed[0] if is_text else ""

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` seeds of the split."""

        def row(index: int) -> Prompt:
            return Prompt(f"openenv/{split}/{index}", SEEDED, {"seed": index + (HELD_OUT if split == "eval" else 0)})

        return LazyPrompts(size, row)

    def environment(self, prompt: Prompt) -> OpenEnvEpisode:
        return OpenEnvEpisode(self, prompt)


class OpenEnvEpisode:
    """One session with the server. It begins at ``reset``."""

    def __init__(self, task: OpenEnv, prompt: Prompt) -> None:
        self._task = task
        self._prompt = prompt
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        act = {"name": "act", "description": task.action.get("description", ""), "parameters": task.action}
        self.tools = [] if task.text_field else [{"type": "function", "function": act}]

    def reset(self) -> Sequence[Message]:
        """Return the prompt, if the row has one, and the first observation. The row's other fields, such as ``seed``,
        are arguments of the environment's ``reset``."""
        answer = awaited(self._ask({"type": "reset", "data": dict(self._prompt.fields)}))
        if answer["done"]:
            raise RuntimeError("the environment is done before the first action")
        text = "" if self._prompt.content == SEEDED else self._prompt.content
        system = self._task.instructions
        given = list(text) if not isinstance(text, str) else [{"role": "user", "content": text}] if text else []
        instructions = [{"role": "system", "content": system}] if system else []
        return [*instructions, *given, {"role": "user", "content": self._shown(answer)}]

    def step(self, reply: Message) -> Step:
        """Return the observation after the action, with its reward. If the server refuses the action, the policy gets
        the reason, and the metric ``refused_actions`` counts it."""
        calls = reply.get("tool_calls") or []
        try:
            if self._task.text_field:
                action = {self._task.text_field: reply.get("content") or ""}
            elif len(calls) != 1 or not isinstance(action := json.loads(calls[0]["function"]["arguments"]), dict):
                raise ValueError("call the tool `act` once, with the action's fields")
            answer = awaited(self._ask({"type": "step", "data": action}))
        except ValueError as error:  # includes JSON's errors
            return Step(self._said(calls, f"Error: {error}"), metrics={"refused_actions": 1.0})
        reward = float(answer["reward"] or 0.0)
        return Step(self._said(calls, self._shown(answer)), reward=reward, done=bool(answer["done"]))

    def close(self) -> None:
        """End the session."""
        awaited(self._close())

    def _said(self, calls: Sequence[Mapping[str, Any]], text: str) -> list[Message]:
        """A message to the policy: a result for each of its calls, if there are any."""
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        return answers or [{"role": "user", "content": text}]

    def _shown(self, answer: Mapping[str, Any]) -> str:
        seen = {name: value for name, value in answer["observation"].items() if name != "metadata"}
        chosen = seen.get(self._task.observation, seen)
        return chosen if isinstance(chosen, str) else json.dumps(chosen, ensure_ascii=False)

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the server. Raises ``ValueError`` if it refuses an action, and ``RuntimeError``."""
        if self._http is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=self._task.timeout_s)
            self._http = aiohttp.ClientSession(timeout=limits)
        try:
            if self._socket is None:
                self._socket = await self._http.ws_connect(f"{self._task.url}/ws", max_msg_size=0)
            with suppress(ConnectionError):  # a full server has closed the socket, but its reason can still be read
                await self._socket.send_json(message)
            answer = await self._socket.receive_json(timeout=self._task.timeout_s)
        except (aiohttp.ClientError, OSError, TypeError, TimeoutError) as error:
            raise RuntimeError(f"the OpenEnv server was lost: {type(error).__name__}: {error}") from error
        data: Mapping[str, Any] = answer["data"]
        if answer["type"] != "error":
            return data
        problem = f"{data['message']}: {json.dumps(data['errors'])}" if data.get("errors") else data["message"]
        if data["code"] == "VALIDATION_ERROR":
            raise ValueError(problem)
        hint = " (lower task.episode.concurrency)" if data["code"] == "CAPACITY_REACHED" else ""
        raise RuntimeError(f"the OpenEnv server reports {data['code']}: {problem}{hint}")

    async def _close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            # The server frees the session's slot before it closes the socket; the next episode may need the slot.
            await self._socket.send_json({"type": "close"})
            await self._socket.receive(timeout=self._task.timeout_s)
            await self._socket.close()
        if self._http is not None:
            await self._http.close()
