"""Render replies for OpenAI's Responses API: complete answers, and the events of a stream.

Invariant: if a client sends a reply's items back, sessions recognize the reply's message, and the next call continues
its tokens (tests/gateway/test_responses_items.py).

A stream has all of OpenAI's events, numbered from 0: ``response.created`` and ``in_progress``; then for one item after
another ``output_item.added``, its parts and deltas, and ``output_item.done``; at the end the complete response. The
deltas of an item add up to its final text.
"""

from __future__ import annotations

import json
import secrets
import time
from base64 import b64encode
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from sys import getsizeof
from typing import Any, ClassVar

from asyncrl_cli.gateway.errors import ApiError, JsonObject
from asyncrl_cli.gateway.reply_stream import ReplyPart, TextKind
from asyncrl_cli.gateway.responses_request import CLIENT_TOOL_TYPES, ClientTool, CustomTool, OtherTool, ResponsesRequest
from asyncrl_cli.gateway.service import Prompts
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.gateway.wire import canonical_json, event, finite
from asyncrl_cli.records.prompt import Message

OutputItem = dict[str, Any]
"""An item of a reply, in the format of requests, with an id and a status."""


def begun_response(body: ResponsesRequest, model: str, fixed_sampling: bool) -> JsonObject:
    """The response without its output, with the keys that it repeats from the request. It is kept instead of the
    request, which may be large. ``fixed_sampling``: the request's temperature does not count."""
    choice = body.tool_choice or "auto"
    if not isinstance(choice, str):
        choice = {"type": choice.type, "name": choice.name} if choice.type in CLIENT_TOOL_TYPES else "auto"  # type: ignore[assignment]
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or () if not isinstance(tool, OtherTool)]
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": None if fixed_sampling else body.temperature,
        "tool_choice": choice,
        "tools": finite(json.dumps(tools)),
        "top_p": 1.0,
        "usage": None,
    }


class ResponsesAnswer:
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        response: JsonObject,
        tools: Sequence[ClientTool],
        decode: Callable[[Sequence[int]], str],
        *,
        token_ids: bool,
        keep: Callable[[str, Message], None] | None,
    ) -> None:
        """``keep`` gets the response's id and the reply before the client gets the complete response, because the
        client's next request may continue it; None: the response is not kept."""
        self._response, self._decode, self._token_ids, self._keep = response, decode, token_ids, keep
        self._tools = {client_tool.chat_name: client_tool for client_tool in tools}
        # Part of all ids in this answer; no client can guess it.
        self._stem = response["id"].removeprefix("resp_")
        # State of a stream.
        self._event_count = 0  # of the next event
        self._output: list[JsonObject] = []  # ended items
        self._open_kind: TextKind | None = None
        self._open_text = ""  # of the open item

    def complete(self, prompts: Prompts) -> JsonObject:
        ((reply,),) = prompts
        return self._finished_response(reply, self._items(reply))

    def part_events(self, choice: int, reply_part: ReplyPart) -> bytes:
        events = b""
        if self._open_kind != reply_part.kind:
            events = self._begin() + self._close() + self._begin_text(reply_part.kind)
        self._open_text += reply_part.text
        return events + self._delta(reply_part)

    def closing(self, choice: int, reply: Reply) -> bytes:
        """The missing events of the items, and the complete response."""
        events = self._begin()
        items = self._items(reply)
        for item in items[len(self._output) :]:
            if item["type"] in ("message", "reasoning"):
                events += self._text_item_end_events(item)
            else:
                events += self._call_item_events(item)
        response = self._finished_response(reply, items)
        return events + self._event(f"response.{response['status']}", response=response)

    def end(self, prompts: Prompts) -> bytes:
        return b""  # the complete response was the last event

    def failed(self, error: ApiError) -> bytes:
        failed: JsonObject = {
            **self._response,
            "status": "failed",
            "output": self._output,
            "error": error.for_responses(),
        }
        return self._event("response.failed", response=failed)

    # -- items of a stream

    def _begin(self) -> bytes:
        if self._event_count:
            return b""
        event_types = ("response.created", "response.in_progress")
        return b"".join(self._event(event_type, response=self._response) for event_type in event_types)

    def _begin_text(self, text_kind: TextKind) -> bytes:
        self._open_kind, self._open_text = text_kind, ""
        empty = text_item(text_kind, self._stem, "")
        item = empty | {"status": "in_progress", "content": []}
        item.pop("encrypted_content", None)
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        return added + self._text_event("response.content_part.added", text_kind, part=empty["content"][0])

    def _delta(self, reply_part: ReplyPart) -> bytes:
        name, extra_keys = _TEXT_EVENTS[reply_part.kind]
        return self._text_event(f"response.{name}.delta", reply_part.kind, delta=reply_part.text, **extra_keys)

    def _close(self) -> bytes:
        return (
            b""
            if self._open_kind is None
            else self._text_item_end_events(text_item(self._open_kind, self._stem, self._open_text))
        )

    def _text_item_end_events(self, item: JsonObject) -> bytes:
        """The last events of an item with text; all of its events if it is empty, and so has not begun."""
        text_kind: TextKind = "reasoning" if item["type"] == "reasoning" else "content"
        events = b"" if self._open_kind == text_kind else self._close() + self._begin_text(text_kind)
        name, extra_keys = _TEXT_EVENTS[text_kind]
        content = item["content"][0]
        events += self._text_event(f"response.{name}.done", text_kind, text=content["text"], **extra_keys)
        events += self._text_event("response.content_part.done", text_kind, part=content)
        self._open_kind = None
        return events + self._item_done_event(item)

    def _text_event(self, name: str, text_kind: TextKind, **body: Any) -> bytes:
        item_id = text_item(text_kind, self._stem, "")["id"]
        return self._event(name, item_id=item_id, output_index=len(self._output), content_index=0, **body)

    def _call_item_events(self, item: JsonObject) -> bytes:
        """All events of a call, which can be parsed only when it is complete."""
        key, name = ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        text = item[key]
        place = {"item_id": item["id"], "output_index": len(self._output)}
        empty_item = {**item, key: ""} | ({"status": "in_progress"} if "status" in item else {})
        return (
            self._close()
            + self._event("response.output_item.added", output_index=len(self._output), item=empty_item)
            + self._event(f"response.{name}.delta", **place, delta=text)
            + self._event(f"response.{name}.done", **place, **{key: text})
            + self._item_done_event(item)
        )

    def _item_done_event(self, item: JsonObject) -> bytes:
        done_event = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return done_event

    def _event(self, event_type: str, **body: Any) -> bytes:
        numbered = {"type": event_type, "sequence_number": self._event_count, **body}
        self._event_count += 1
        return event(numbered, event_type)

    # -- the response

    def _items(self, reply: Reply) -> list[JsonObject]:
        items = items_of(reply.message, self._tools, self._stem)
        if reply.finish_reason == "length" and items[-1]["type"] != "custom_tool_call":
            items[-1]["status"] = "incomplete"
        return items

    def _finished_response(self, reply: Reply, items: list[JsonObject]) -> JsonObject:
        if self._keep is not None:
            self._keep(self._response["id"], reply.message)
        cut = reply.finish_reason == "length"
        prompt_count, sampled_count = len(reply.prompt_ids), len(reply.token_ids)
        response: JsonObject = {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": prompt_count,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled_count,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(reply)},
                "total_tokens": prompt_count + sampled_count,
            },
        }
        if self._token_ids:
            response["prompt_token_ids"], response["token_ids"] = list(reply.prompt_ids), list(reply.token_ids)
        return response

    def _reasoning_tokens(self, reply: Reply) -> int:
        """The smallest number of tokens with which the reply contains its whole reasoning."""
        reasoning = reply.message.get("reasoning_content")
        if not reasoning:
            return 0
        ids = reply.token_ids
        return bisect_left(range(len(ids)), True, key=lambda count: reasoning in self._decode(ids[:count]))


_TEXT_EVENTS: dict[TextKind, tuple[str, dict[str, Any]]] = {
    "reasoning": ("reasoning_text", {}),
    "content": ("output_text", {"logprobs": []}),
}
"""Name of the events for a kind of text, and their further keys."""


def items_of(message: Message, tools: Mapping[str, ClientTool], stem: str) -> list[JsonObject]:
    """The items of a reply. ``tools``: by the names that the model sees. ``stem``: part of the items' ids."""
    items: list[JsonObject] = []
    reasoning, content, calls = (message.get(key) for key in ("reasoning_content", "content", "tool_calls"))
    if reasoning:
        items.append(text_item("reasoning", stem, reasoning))
    if content or not (reasoning or calls):
        items.append(text_item("content", stem, content or ""))
    return items + [_call_item(call, tools, f"{stem}_{index}") for index, call in enumerate(calls or ())]


def text_item(text_kind: TextKind, stem: str, text: str) -> JsonObject:
    """An item with the model's reasoning or message. Reasoning has no summary. ``encrypted_content`` is the text in
    base64, not a secret: some programs send back only this key."""
    if text_kind == "content":
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        item = {"id": f"msg_{stem}", "type": "message", "role": "assistant", "status": "completed"}
        return item | {"content": content}
    return {
        "id": f"rs_{stem}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": b64encode(text.encode()).decode(),
    }


def _call_item(call: Mapping[str, Any], tools: Mapping[str, ClientTool], stem: str) -> JsonObject:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    client_tool = tools.get(name)
    text = custom_input(arguments) if client_tool and isinstance(client_tool.tool, CustomTool) else None
    item: OutputItem
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
    if client_tool and client_tool.namespace:
        item["name"], item["namespace"] = client_tool.tool.name, client_tool.namespace
    return item


def custom_input(arguments: str) -> str | None:
    """Return the input of a custom tool. None if the model wrote other arguments, which are then sent unchanged as a
    function call, because no sampled text may be lost."""
    parsed = json.loads(arguments)
    text = parsed.get("input") if len(parsed) == 1 else None
    try:
        return text if isinstance(text, str) and text.encode() is not None else None
    except UnicodeEncodeError:
        return None


# -- Conversations that clients continue by the id of the last response. They are kept in memory, limited in
# size, separately for each session: an id is valid only in its session, and cannot be guessed. After the gateway ends,
# an id gets 404, like an id that never existed (decision 0016).

MAX_BYTES = 4 * 2**20
"""Limit on the memory of one session's conversations as JSON. Messages that conversations share count in each."""
MAX_BYTES_WITHOUT = 32 * 2**20
"""The same limit for all calls without a session."""


class KeptResponses:
    """Conversations by the id of the last response. The least recently used are removed first."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._conversations: OrderedDict[str, tuple[Sequence[Message], int]] = OrderedDict()
        self._size = 0

    def add(self, response_id: str, messages: Sequence[Message]) -> None:
        """Keep a conversation. The newest is always kept; the model's context length bounds its size."""
        size = sum(getsizeof(canonical_json(message)) for message in messages)
        self._conversations[response_id] = (messages, size)
        self._size += size
        while len(self._conversations) > 1 and self._size > self._limit:
            _, (_, size) = self._conversations.popitem(last=False)
            self._size -= size

    def get(self, response_id: str) -> Sequence[Message]:
        """Return a conversation, including the response. Raises ``ApiError``."""
        if response_id not in self._conversations:
            message = f"Previous response with id {response_id!r} not found."
            raise ApiError(404, message, code="previous_response_not_found", param="previous_response_id")
        self._conversations.move_to_end(response_id)
        return self._conversations[response_id][0]
