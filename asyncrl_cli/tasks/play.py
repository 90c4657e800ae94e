"""Playing an environment: the policy is asked, the environment answers, until one of them ends it.

    reset -> ask the policy -> step(reply) -> ask -> step -> ... -> done, or a limit of the episode

The policy is asked over HTTP, as agents do, so the same rules and limits apply. An environment is plain synchronous
code; it runs in threads, so that a slow step stops no other episode.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl_cli.records.prompt import Message
from asyncrl_cli.tasks.base import Environment, ModelAccess, RewardResult, finite

if TYPE_CHECKING:
    import aiohttp

LIMITS = frozenset({"context_length_exceeded", "max_calls_exceeded", "max_sampled_tokens_exceeded"})
"""Error codes of the policy's server that say: this conversation, or this episode, has reached a limit."""


class LimitReached(Exception):
    """The policy may not be asked any more."""


async def play(environment: Environment, model: ModelAccess, http: aiohttp.ClientSession) -> RewardResult:
    """One episode. The rewards of all steps add up, and so do their metrics, by name.

    At a limit the episode ends without another step, with the reward so far. Raises what the environment raises, and
    ``RuntimeError`` for an answer of the server that is neither a reply nor a limit.
    """
    tools: Sequence[Mapping[str, Any]] = getattr(environment, "tools", None) or ()
    reward, metrics = 0.0, Counter[str]()
    try:
        messages = list(await asyncio.to_thread(environment.reset))
        while True:
            try:
                reply = await ask(http, model, messages, tools)
            except LimitReached:
                break
            step = await asyncio.to_thread(environment.step, reply)
            if (number := finite(step.reward)) is None:
                raise TypeError(f"step returned the reward {step.reward!r}, which is not a finite number")
            reward += number
            metrics.update(step.metrics)
            if step.done:
                break
            messages += [reply, *step.messages]
    finally:
        if (close := getattr(environment, "close", None)) is not None:
            await asyncio.to_thread(close)
    return RewardResult(reward, metrics)


async def ask(
    http: aiohttp.ClientSession, model: ModelAccess, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> Message:
    """The policy's next message, as a chat completion's ``message``. Raises ``LimitReached`` and ``RuntimeError``."""
    body: dict[str, Any] = {"model": model.model, "messages": messages}
    if tools:
        body["tools"] = tools
    headers = {"Authorization": f"Bearer {model.api_key}"}
    async with http.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        if response.status == 200:
            message: Message = answer["choices"][0]["message"]
            return message
    error = answer.get("error", {})
    if error.get("code") in LIMITS:
        raise LimitReached(error.get("message", ""))
    raise RuntimeError(f"the policy's server answered {response.status}: {error.get('message', answer)}")
