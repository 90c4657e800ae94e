"""Prompts, and the chat messages in them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from asyncrl_cli.records.images import Image, data_url

Message = Mapping[str, Any]
OWN_UID_PREFIX = "outside/"
"""Prefix of the uids of prompts that programs outside of the run send. They are no rows of the data."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set.

    ``uid`` is permanent: the same in every epoch, after every restart, and in any order.
    ``content`` is plain text, or chat messages for the tokenizer's chat template.
    ``fields`` has the rest of the row, for the reward function, not for the model.
    ``images`` are the images that the messages refer to, in order.
    """

    uid: str
    content: str | tuple[Message, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Image, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The content as messages; plain text becomes a user's message."""
        return ({"role": "user", "content": self.content},) if isinstance(self.content, str) else tuple(self.content)


def with_data_urls(messages: Iterable[Message], images: Iterable[Image] = ()) -> list[Message]:
    """Messages for OpenAI's chat API: parts ``{"type": "image", "image": ...}`` become data URLs. A part has the digest
    of one of ``images``, or a value that ``data_url`` takes. Raises ``TypeError``."""
    by_digest = {image.digest: image for image in images}

    def sent(content_part: Any) -> Any:
        if not isinstance(content_part, Mapping) or content_part.get("type") != "image":
            return content_part
        reference = content_part.get("image")
        image = by_digest.get(reference, reference) if isinstance(reference, str) else reference
        return {"type": "image_url", "image_url": {"url": data_url(image)}}

    return [
        {**message, "content": [sent(content_part) for content_part in message["content"]]}
        if isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def to_json(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a JSON object, with its images in base64."""
    row = {"uid": prompt.uid, "content": prompt.content, "fields": dict(prompt.fields)}
    images = [base64.b64encode(image.data).decode() for image in prompt.images]
    return row | ({"images": images} if images else {})


def prompt_from(row: Mapping[str, Any]) -> Prompt:
    """The prompt that ``to_json`` wrote."""
    content = row["content"]
    images = tuple(Image.from_bytes(base64.b64decode(data)) for data in row.get("images", ()))
    return Prompt(row["uid"], content if isinstance(content, str) else tuple(content), row["fields"], images)


def image_digests(content: str | Sequence[Message]) -> list[str]:
    """The digests of the images in canonical content, in their order."""
    lists = [] if isinstance(content, str) else [message.get("content") for message in content]
    content_parts = [content_part for each in lists if isinstance(each, list | tuple) for content_part in each]
    return [str(content_part["image"]) for content_part in content_parts if content_part["type"] == "image"]


class ChatError(ValueError):
    """Messages or tools that are malformed, or that a chat template cannot render; ``str`` says why."""


def normalized(message: Message) -> Message:
    """A message in canonical form, for templates and comparisons.

    It has ``role`` and ``content``, and ``name``, ``tool_call_id`` and ``tool_calls`` if they are set; other keys are
    dropped. Content is text: None becomes "", text parts are joined. Content with images stays a list of parts
    (``Image``). In a message with tool calls or reasoning, content of only white space becomes "", because clients drop
    it. The arguments of tool calls are parsed. If an assistant's message has the text ``reasoning_content`` or
    ``reasoning``, it gets both names.

    Raises ``ChatError`` if it is not a message.
    """
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise ChatError("a message must be an object with a role")
    same: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    for name in ("name", "tool_call_id"):
        if message.get(name):
            same[name] = message[name]
    if role == "assistant":
        reasons = (message.get(name) for name in ("reasoning_content", "reasoning"))
        if reasoning := next((reason for reason in reasons if reason and isinstance(reason, str)), None):
            same |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls := message.get("tool_calls"):
        same["tool_calls"] = [_call(call) for call in _list(calls, "tool_calls")]
    if isinstance(same["content"], str) and same["content"].isspace() and ("tool_calls" in same or "reasoning" in same):
        same["content"] = ""
    return same


def _content(content: Any) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    merged: list[dict[str, str]] = [{"type": "text", "text": ""}]
    for content_part in _list(content, "content"):
        match content_part:
            case {"type": "text"} if merged[-1]["type"] == "text":
                merged[-1] = {"type": "text", "text": merged[-1]["text"] + str(content_part.get("text", ""))}
            case {"type": "text"}:
                merged.append({"type": "text", "text": str(content_part.get("text", ""))})
            case {"type": "image", "image": str(digest)}:
                merged.append({"type": "image", "image": digest})
            case _:
                raise ChatError("content must be text, or a list of text and image parts")
    if len(merged) == 1:
        return merged[0]["text"]
    return [content_part for content_part in merged if content_part.get("text") != ""]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError("a tool call must have a function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # templates print an agent's malformed arguments unchanged
            arguments = json.loads(arguments) if arguments.strip() else {}
    normalized_call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return normalized_call | ({"id": call["id"]} if call.get("id") else {})


def _list(value: Any, key: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ChatError(f"{key} must be a list, not {type(value).__name__}")
    return value
