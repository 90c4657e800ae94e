"""Requests of OpenAI's Responses API, as far as a policy can serve them, and their conversion to chat messages.

Sessions with fixed sampling serve unmodified programs, so they omit tools that no policy can use.

A reply has at most one reasoning item, then at most one message, then its calls. So consecutive items of the model in
this order become one message, and an item out of order begins the next message. The conversion keeps the invariant in
``responses_reply``.
"""

from __future__ import annotations

import json
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from asyncrl_cli.gateway.errors import invalid_value, unsupported
from asyncrl_cli.gateway.wire import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatBody,
    Count,
    Flag,
    GenerationRequest,
    Seed,
    Settings,
    Text,
    ToolName,
    Wire,
)
from asyncrl_cli.records.prompt import Message

LOGPROBS = "message.output_text.logprobs"
"""The only refused value of ``include``: the answer could have this data, but does not."""

CLIENT_TOOL_TYPES = ("function", "custom")
"""Types of tools that a client runs itself."""

ALLOWED_TOOLS = "allowed_tools"
"""Type of a choice that names several tools."""


class InputPart(Wire):
    """A piece of text in a message or in a tool's result."""

    type: Literal["input_text", "output_text"]
    text: Text


class ImagePart(Wire):
    """An image in a user's message or a tool's result, for models with `model.max_images`."""

    type: Literal["input_image"]
    image_url: Text
    detail: Any = None  # no effect: the model's processor decides


Content = Text | Annotated[list[Annotated[InputPart | ImagePart, Field(discriminator="type")]], Field(fail_fast=True)]


class MessageItem(Wire):
    """A message of any role. The model's messages may have the format of answers or of requests."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ReasoningPart(Wire):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Wire):
    """The model's reasoning before its answer. An item with neither key is ignored."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    encrypted_content: Text | None = None


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
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


def _kind(item: Any) -> str | None:
    """The tag of an item; without a type it is a message. Pydantic names this function in its errors."""
    item_type = item.get("type", "message") if isinstance(item, Mapping) else getattr(item, "type", None)
    return item_type if isinstance(item_type, str) else None


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
    strict: Flag | None = None  # no effect: sampling is never constrained


class CustomTool(Wire):
    """A tool that takes text. The model sees a function with one argument, `input`."""

    type: Literal["custom"]
    name: ToolName
    description: Text | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(Wire):
    """A group of tools. The model sees each under both names, as in `files.read`."""

    type: Literal["namespace"]
    name: ToolName
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that the client runs itself, with its namespace, if any."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None

    @property
    def chat_name(self) -> str:
        return chat_name(self.tool.name, self.namespace)

    def function(self) -> dict[str, Any]:
        """The tool in the format of chat templates."""
        tool = self.tool
        if isinstance(tool, CustomTool):
            return self._text_function(tool)
        definition = {"description": tool.description, "parameters": tool.parameters}
        function = {key: value for key, value in definition.items() if value is not None}
        return {"type": "function", "function": {"name": self.chat_name, **function}}

    def _text_function(self, tool: CustomTool) -> dict[str, Any]:
        """A function with the one argument `input`. The tool's grammar, if any, is part of the description."""
        grammar = (tool.format or {}).get("definition")
        texts = [tool.description, f"The input follows this grammar:\n{grammar}" if grammar else None]
        function: dict[str, Any] = {"name": self.chat_name}
        if described := "\n\n".join(filter(None, texts)):
            function["description"] = described
        properties = {"input": {"type": "string"}}
        function["parameters"] = {"type": "object", "properties": properties, "required": ["input"]}
        return {"type": "function", "function": function}


def chat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}.{name}" if namespace else name


class OtherTool(Wire):
    """A tool that only OpenAI's servers or models have. Omitted in sessions of a training run, refused elsewhere."""

    type: Text


def _tool_kind(tool: Any) -> str:
    tool_type = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return tool_type if tool_type in (*CLIENT_TOOL_TYPES, "namespace") else "other"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_tool_kind),
]


class NamedTool(Wire):
    """A tool by its type and, if it has one, its name."""

    type: Text
    name: Text | None = None


class ToolChoice(NamedTool):
    """A tool or, with type `allowed_tools`, several: the model does not see the others."""

    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def chosen_tools(self) -> list[NamedTool]:
        return (self.tools or []) if self.type == ALLOWED_TOOLS else [self]


class ResponsesRequest(GenerationRequest, ChatBody):
    input: Text | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: Flag | None = None
    include: Annotated[list[Text], Field(max_length=64)] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: Flag | None = None  # no effect: the number of calls is not limited
    max_output_tokens: Count | None = None
    seed: Seed | None = None
    text: Settings | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512, strict=True)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    return_token_ids: Flag | None = None

    @model_validator(mode="after")
    def _tool_choice_fits(self) -> ResponsesRequest:
        choice = self.tool_choice
        client_tools = self.client_tools()
        tool_names = {(client_tool.tool.type, client_tool.tool.name) for client_tool in client_tools}
        if len(client_tools) > MAX_TOOLS:
            raise PydanticCustomError("tools", f"more than {MAX_TOOLS} tools in one request")
        chosen_tools = choice.chosen_tools() if isinstance(choice, ToolChoice) else ()
        if any(tool.type in CLIENT_TOOL_TYPES and (tool.type, tool.name) not in tool_names for tool in chosen_tools):
            raise PydanticCustomError("tool_choice", "tool_choice names a tool that is not among the tools")
        return self

    def client_tools(self) -> list[ClientTool]:
        """The tools that the client runs itself."""
        client_tools: list[ClientTool] = []
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                client_tools += [ClientTool(inner, tool.name) for inner in tool.tools]
            elif not isinstance(tool, OtherTool):
                client_tools.append(ClientTool(tool))
        return client_tools

    def offered_tools(self) -> list[dict[str, Any]] | None:
        choice, client_tools = self.tool_choice, self.client_tools()
        if choice == "none":
            return None
        if isinstance(choice, ToolChoice) and choice.type == ALLOWED_TOOLS:
            names = {(tool.type, tool.name) for tool in choice.chosen_tools()}
            client_tools = [
                client_tool for client_tool in client_tools if (client_tool.tool.type, client_tool.tool.name) in names
            ]
        return [client_tool.function() for client_tool in client_tools] or None

    def chat_messages(self) -> list[Message]:
        """The input as chat messages. Raises ``ApiError`` for encrypted reasoning of another server."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Message] = []
        reply: dict[str, Any] | None = None  # the last message, while further items may belong to it
        for item in self.input:
            if isinstance(item, ToolOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
                reply = None
                continue
            if isinstance(item, MessageItem) and item.role != "assistant":
                role = "system" if item.role == "developer" else item.role
                content = _content(item.content) if role == "user" else _text(item.content)
                messages.append({"role": role, "content": content})
                reply = None
                continue
            reply_field = _reply_field(item)
            if reply_field is None:
                continue
            key, value = reply_field
            if reply is None or any(following_key in reply for following_key in _FOLLOWED_BY[key]):
                reply = {"role": "assistant"}
                messages.append(reply)
            if key != "tool_calls":
                reply[key] = value
            elif len(calls := reply.setdefault(key, [])) < MAX_CALLS:
                calls.append(value)
            else:
                raise invalid_value(f"a reply with more than {MAX_CALLS} calls", "input")
        return [{"content": None, **message} for message in messages]

    def refuse_unsupported(self, fixed_sampling: bool) -> None:
        super().refuse_unsupported(fixed_sampling)
        if LOGPROBS in (self.include or ()):
            raise unsupported("include", f"{LOGPROBS} is not supported")
        if fixed_sampling:
            return
        for index, tool in enumerate(self.tools or ()):
            if isinstance(tool, OtherTool):
                raise unsupported(f"tools.{index}.type", f"a tool of type {tool.type!r} is not supported")
        for chosen_tool in self.tool_choice.chosen_tools() if isinstance(self.tool_choice, ToolChoice) else ():
            if chosen_tool.type not in CLIENT_TOOL_TYPES:
                raise unsupported("tool_choice", f"tool_choice of type {chosen_tool.type!r} is not supported")


_FOLLOWED_BY = {
    "reasoning_content": ("reasoning_content", "content", "tool_calls"),
    "content": ("content", "tool_calls"),
    "tool_calls": (),
}
"""A part with this key begins the next message if the current one has any of these keys."""


def _reply_field(item: MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem) -> tuple[str, Any] | None:
    """The key and value that an item adds to its reply's message; None for an item without content."""
    if isinstance(item, MessageItem):
        return "content", _text(item.content)
    if isinstance(item, ReasoningItem):
        text = _reasoning(item)
        return None if text is None else ("reasoning_content", text)
    if isinstance(item, CustomToolCallItem):
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
    else:
        arguments = item.arguments
    function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
    return "tool_calls", {"id": item.call_id, "type": "function", "function": function}


def _content(content: Content) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": content_part.text}
        if isinstance(content_part, InputPart)
        else {"type": "image", "image": content_part.image_url}
        for content_part in content
    ]


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    if any(isinstance(content_part, ImagePart) for content_part in content):
        raise invalid_value("only messages of users and outputs of tools may have images", "input")
    return "".join(content_part.text for content_part in content if isinstance(content_part, InputPart))


def _reasoning(item: ReasoningItem) -> str | None:
    if item.content:
        return "".join(content_part.text for content_part in item.content)
    if item.encrypted_content is None:
        return None
    try:
        return b64decode(item.encrypted_content, validate=True).decode()
    except (Base64Error, ValueError):
        raise invalid_value("the encrypted_content of a reasoning item is not from this server", "input") from None
