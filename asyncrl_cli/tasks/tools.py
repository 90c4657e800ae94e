"""Tasks in which the policy calls Python functions.

    class Weather(ToolTask):
        def tools(self, prompt):
            return [temperature]          # def temperature(city: str, day: int = 0) -> float: '''...'''

        def judge(self, prompt, text):
            return float(prompt.fields["answer"] in text)

A tool's signature and docstring describe it. The result of a call (text, images) or its exception goes back to the
policy, which can then correct its mistakes. The first reply without a call is the answer, which ``judge`` scores.
Tools and ``judge`` may be async.

Methods with a parameter ``sandbox`` get the episode's sandbox (``episode_sandbox``): ``tools(prompt, sandbox)``,
``judge(prompt, text, sandbox)``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, get_type_hints

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.core.user_code import defined_at
from asyncrl_cli.records.images import Image, is_pillow
from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import RewardResult, Step, Use, as_result
from asyncrl_cli.tasks.episode_sandbox import parameter_use
from asyncrl_cli.tasks.mcp_tools import Content, McpServers, McpSession, McpTool, ServerLost
from asyncrl_cli.tasks.play import EpisodeEnded, awaited

if TYPE_CHECKING:
    from asyncrl_cli.sandbox.commands import BlockingSandbox

Judge = Callable[[Prompt, str], float | RewardResult]


class ToolTask:
    """Base class of an ``EnvironmentTask`` with tools; subclasses define two methods."""

    mcp_servers: McpServers | None = None
    """The servers in ``task.tools.mcp``, which have further tools."""

    def tools(self, prompt: Prompt) -> Sequence[Callable[..., Any]]:
        """Return the functions that the policy may call in one episode."""
        raise NotImplementedError

    def judge(self, prompt: Prompt, text: str) -> float | RewardResult:
        """Return the reward of the final answer."""
        raise NotImplementedError

    @property
    def sandbox_use(self) -> Use:
        """How ``tools`` and ``judge`` use a sandbox, according to their parameters."""
        uses = {parameter_use(self.tools), parameter_use(self.judge)}
        return next((use for use in (Use.REQUIRED, Use.OPTIONAL) if use in uses), Use.NO)

    def environment(self, prompt: Prompt, sandbox: BlockingSandbox | None = None) -> ToolEnvironment:
        """Make the environment of one episode."""
        tools, judge = _with_sandbox(self.tools, sandbox), _with_sandbox(self.judge, sandbox)
        return ToolEnvironment(prompt, tools(prompt), judge=judge, servers=self.mcp_servers)


def _with_sandbox(method: Callable[..., Any], sandbox: BlockingSandbox | None) -> Callable[..., Any]:
    """Bind the sandbox to the method, if the method takes one."""
    return method if sandbox is None or parameter_use(method) is Use.NO else partial(method, sandbox=sandbox)


class ToolEnvironment:
    """Runs the tool calls of each reply; a reply without calls ends the episode. The prompt begins the conversation."""

    def __init__(
        self, prompt: Prompt, functions: Sequence[Callable[..., Any]], judge: Judge, servers: McpServers | None = None
    ) -> None:
        """``servers`` have further tools. Raises ``TaskError`` if two tools have the same name."""
        self._prompt = prompt
        self._session = McpSession(servers) if servers is not None else None
        self._tools: dict[str, Tool | McpTool] = dict(self._session.tools) if self._session is not None else {}
        for function in functions:
            tool = Tool(function)
            if tool.name in self._tools:
                hint = "rename one of them; exclude an MCP server's tool by allowed_tools"
                raise _refused(function, f"two tools are named {tool.name!r}", hint)
            self._tools[tool.name] = tool
        self._judge = judge
        self.tools = [tool.definition for tool in self._tools.values()]

    def reset(self) -> Sequence[Message]:
        """Return the prompt's messages."""
        return self._prompt.messages

    def step(self, reply: Message) -> Step:
        """Return the results of the calls, or the final reward. Metrics: ``tool_calls``; ``tool_errors``, failed
        calls."""
        if calls := reply.get("tool_calls"):
            results = [self._called(call) for call in calls]
            messages = [
                {"role": "tool", "tool_call_id": call.get("id", ""), "content": content}
                for call, (content, _) in zip(calls, results, strict=True)
            ]
            errors = sum(not right for _, right in results)
            return Step(messages, metrics={"tool_calls": float(len(calls)), "tool_errors": float(errors)})
        result = as_result(awaited(self._judge(self._prompt, reply.get("content") or "")))
        return Step(reward=result.reward, done=True, metrics=result.metrics)

    def close(self) -> None:
        if self._session is not None:
            awaited(self._session.close())

    def _called(self, call: Mapping[str, Any]) -> tuple[Content, bool]:
        """Return the result of a call, and True if it succeeded."""
        name = call["function"]["name"]
        if (tool := self._tools.get(name)) is None:
            return f"Error: there is no tool {name!r}; there are {', '.join(self._tools)}", False
        try:
            return tool(call["function"]["arguments"]), True
        except (ServerLost, EpisodeEnded):
            raise
        except BaseException as error:  # a tool may call sys.exit(), or raise CancelledError itself
            return f"Error: {type(error).__name__}: {error}", False


class Tool:
    """A function or method as a tool. ``definition`` is in OpenAI's format.

    The docstring's first paragraph describes the tool. It may also describe parameters, by lines ``name: text`` as in
    Google's style. A parameter without an annotation takes any JSON value.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ``TaskError`` if the function's arguments cannot be described."""
        from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

        self.name: str = getattr(function, "__name__", type(function).__name__)
        if not re.fullmatch(r"[\w-]{1,64}", self.name) or not inspect.isroutine(function):
            raise _refused(function, f"{self.name} cannot be a tool", "name a function: def name(argument: type) -> …")
        try:
            signature = inspect.signature(function)
            by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values():
                if parameter.kind not in by_name:
                    hint = "a model passes arguments by name, so use plain parameters, such as one list"
                    raise _refused(function, f"the tool {self.name}{signature} has the parameter {parameter}", hint)
            # Validates a call's arguments against the annotations, then calls the function.
            self._call = TypeAdapter[Any](_with_types(function))
            schema = _without_titles(self._call.json_schema())
        except (TypeError, ValueError, NameError, PydanticSchemaGenerationError, PydanticUserError) as error:
            problem = f"the tool {self.name} cannot be described: {' '.join(str(error).split()):.300}"
            raise _refused(function, problem, "annotate its parameters with types that JSON has") from error
        schema.pop("additionalProperties", None)
        summary, parameters = _described(inspect.getdoc(function) or "", signature.parameters)
        for name, text in parameters.items():
            schema["properties"][name].setdefault("description", text)
        function_definition = {"name": self.name, "description": summary, "parameters": schema}
        self.definition: dict[str, Any] = {"type": "function", "function": function_definition}

    def __call__(self, arguments: str) -> Content:
        """Call the function. An image (Pillow's, or an ``Image``) or a list with images becomes the parts of a message.
        Other results become text; dataclasses and pydantic's models become JSON.

        Raises pydantic's ``ValueError`` for arguments that do not fit, and the function's exceptions.
        """
        result = awaited(self._call.validate_json(arguments or "{}"))
        values = result if isinstance(result, list | tuple) else [result]
        if not any(map(_is_image, values)):
            return _as_text(result)
        return [
            {"type": "image", "image": value} if _is_image(value) else {"type": "text", "text": _as_text(value)}
            for value in values
        ]


def _is_image(value: Any) -> bool:
    return isinstance(value, Image) or is_pillow(value)


def _as_text(value: Any) -> str:
    from pydantic_core import to_jsonable_python

    if isinstance(value, bytes | bytearray):
        value = value.decode()
    return value if isinstance(value, str) else json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)


def _with_types(function: Callable[..., Any]) -> Any:
    """The function with annotations in quotes resolved in its own module; pydantic would search this module."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    call.__name__ = function.__name__
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    call.__annotations__ = get_type_hints(function, include_extras=True)
    return call


def _refused(function: Callable[..., Any], problem: str, hint: str) -> TaskError:
    return TaskError(problem, location=defined_at(function) or "task.use", hint=hint)


_PARAMETER_LINE = re.compile(r"(\s*)(\w+)(?: *\(.*?\))? *:(.*)")
_SECTION = re.compile(r"\s*(Args|Arguments|Parameters|Returns|Raises):$")


def _described(text: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """A docstring's first paragraph, and its descriptions of these parameters."""
    lines = text.splitlines()
    descriptions: dict[str, str] = {}
    for index, line in enumerate(lines, start=1):
        if (match := _PARAMETER_LINE.fullmatch(line)) and match[2] in names and match[2] not in descriptions:
            indented = takewhile(re.compile(rf"{match[1]}\s+\S").match, lines[index:])
            descriptions[match[2]] = " ".join(" ".join([match[3], *indented]).split())
    summary = takewhile(lambda line: line.strip() and not _SECTION.match(line), lines)
    return " ".join(" ".join(summary).split()), {name: words for name, words in descriptions.items() if words}


def call_message(call_index: int, tool: str, arguments: Mapping[str, Any], content: str | None = None) -> Message:
    """A reply that calls a tool, for rows of `model.warm_start.data`. A conversation's calls are numbered from 0."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"id": f"call{call_index}", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result_message(call_index: int, content: str) -> Message:
    """The result of call ``call_index``, for such rows."""
    return {"role": "tool", "tool_call_id": f"call{call_index}", "content": content}


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without pydantic's titles, which repeat the names and cost the policy tokens."""
    return {
        key: {name: _without_titles(subschema) for name, subschema in value.items()}
        if key == "properties"
        else _without_titles(value)
        if isinstance(value, dict)
        else value
        for key, value in schema.items()
        if key != "title"
    }
