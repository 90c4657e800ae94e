"""Items of the Responses API, and the messages that they are.

A session compares messages, so a conversation continues the tokens it had only if this holds (tests/gateway/
test_responses_items.py): the items of a reply, sent back, are the reply's own message again. One reply is at most one
reasoning item, then at most one message, then its calls; so consecutive items of the model in this order are one
message, and an item out of this order begins the next one.

A custom tool takes text. The model sees a function with the one argument ``input``, and calls it like any other.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from asyncrl_cli.gateway.errors import invalid_value
from asyncrl_cli.gateway.protocol import MAX_CALLS
from asyncrl_cli.gateway.responses_protocol import (
    Content,
    CustomTool,
    CustomToolCallItem,
    FunctionCallItem,
    FunctionTool,
    InputItem,
    MessageItem,
    OwnTool,
    ReasoningItem,
    ToolOutputItem,
    chat_name,
)
from asyncrl_cli.records.prompt import Message

Status = Literal["in_progress", "completed", "incomplete"]

CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""What the model sees of every custom tool's parameters."""


class OutputText(TypedDict):
    """A message's text."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[str]


class ReasoningText(TypedDict):
    """A reasoning item's text."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    """What the model says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class Reasoning(TypedDict):
    """What the model thought; there is no summary of it. ``encrypted_content`` is the text in base64, not a secret:
    some programs send back nothing else."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[str]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class OutputFunctionCall(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class OutputCustomToolCall(TypedDict):
    """A call of a tool that takes text."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


OutputItem = OutputMessage | Reasoning | OutputFunctionCall | OutputCustomToolCall


# -- what a client sends


def messages_of(items: str | Sequence[InputItem]) -> list[Message]:
    """The messages of an input. Raises ``ApiError`` for reasoning that is not of this server."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    reply = _Reply()
    for item in items:
        if isinstance(item, ToolOutputItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
            messages += reply.taken()
            messages.append(_of_others(item))
        else:
            messages += reply.add(item)
    return messages + reply.taken()


class _Reply:
    """Collects the items of one reply."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}

    def add(self, item: MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem) -> list[Message]:
        """Returns the reply before, if this item begins the next one."""
        message, before = self._message, []
        if isinstance(item, ReasoningItem):
            if (text := _reasoning(item)) is None:
                return []
            if message:
                before = self.taken()
            self._message["reasoning_content"] = text
        elif isinstance(item, MessageItem):
            if "content" in message or "tool_calls" in message:
                before = self.taken()
            self._message["content"] = _text(item.content)
        else:
            calls = self._message.setdefault("tool_calls", [])
            if len(calls) == MAX_CALLS:
                raise invalid_value(f"a reply with more than {MAX_CALLS} calls", "input")
            calls.append(_call(item))
        return before

    def taken(self) -> list[Message]:
        message, self._message = self._message, {}
        return [{"role": "assistant", "content": None} | message] if message else []


def _of_others(item: MessageItem | ToolOutputItem) -> Message:
    if isinstance(item, ToolOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    return {"role": "system" if item.role == "developer" else item.role, "content": _text(item.content)}


def _call(item: FunctionCallItem | CustomToolCallItem) -> dict[str, Any]:
    arguments = (
        item.arguments if isinstance(item, FunctionCallItem) else json.dumps({"input": item.input}, ensure_ascii=False)
    )
    function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _reasoning(item: ReasoningItem) -> str | None:
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content is None:
        return None
    try:
        return b64decode(item.encrypted_content, validate=True).decode()
    except (Base64Error, ValueError):
        raise invalid_value("the encrypted_content of a reasoning item is not of this server", "input") from None


# -- what the model sees


def chat_tools(tools: Iterable[OwnTool]) -> list[dict[str, Any]]:
    """Tools as chat templates know them."""
    return [{"type": "function", "function": _function(own.chat_name, own.tool)} for own in tools]


def _function(name: str, tool: FunctionTool | CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if isinstance(tool, FunctionTool):
        kept = {"description": tool.description, "parameters": tool.parameters}
        return function | {key: value for key, value in kept.items() if value is not None}
    grammar = (tool.format or {}).get("definition")
    described = [tool.description or "", f"The input follows this grammar:\n{grammar}" if grammar else ""]
    if description := "\n\n".join(filter(None, described)):
        function["description"] = description
    return function | {"parameters": CUSTOM_PARAMETERS}


# -- the model's reply


def items_of(message: Message, tools: Mapping[str, OwnTool], stem: str) -> list[OutputItem]:
    """The items of a reply; ``tools`` are by the names that the model sees, and the items' ids follow from ``stem``."""
    items: list[OutputItem] = []
    reasoning, content, calls = (message.get(key) for key in ("reasoning_content", "content", "tool_calls"))
    if reasoning:
        items.append(reasoning_item(f"rs_{stem}", reasoning))
    if content or not (reasoning or calls):
        items.append(message_item(f"msg_{stem}", content or ""))
    for index, call in enumerate(calls or ()):
        items.append(_call_item(call, tools, f"{stem}_{index}"))
    return items


def reasoning_item(item_id: str, text: str) -> Reasoning:
    """A complete reasoning item."""
    return {
        "id": item_id,
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": b64encode(text.encode()).decode(),
    }


def message_item(item_id: str, text: str) -> OutputMessage:
    """A complete message."""
    content: list[OutputText] = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def _call_item(call: Mapping[str, Any], tools: Mapping[str, OwnTool], stem: str) -> OutputItem:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    own = tools.get(name)
    text = _custom_input(arguments) if own and isinstance(own.tool, CustomTool) else None
    item: OutputFunctionCall | OutputCustomToolCall
    if text is not None:
        item = {"id": f"ctc_{stem}", "type": "custom_tool_call", "call_id": call["id"], "name": name, "input": text}
    else:
        item = {
            "id": f"fc_{stem}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": name,
            "arguments": arguments,
        }
    if own and own.namespace:
        item["name"], item["namespace"] = own.tool.name, own.namespace
    return item


def _custom_input(arguments: str) -> str | None:
    """The text that a custom tool gets; None when the model wrote other arguments, which go as they are, in a function
    call: nothing of what it wrote may be lost."""
    parsed = json.loads(arguments)
    text = parsed.get("input") if len(parsed) == 1 else None
    try:
        return text if isinstance(text, str) and text.encode() is not None else None
    except UnicodeEncodeError:
        return None
