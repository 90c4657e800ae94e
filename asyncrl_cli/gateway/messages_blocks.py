"""Anthropic's content blocks as the messages of a chat, and a reply as blocks.

Invariant: the blocks of a reply, sent back, become that reply's own message as sessions compare messages. So the next
call continues its tokens (tests/gateway/test_messages_blocks.py). Differences that mean nothing do not matter: into how
many blocks and messages a client divides a turn, marks for caches, and how JavaScript writes numbers
(``json_values.key``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal

from typing_extensions import TypedDict

from asyncrl_cli.gateway.json_values import finite
from asyncrl_cli.gateway.messages_protocol import (
    AnyMessage,
    AssistantMessage,
    CountRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from asyncrl_cli.records.prompt import Message

_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""A line before the system prompt by which Claude Code tells who pays. It differs in every request."""

Content = str | Sequence[Any] | None


class TextOut(TypedDict):
    """Text of the model."""

    type: Literal["text"]
    text: str


class ThinkingOut(TypedDict):
    """What the model thought; ``signature`` is a digest of it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseOut(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockOut = TextOut | ThinkingOut | ToolUseOut


def chat_messages(request: CountRequest) -> list[Message]:
    """A request's conversation as the messages of a chat.

    Turns of the same role that follow each other are one. A user's turn is the results of tools, and then its text.
    """
    messages = list(request.messages)
    first = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    found = list(_system([request.system, *(message.content for message in messages[:first])]))
    for speaks, group in groupby(messages[first:], lambda message: message.role == "assistant"):
        turn = list(group)
        found += [_assistant(turn)] if speaks else _user(turn)
    return found


def reply_blocks(message: Message) -> list[BlockOut]:
    """A reply as blocks: its reasoning, its text and its calls of tools. There is always at least one."""
    blocks: list[BlockOut] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": signature(reasoning)})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = finite(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks or [{"type": "text", "text": ""}]


def signature(thinking: str) -> str:
    """What marks a thinking block: a digest of its text."""
    return blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _system(contents: Iterable[Content]) -> Iterator[Message]:
    texts = ("".join(_ATTRIBUTION.sub("", part, count=1) for part in _parts(content)) for content in contents)
    if text := _joined(texts):
        yield {"role": "system", "content": text}


def _user(turn: Sequence[AnyMessage]) -> Iterator[Message]:
    texts, results = [], []
    for message in turn:
        texts.append(_text(message.content))
        if not isinstance(message.content, str):
            results += [block for block in message.content if isinstance(block, ToolResultBlock)]
    for result in results:
        content = ("Error: " if result.is_error else "") + _text(result.content)
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
    text = _joined(texts)
    if text or not results:
        yield {"role": "user", "content": text}


def _assistant(turn: Sequence[AnyMessage]) -> Message:
    texts, thoughts, calls = [], [], []
    for message in turn:
        assert isinstance(message, AssistantMessage)
        texts.append(_text(message.content))
        for block in message.content if not isinstance(message.content, str) else ():
            if isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
    reply: dict[str, Any] = {"role": "assistant", "content": _joined(texts)}
    if reasoning := "".join(thoughts):
        reply["reasoning_content"] = reasoning
    if calls:
        reply["tool_calls"] = calls
    return reply


def _parts(content: Content) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [block.text for block in content or () if isinstance(block, TextBlock)]


def _text(content: Content) -> str:
    """The text of a message or a block."""
    return "".join(_parts(content))


def _joined(texts: Iterable[str]) -> str:
    """The text of several messages."""
    return "\n\n".join(text for text in texts if text)
