"""A user's reward function, agent function or environment class as a task.

Each is passed the prompt's row as a dict: its ``uid``, its ``prompt`` (text, or a list of messages) and all its other
fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import Environment, ModelAccess, RewardResult
from asyncrl_cli.tasks.episode_sandbox import parameter_use
from asyncrl_cli.tasks.shell_sandbox.blocking import BlockingSandbox
from asyncrl_cli.tasks.shell_sandbox.settings import ShellSandbox


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The row of a prompt, as the user's functions are passed it."""
    content = prompt.content if isinstance(prompt.content, str) else [dict(message) for message in prompt.content]
    return {**prompt.fields, "uid": prompt.uid, "prompt": content}


class FunctionTask:
    """A task of one function ``f(prompt, response) -> float | RewardResult``, which may be async.

    A function with a parameter ``finished`` gets that, too: whether the model ended the response itself.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name = name
        self.function = function
        self._takes_finished = _takes_finished(function)

    def reward(
        self, prompt: Prompt, response: str, finished: bool
    ) -> float | RewardResult | Awaitable[float | RewardResult]:
        """What the function returns; ``scoring.checked`` checks that it is a reward."""
        further = {"finished": finished} if self._takes_finished else {}
        value: float = self.function(row_of(prompt), response, **further)
        return value


def _takes_finished(function: Callable[..., Any]) -> bool:
    try:
        return "finished" in inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return False


class AgentFunction:
    """An agent: one async function ``f(prompt, model) -> float | RewardResult``; with a third parameter ``sandbox`` it
    gets the episode's."""

    def __init__(self, function: Callable[..., Awaitable[Any]], name: str) -> None:
        self.name = name
        self.sandbox_use = parameter_use(function)
        self._function = function

    async def run(
        self, prompt: Prompt, model: ModelAccess, sandbox: ShellSandbox | None = None
    ) -> float | RewardResult | None:
        """Play one episode."""
        further = {} if sandbox is None else {"sandbox": sandbox}
        value: float | RewardResult | None = await self._function(row_of(prompt), model, **further)
        return value


class EnvironmentClass:
    """A class of environments, one made for each episode from ``task.options`` and, if it names them, ``prompt`` and
    ``sandbox``."""

    def __init__(self, environment: Callable[..., Environment], options: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._environment = environment
        self._options = dict(options)
        self._sees_prompt = "prompt" in inspect.signature(environment).parameters
        self.sandbox_use = parameter_use(environment)

    def environment(self, prompt: Prompt, sandbox: BlockingSandbox | None = None) -> Environment:
        """The environment of one episode."""
        further: dict[str, Any] = {"prompt": row_of(prompt)} if self._sees_prompt else {}
        further |= {} if sandbox is None else {"sandbox": sandbox}
        return self._environment(**self._options, **further)
