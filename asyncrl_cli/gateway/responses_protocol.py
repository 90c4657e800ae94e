"""What clients may send to OpenAI's Responses API, as far as a policy can serve it.

A session with fixed sampling belongs to an unmodified program, so there the tools that no policy can use are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from asyncrl_cli.gateway.errors import unsupported
from asyncrl_cli.gateway.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Count,
    Flag,
    Request,
    Seed,
    Settings,
    Temperature,
    Text,
    ToolName,
    Wire,
    only,
)

LOGPROBS = "message.output_text.logprobs"
"""The one value of ``include`` that asks for something that could exist, and is not there."""

OWN = ("function", "custom")
"""The types of tools that a client runs itself."""

ALLOWED = "allowed_tools"
"""The type of a choice that names several tools."""


class InputPart(Wire):
    """A piece of text, of a message or of a tool's result. There are no pictures or files."""

    type: Literal["input_text", "output_text"]
    text: Text


Content = Annotated[Text | Annotated[list[InputPart], Field(fail_fast=True)], only("input_text", "output_text")]


class MessageItem(Wire):
    """A message of any role; the model's own have the shape that they were answered in, or that of others."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ReasoningPart(Wire):
    """A piece of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Wire):
    """What the model thought before it answered. An item without either key is ignored."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    encrypted_content: Text | None = Field(None, description="The same, from this server. `content` takes precedence.")


class FunctionCallItem(Wire):
    """The model's call of a function, with its arguments as JSON text."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text


class CustomToolCallItem(Wire):
    """The model's call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    input: Text


class ToolOutputItem(Wire):
    """What a call returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


def _kind(item: Any) -> str | None:
    """The tag of an item. Messages may lack a type."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[ToolOutputItem, Tag("function_call_output")]
    | Annotated[ToolOutputItem, Tag("custom_tool_call_output")],
    Discriminator(_kind),
]


class FunctionTool(Wire):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = Field(None, description="Without an effect: a policy is sampled from unchanged.")


class CustomTool(Wire):
    """A tool that takes text. The model sees it as a function with the one argument `input`."""

    type: Literal["custom"]
    name: ToolName
    description: Text | None = None
    format: dict[str, Any] | None = Field(None, description="A grammar is shown to the model, and not enforced.")


class NamespaceTool(Wire):
    """Tools that belong together. The model sees each under both names, as in `files.read`."""

    type: Literal["namespace"]
    name: ToolName
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


@dataclass(frozen=True, slots=True)
class OwnTool:
    """A tool that the client runs itself, and its namespace if it has one."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None

    @property
    def chat_name(self) -> str:
        """The name that the model sees."""
        return chat_name(self.tool.name, self.namespace)


def chat_name(name: str, namespace: str | None) -> str:
    """The name that the model sees of a tool."""
    return f"{namespace}.{name}" if namespace else name


class OtherTool(Wire):
    """A tool that only OpenAI's servers or models have. Omitted in sessions of a training run, refused elsewhere."""

    type: Text


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return kind if kind in (*OWN, "namespace") else "other"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_tool_kind),
]


class NamedTool(Wire):
    """A tool by its type, and if it has one its name."""

    type: Text
    name: Text | None = None


class ToolChoice(NamedTool):
    """A tool, or for type `allowed_tools` some: the model does not see the others."""

    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def chosen(self) -> list[NamedTool]:
        """The tools that it names."""
        return (self.tools or []) if self.type == ALLOWED else [self]


class ResponsesRequest(Request):
    """A request of `/v1/responses`."""

    input: Text | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="A user's text, or items: messages, calls of tools, their results, reasoning."
    )
    instructions: Text | None = Field(None, description="The system message of this call.")
    previous_response_id: Text | None = Field(
        None, description="Continues the conversation of that response; its `instructions` are not taken over."
    )
    store: Flag | None = Field(None, description="false: the response cannot be continued by its id.")
    include: Annotated[list[Text], Field(max_length=64)] | None = Field(
        None, description="`reasoning.encrypted_content` is always there; the others have no effect."
    )
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None,
        description="`none` hides the tools, `allowed_tools` the others. Nothing is forced: all else is `auto`.",
    )
    parallel_tool_calls: Flag | None = Field(None, description="Without an effect: a reply has the calls it has.")
    max_output_tokens: Count | None = Field(
        None, description="Most tokens to generate. More than fits is as many as fit."
    )
    temperature: Temperature | None = Field(
        None, description="0 is greedy. In sessions of a training run or an evaluation the run's own setting counts."
    )
    seed: Seed | None = Field(None, description="Equal seeds give equal tokens under equal weights.")
    stream: Flag | None = Field(None, description="Answer with server-sent events.")
    text: Settings | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512, strict=True)]],
            Field(max_length=16),
        ]
        | None
    ) = Field(None, description="Comes back with the response.")
    return_token_ids: Flag | None = Field(None, description="Add the token ids: `prompt_token_ids` and `token_ids`.")

    @model_validator(mode="after")
    def _tool_choice_fits(self) -> ResponsesRequest:
        choice = self.tool_choice
        own = self.own_tools()
        named = {(one.tool.type, one.tool.name) for one in own}
        if len(own) > MAX_TOOLS:
            raise PydanticCustomError("tools", f"more than {MAX_TOOLS} tools in one request")
        chosen = choice.chosen() if isinstance(choice, ToolChoice) else ()
        if any(tool.type in OWN and (tool.type, tool.name) not in named for tool in chosen):
            raise PydanticCustomError("tool_choice", "tool_choice names a tool that is not among the tools")
        return self

    def own_tools(self) -> list[OwnTool]:
        """The tools that the client runs itself."""
        own: list[OwnTool] = []
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                own += [OwnTool(inner, tool.name) for inner in tool.tools]
            elif not isinstance(tool, OtherTool):
                own.append(OwnTool(tool))
        return own

    def offered_tools(self) -> list[OwnTool]:
        """The tools that the model sees."""
        choice, own = self.tool_choice, self.own_tools()
        if choice == "none":
            return []
        if isinstance(choice, ToolChoice) and choice.type == ALLOWED:
            names = {(tool.type, tool.name) for tool in choice.chosen()}
            own = [one for one in own if (one.tool.type, one.tool.name) in names]
        return own

    def refuse_unsupported(self, fixed_sampling: bool, template_kwargs: Mapping[str, Any]) -> None:
        super().refuse_unsupported(fixed_sampling, template_kwargs)
        if LOGPROBS in (self.include or ()):
            raise unsupported("include", f"{LOGPROBS} is not supported")
        if fixed_sampling:
            return
        for index, tool in enumerate(self.tools or ()):
            if isinstance(tool, OtherTool):
                raise unsupported(f"tools.{index}.type", f"a tool of type {tool.type!r} is not supported")
        for chosen in self.tool_choice.chosen() if isinstance(self.tool_choice, ToolChoice) else ():
            if chosen.type not in OWN:
                raise unsupported("tool_choice", f"tool_choice of type {chosen.type!r} is not supported")
