"""Requests of Anthropic's Messages API, as far as a policy can serve them, and their conversion to chat messages.

The conversion keeps the invariant in ``messages_reply``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from asyncrl_cli.gateway.errors import unsupported
from asyncrl_cli.gateway.wire import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    NO_EFFECT,
    ChatBody,
    Count,
    Flag,
    GenerationRequest,
    Settings,
    Stops,
    Text,
    TextPart,
    ToolName,
    Wire,
)
from asyncrl_cli.records.prompt import Message

_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's billing line before the system prompt. It differs in every request, which would begin a new branch."""

MANY: Any = Field(fail_fast=True)
"""For lists without a limit: validation stops at the first error, because a body may have very many."""


class ThinkingBlock(Wire):
    """Reasoning of an earlier reply. The signature is not checked."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Wire):
    """Reasoning that another server encrypted. The policy does not see it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Wire):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ImageSource(Wire):
    type: Text
    media_type: Text = ""
    data: Text = ""

    @model_validator(mode="after")
    def _is_sent(self) -> ImageSource:
        if self.type != "base64":
            raise PydanticCustomError("source", "nothing is downloaded: send images in base64")
        return self


class ImageBlock(Wire):
    """An image of the user or of a tool's result, for models with `model.max_images`."""

    type: Literal["image"]
    source: ImageSource


class NamedBlock(Wire):
    """A block within a tool's result that the policy sees only by its type, as `[document]`."""

    type: Literal["document", "search_result", "tool_reference"]


TextContent = Text | Annotated[list[TextPart], MANY]


class ToolResultBlock(Wire):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: (
        Text | Annotated[list[Annotated[TextPart | ImageBlock | NamedBlock, Field(discriminator="type")]], MANY] | None
    ) = None
    is_error: Flag | None = None


UserBlock = Annotated[TextPart | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Wire):
    """A turn of the user: results of tools, and text."""

    role: Literal["user"]
    content: Text | Annotated[list[UserBlock], MANY]


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: Text | Annotated[list[AssistantBlock], MANY]

    @model_validator(mode="after")
    def _not_too_many(self) -> AssistantMessage:
        if sum(isinstance(block, ToolUseBlock) for block in self.content) > MAX_CALLS:
            raise PydanticCustomError("messages", f"more than {MAX_CALLS} calls of tools in one message")
        return self


class SystemMessage(Wire):
    """Instructions within the conversation. After the first turn, the policy reads them as the user's words."""

    role: Literal["system"]
    content: TextContent


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class MessageTool(Wire):
    """A tool that the model may call; ``input_schema`` is a JSON schema.

    Anthropic's own tools have a ``type`` other than ``custom`` and no schema. Without a session they are refused; in
    sessions the policy does not see them.
    """

    type: Text | None = None
    name: ToolName | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def custom(self) -> bool:
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _complete(self) -> MessageTool:
        if self.custom and (self.name is None or self.input_schema is None):
            raise PydanticCustomError("tool", "a tool needs name and input_schema")
        return self


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None


class ContextEdit(Wire):
    """An edit that shortens a long history."""

    type: Text

    @model_validator(mode="after")
    def _about_reasoning(self) -> ContextEdit:
        if not self.type.startswith("clear_thinking_"):
            raise PydanticCustomError(
                "edit", "edits of type {kind} are not supported: a history is never shortened", {"kind": self.type[:64]}
            )
        return self


class ContextManagement(Settings):
    """Edits of a long history. The chat template decides which reasoning stays; nothing else is removed."""

    edits: Annotated[list[ContextEdit], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class CountRequest(ChatBody):
    """A request of `/v1/messages/count_tokens`. Keys for the generation have no effect on the count."""

    no_effect = NO_EFFECT | {"max_tokens", "output_config", "stop_sequences", "stream", "temperature"}

    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextContent | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    context_management: ContextManagement | None = None

    @model_validator(mode="after")
    def _fits(self) -> CountRequest:
        names = {tool.name for tool in self.tools or ()}
        if self.tool_choice and self.tool_choice.type == "tool" and self.tool_choice.name not in names:
            raise PydanticCustomError("tool_choice", "tool_choice names a tool that is not among the tools")
        return self

    def chat_messages(self) -> list[Message]:
        """The conversation as chat messages.

        Consecutive messages of one role become one turn. A user's turn has the tool results first, then the text.
        """
        messages = list(self.messages)
        system_count = next(
            (index for index, message in enumerate(messages) if message.role != "system"), len(messages)
        )
        contents = [self.system, *(message.content for message in messages[:system_count])]
        system = _joined(
            "".join(_ATTRIBUTION.sub("", text_part, count=1) for text_part in _text_parts(content))
            for content in contents
        )
        chat: list[Message] = [{"role": "system", "content": system}] if system else []
        for speaks, group in groupby(messages[system_count:], lambda message: message.role == "assistant"):
            turn = list(group)
            blocks: list[Any] = []
            for message in turn:
                blocks += [message.content] if isinstance(message.content, str) else message.content
            text = _joined("".join(_text_parts(message.content)) for message in turn)
            chat += [_assistant(text, blocks)] if speaks else _user(text, blocks)
        return chat

    def continues(self, ends_with_reply: bool) -> bool:
        return ends_with_reply  # as in Anthropic's API

    def offered_tools(self) -> list[dict[str, Any]] | None:
        if self.tool_choice and self.tool_choice.type == "none":
            return None
        return [_function(tool) for tool in self.tools or () if tool.custom] or None

    def refuse_unsupported(self, fixed_sampling: bool) -> None:
        """As in ``Request``. Sessions with fixed sampling drop Anthropic's tools, because they serve unmodified
        programs."""
        super().refuse_unsupported(fixed_sampling)
        if fixed_sampling:
            return
        for index, tool in enumerate(self.tools or ()):
            if not tool.custom:
                key, tool_type = f"tools.{index}", (tool.type or "")[:64]
                raise unsupported(key, f"{key} is not supported: this server has no tool of type {tool_type}")


class MessagesRequest(GenerationRequest, CountRequest):
    max_tokens: Count
    stop_sequences: Stops | None = None
    output_config: Settings | None = None


def _function(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _user(text: str, blocks: Sequence[Any]) -> list[Message]:
    user_messages: list[Message] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            error = "Error: " if block.is_error else ""
            content: Any = error + "".join(_text_parts(block.content))
            if isinstance(block.content, list) and (image_parts := _image_parts(block.content)):
                content = [{"type": "text", "text": error}, *image_parts]
            user_messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    content = _image_parts(blocks) or text
    if content or not user_messages:
        user_messages.append({"role": "user", "content": content})
    return user_messages


def _image_parts(blocks: Sequence[Any]) -> list[dict[str, str]]:
    """The parts of a message with images; [] if there is no image."""
    content_parts = [
        {"type": "image", "image": f"data:{block.source.media_type};base64,{block.source.data}"}
        if isinstance(block, ImageBlock)
        else {"type": "text", "text": "".join(_text_parts([block]))}
        for block in blocks
        if isinstance(block, str | TextPart | ImageBlock | NamedBlock)
    ]
    return content_parts if any(content_part["type"] == "image" for content_part in content_parts) else []


def _assistant(text: str, blocks: Sequence[Any]) -> Message:
    reply: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        reply["reasoning_content"] = reasoning
    calls = []
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
    return reply | {"tool_calls": calls} if calls else reply


def _text_parts(content: str | Sequence[Any] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [
        block if isinstance(block, str) else block.text if isinstance(block, TextPart) else f"[{block.type}]"
        for block in content or ()
        if isinstance(block, str | TextPart | NamedBlock)
    ]


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))
