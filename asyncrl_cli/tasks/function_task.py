"""Use a reward function, agent function or environment class as a task.

Each gets the prompt's row as a dict: ``uid``, ``prompt`` (text, or a list of messages) and all other fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt, with_data_urls
from asyncrl_cli.sandbox.commands import BlockingSandbox, ShellSandbox
from asyncrl_cli.tasks.base import Environment, ModelAccess, Reward, RewardResult
from asyncrl_cli.tasks.episode_sandbox import parameter_use

ROW = frozenset({"prompt", "row", "example", "item", "record", "sample"})
"""Parameter names that stand for the row in a reward function."""
RESPONSE = frozenset(
    {
        *("response", "response_str", "response_text", "completion", "generation", "model_output", "output"),
        *("predict_str", "prediction", "reply", "solution_str", "text"),
    }
)
"""Parameter names that stand for the response in a reward function, here and in other trainers."""
RESPONSES = frozenset({"responses", "completions"})
"""Parameter names that stand for the responses of the whole group."""
BY_NAME = (
    "arguments are passed by name: `prompt` is the row as a dict, `response` the text (`responses`: the texts of the "
    "whole group), `finished` whether the model ended it; any other name is a column of the row (docs/tasks.md)"
)


def row_of(prompt: Prompt) -> dict[str, Any]:
    """A prompt's row for the user's functions; images in messages are data URLs."""
    content: Any = prompt.content
    if not isinstance(content, str):
        content = [dict(message) for message in with_data_urls(content, prompt.images)]
    return {**prompt.fields, "uid": prompt.uid, "prompt": content}


class FunctionTask:
    """A task with one function, such as ``f(prompt, response) -> float``, which may be async.

    Invariant: arguments are matched by parameter name, never by position. Functions from other trainers take the same
    arguments in another order, and would silently score the wrong text (decision 0083).
    """

    response_names, usual_name = RESPONSE, "response"

    def __init__(self, function: Callable[..., Any], name: str, location: str = "task.use") -> None:
        """Raises ``TaskError`` at ``location`` unless exactly one parameter is the response."""
        self.name = name
        self.function = function
        try:
            self._signature = inspect.signature(function)
        except ValueError:
            message = f"{name} is a builtin whose parameters are not known"
            raise TaskError(message, location=location, hint="call it in a function reward(prompt, response)") from None
        stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        names = [name for name, parameter in self._signature.parameters.items() if parameter.kind not in stars]
        self._row = _only_match(names, ROW, "prompt")
        self._response = _only_match(names, self.response_names, self.usual_name)
        if not self._response:
            raise TaskError(
                f"{name}{self._signature} has no parameter that is clearly the response",
                location=location,
                hint=f"{BY_NAME}; an agent is an async function f(prompt, model)",
            )

    def reward(self, prompt: Prompt, response: str, finished: bool) -> Reward | Awaitable[Reward]:
        """Call the function; the caller checks the result. Raises ``LookupError`` if the row lacks a parameter."""
        row = row_of(prompt)
        value: Reward = self._call(row, {self._row: row, self._response: response, "finished": finished})
        return value

    def _call(self, row: Mapping[str, Any], call_values: Mapping[str, Any]) -> Any:
        nested = row.get("reward_model")  # here verl's rows have the ground truth
        values = {**(nested if isinstance(nested, Mapping) else {}), **row, **call_values}
        arguments: dict[str, Any] = {}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                passed_names = arguments.keys() | call_values.keys()
                arguments[name] = {column: row[column] for column in row if column not in passed_names}
            elif name in values and parameter.kind is not parameter.VAR_POSITIONAL:
                arguments[name] = values[name]
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
                raise LookupError(
                    f"its parameter {name!r} is not a column of the row, which has {', '.join(map(repr, row))}"
                )
        bound = inspect.BoundArguments(self._signature, arguments)
        return self.function(*bound.args, **bound.kwargs)


class GroupFunction(FunctionTask):
    """A task with one function that scores the responses of a group together: ``f(prompt, responses) -> list``.

    A function with ``completions`` and without the row is called as in TRL: ``prompts`` and every column are lists with
    one entry for each response, and if the prompt is a list of messages, so is each completion. Given a single answer
    instead of a list, a TRL function would compare each response with one letter of it.
    """

    response_names, usual_name = RESPONSES, "responses"

    def rewards(self, prompt: Prompt, responses: list[str], finished: list[bool]) -> Any:
        """Call the function; the caller checks the result. Raises ``LookupError`` if the row lacks a parameter."""
        row = row_of(prompt)
        if self._row or self._response != "completions":
            return self._call(row, {self._row: row, self._response: responses, "finished": finished})
        content = row.pop("prompt")
        columns = {name: [value] * len(responses) for name, value in {**row, "prompts": content}.items()}
        completions: list[Any] = responses
        if not isinstance(content, str):
            completions = [[{"role": "assistant", "content": text}] for text in responses]
        return self._call(columns, {"completions": completions, "finished": finished})


def _only_match(names: Collection[str], accepted_names: Collection[str], usual_name: str) -> str:
    """Return ``usual_name`` if it is among the names, or the only accepted name; empty if there is none or several."""
    matches = [name for name in names if (name.strip("_") or "prompt") in accepted_names]
    return usual_name if usual_name in matches else matches[0] if len(matches) == 1 else ""


class AgentFunction:
    """An agent: an async function ``f(prompt, model) -> float | RewardResult``. A third parameter ``sandbox`` gets the
    episode's sandbox."""

    def __init__(self, function: Callable[..., Awaitable[Any]], name: str) -> None:
        self.name = name
        self.sandbox_use = parameter_use(function)
        self.function = function

    async def run(
        self, prompt: Prompt, model: ModelAccess, sandbox: ShellSandbox | None = None
    ) -> float | RewardResult | None:
        further = {} if sandbox is None else {"sandbox": sandbox}
        value: float | RewardResult | None = await self.function(row_of(prompt), model, **further)
        return value


class EnvironmentClass:
    """An environment class; each episode has an instance. It is constructed with ``task.options``, and with ``prompt``
    and ``sandbox`` if the constructor has these parameters."""

    def __init__(self, environment: Callable[..., Environment], options: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._environment = environment
        self._options = dict(options)
        self._sees_prompt = "prompt" in inspect.signature(environment).parameters
        self.sandbox_use = parameter_use(environment)

    def environment(self, prompt: Prompt, sandbox: BlockingSandbox | None = None) -> Environment:
        further: dict[str, Any] = {"prompt": row_of(prompt)} if self._sees_prompt else {}
        further |= {} if sandbox is None else {"sandbox": sandbox}
        return self._environment(**self._options, **further)
