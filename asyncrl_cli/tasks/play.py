"""Play an environment: the policy and the environment take turns until one of them ends the episode.

    reset -> ask the policy -> step(reply) -> ask -> step -> ... -> done, or a limit of the episode

The policy is asked over HTTP, as agents do, so the same rules and limits apply. An environment is synchronous code. It
runs in threads, because a slow step must not stop other episodes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from asyncrl_cli.records.images import Image
from asyncrl_cli.records.prompt import Message, Prompt, normalized, with_data_urls
from asyncrl_cli.records.rewards import Turn
from asyncrl_cli.tasks.base import LARGEST, Environment, ModelAccess, RewardResult, Step, finite

if TYPE_CHECKING:
    import aiohttp

LIMITS = frozenset(
    {"context_length_exceeded", "max_calls_exceeded", "max_images_exceeded", "max_sampled_tokens_exceeded"}
)
"""Error codes of the policy's server for a conversation or an episode that has reached a limit."""

LOOP: ContextVar[asyncio.AbstractEventLoop] = ContextVar("loop")
"""The episode's event loop, for async code that an environment calls from its thread."""
SEES_IMAGES: ContextVar[bool] = ContextVar("sees_images", default=False)
"""True if the episode's model sees images."""


class EpisodeEnded(Exception):
    """The episode was cancelled while its environment ran async code."""


def awaited(value: Any) -> Any:
    """Return the value, or the result of an awaitable. In an episode's thread it runs in the episodes' event loop.

    Raises every exception of the awaitable, and ``EpisodeEnded``.
    """
    if not inspect.isawaitable(value):
        return value

    async def result() -> tuple[Any, BaseException | None]:
        try:
            return await value, None
        except BaseException as error:  # SystemExit and KeyboardInterrupt would end the loop, and all its episodes
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise
            return None, error

    if (loop := LOOP.get(None)) is None:
        outcome, error = asyncio.run(result())
    else:
        try:
            outcome, error = asyncio.run_coroutine_threadsafe(result(), loop).result()
        except concurrent.futures.CancelledError:
            raise EpisodeEnded from None
    if error is not None:
        raise error
    return outcome


class LimitReached(Exception):
    """The episode may not call the policy again."""


async def play(
    environment: Environment,
    model: ModelAccess,
    http: aiohttp.ClientSession,
    variables: Mapping[str, Any] | None = None,
    images: Sequence[Image] = (),
) -> tuple[RewardResult, tuple[Turn, ...]]:
    """Play one episode; returns its reward with metrics, and its turns, without their positions in the tokens. Rewards
    and metrics are summed over the steps. ``variables``: for the chat template. ``images``: the prompt's images, which
    the environment's messages may name by digest.

    At a limit the episode ends without another step, with the reward so far. Raises the environment's exceptions, and
    ``RuntimeError`` if the server answers with neither a reply nor a limit.
    """
    LOOP.set(asyncio.get_running_loop())
    SEES_IMAGES.set(model.max_images > 0)
    tools = _tools(environment)
    rewards, metrics = list[float | None](), Counter[str]()
    try:
        messages = with_data_urls(await asyncio.to_thread(_reset, environment), images)
        while True:
            try:
                reply = await ask(http, model, messages, tools=tools, variables=variables)
            except LimitReached:
                break
            step, step_reward = await asyncio.to_thread(_step, environment, reply)
            rewards.append(step_reward)
            metrics.update(step.metrics)
            if step.done:
                break
            if messages[-1]["role"] == "assistant":  # the reply continued this message
                begun_text = normalized(messages.pop())["content"]
                reply = {**reply, "content": begun_text + (reply.get("content") or "")}
            messages += [reply, *with_data_urls(step.messages, images)]
    finally:
        if (close := getattr(environment, "close", None)) is not None:
            await asyncio.to_thread(close)
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < len(rewards):
        return RewardResult(None, metrics), ()
    return RewardResult(sum(scored, 0.0), metrics), tuple(map(Turn, scored))


def try_environment(environment: Environment, prompt: Prompt) -> RewardResult:
    """Reset the environment and take one step with an empty reply, which a model may give. Returns the step's reward.
    Raises what ``play`` would raise."""
    try:
        _tools(environment)
        with_data_urls(_reset(environment), prompt.images)
        step, reward = _step(environment, {"role": "assistant", "content": ""})
        return RewardResult(reward, step.metrics)
    finally:
        if (close := getattr(environment, "close", None)) is not None:
            close()


def _tools(environment: Environment) -> Sequence[Mapping[str, Any]]:
    tools: Sequence[Mapping[str, Any]] = getattr(environment, "tools", None) or ()
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise TypeError("the environment's `tools` must be OpenAI tool definitions; ToolTask makes them from functions")
    return tools


def _reset(environment: Environment) -> list[Message]:
    messages = environment.reset()
    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise TypeError(f"reset returned {messages!r:.200}, which is not a list of messages with a role")
    return list(messages)


def _step(environment: Environment, reply: Message) -> tuple[Step, float | None]:
    """Take a step; returns it with its reward as a float or None."""
    step = environment.step(reply)
    if not isinstance(step, Step):
        raise TypeError(f"step returned {step!r:.200}, which is not a Step")
    if (reward := finite(step.reward)) is None and step.reward is not None:
        raise TypeError(
            f"step returned the reward {step.reward!r:.200}, which is not a finite number or None (at most {LARGEST:g})"
        )
    return step, reward


async def ask(
    http: aiohttp.ClientSession,
    model: ModelAccess,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> Message:
    """Ask the policy for its next message, a chat completion's ``message``. If the last message is the assistant's, the
    reply continues it. ``variables``: for the chat template. Raises ``LimitReached`` and ``RuntimeError``."""
    body: dict[str, Any] = {"model": model.model, "messages": messages}
    if messages[-1]["role"] == "assistant":
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if variables:
        body["chat_template_kwargs"] = variables
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
