"""Tasks whose policy calls Python functions: what most environments are.

    class Weather(ToolTask):
        def tools(self, prompt):
            return [temperature]          # def temperature(city: str, day: int = 0) -> float: '''...'''

        def judge(self, prompt, text):
            return float(prompt.fields["answer"] in text)

A tool is described by its signature and its docstring. What a call of it returns, or the exception that it raises, goes
back to the policy as text: so the policy can correct its own mistakes. The first reply without a call is the answer,
which is judged.

Methods with a parameter ``sandbox`` get the episode's sandbox (``episode_sandbox``): ``tools(prompt, sandbox)``,
``judge(prompt, text, sandbox)``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import RewardResult, Step, Use
from asyncrl_cli.tasks.episode_sandbox import parameter_use

if TYPE_CHECKING:
    from asyncrl_cli.tasks.shell_sandbox.blocking import BlockingSandbox

Judge = Callable[[Prompt, str], float | RewardResult]


class ToolTask:
    """Base class: an ``EnvironmentTask`` of two methods."""

    def tools(self, prompt: Prompt) -> Sequence[Callable[..., Any]]:
        """The functions of one episode."""
        raise NotImplementedError

    def judge(self, prompt: Prompt, text: str) -> float | RewardResult:
        """The reward of the final answer."""
        raise NotImplementedError

    @property
    def sandbox_use(self) -> Use:
        """A sandbox is for ``tools`` and ``judge``, whichever of them has a parameter ``sandbox``."""
        uses = {parameter_use(self.tools), parameter_use(self.judge)}
        return next((use for use in (Use.REQUIRED, Use.OPTIONAL) if use in uses), Use.NO)

    def environment(self, prompt: Prompt, sandbox: BlockingSandbox | None = None) -> ToolEnvironment:
        """One conversation."""
        tools, judge = _with_sandbox(self.tools, sandbox), _with_sandbox(self.judge, sandbox)
        return ToolEnvironment(prompt, tools(prompt), judge)


def _with_sandbox(method: Callable[..., Any], sandbox: BlockingSandbox | None) -> Callable[..., Any]:
    """The method with the sandbox as its argument, if it takes one."""
    return method if sandbox is None or parameter_use(method) is Use.NO else partial(method, sandbox=sandbox)


class ToolEnvironment:
    """Runs the calls of each reply until one has none; the prompt's messages begin the conversation."""

    def __init__(self, prompt: Prompt, functions: Sequence[Callable[..., Any]], judge: Judge) -> None:
        self._prompt = prompt
        self._tools = {tool.name: tool for tool in map(Tool, functions)}
        self._judge = judge
        self.tools = [tool.definition for tool in self._tools.values()]

    def reset(self) -> Sequence[Message]:
        """The prompt."""
        content = self._prompt.content
        return [{"role": "user", "content": content}] if isinstance(content, str) else content

    def step(self, reply: Message) -> Step:
        """The calls' results, or the verdict. Metrics: ``tool_calls``, and ``tool_errors`` among them."""
        if calls := reply.get("tool_calls"):
            results = [self._called(call) for call in calls]
            messages = [
                {"role": "tool", "tool_call_id": call.get("id", ""), "content": text}
                for call, (text, _) in zip(calls, results, strict=True)
            ]
            errors = sum(not right for _, right in results)
            return Step(messages, metrics={"tool_calls": float(len(calls)), "tool_errors": float(errors)})
        verdict = self._judge(self._prompt, reply.get("content") or "")
        result = verdict if isinstance(verdict, RewardResult) else RewardResult(verdict)
        return Step(reward=result.reward, done=True, metrics=result.metrics)

    def _called(self, call: Mapping[str, Any]) -> tuple[str, bool]:
        """The result of a call, and whether it succeeded."""
        name = call["function"]["name"]
        if (tool := self._tools.get(name)) is None:
            return f"Error: there is no tool {name!r}; there are {', '.join(self._tools)}", False
        try:
            return tool(call["function"]["arguments"]), True
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}", False


class Tool:
    """A function as a tool. ``definition`` is in OpenAI's form.

    The first paragraph of the docstring describes it; lines ``name: text`` in it describe its parameters.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        from pydantic import create_model

        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = function
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function)
        described = inspect.getdoc(function) or ""
        fields: dict[str, Any] = {
            name: (hints.get(name, str), ... if parameter.default is parameter.empty else parameter.default)
            for name, parameter in parameters.items()
        }
        self._arguments = create_model(self.name, **fields)
        schema = _without_titles(self._arguments.model_json_schema())
        for line in described.splitlines():
            name, colon, text = line.strip().partition(":")
            if colon and name in parameters:
                schema["properties"][name]["description"] = text.strip()
        function_definition = {
            "name": self.name,
            "description": " ".join(described.split("\n\n")[0].split()),
            "parameters": schema,
        }
        self.definition: dict[str, Any] = {"type": "function", "function": function_definition}

    def __call__(self, arguments: str) -> str:
        """The result of a call, as text. Raises ``ValueError`` for arguments that do not fit (``pydantic`` says how),
        and what the function raises."""
        checked = self._arguments.model_validate_json(arguments or "{}")
        result = self._function(**{name: getattr(checked, name) for name in type(checked).model_fields})
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def call_message(number: int, tool: str, arguments: Mapping[str, Any], content: str | None = None) -> Message:
    """A reply that calls a tool, for demonstrations. Calls of a conversation are numbered from 0."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"id": f"call{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result_message(number: int, content: str) -> Message:
    """What that call returned."""
    return {"role": "tool", "tool_call_id": f"call{number}", "content": content}


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without the titles that pydantic adds: they say nothing, and cost the policy tokens."""
    return {
        key: {name: _without_titles(one) for name, one in value.items()}
        if key == "properties"
        else _without_titles(value)
        if isinstance(value, dict)
        else value
        for key, value in schema.items()
        if key != "title"
    }
