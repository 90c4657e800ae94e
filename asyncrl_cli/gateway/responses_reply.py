"""Replies in the form of the Responses API: complete answers, and the events of a stream.

Invariant: the items of a reply, sent back, are the reply's own message again as sessions compare messages. So the next
call continues its tokens (tests/gateway/test_responses_items.py).

A stream has all the events of OpenAI's, numbered from 0: ``response.created`` and ``in_progress``, then of each item
``output_item.added``, its parts and deltas, and ``output_item.done``, one item after the other, and the complete
response at the end. What the deltas add up to is what the item has at its end.
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
from typing import Any, ClassVar, Literal, NotRequired

from typing_extensions import TypedDict

from asyncrl_cli.gateway.errors import ApiError, ResponseFailure
from asyncrl_cli.gateway.json_values import finite, key
from asyncrl_cli.gateway.reply_stream import Kind, Part
from asyncrl_cli.gateway.responses_request import OWN, CustomTool, OtherTool, OwnTool, ResponsesRequest
from asyncrl_cli.gateway.service import Prompts
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.gateway.wire import event
from asyncrl_cli.records.prompt import Message

OutputItem = dict[str, Any]
"""An item of a reply, in the form in which requests have it, with an id and a status (``openapi.ITEMS``)."""


class ResponseUsage(TypedDict):
    """``cached_tokens`` and ``cache_write_tokens`` of the input are always 0: what a prefix cache had is not known
    here. ``reasoning_tokens`` of the output include the marks around the reasoning."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class ModelResponse(TypedDict):
    """The answer of `/v1/responses`; ``created_at`` is a unix time in s. The ids are there when ``return_token_ids``
    asked for them."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float | None
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    usage: ResponseUsage | None
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


def begun_response(body: ResponsesRequest, model: str, fixed_sampling: bool) -> ModelResponse:
    """The response before its output, with all that it repeats of its request. It is kept instead of the request, which
    may be large. ``fixed_sampling``: the temperature is not the request's."""
    choice = body.tool_choice or "auto"
    if not isinstance(choice, str):
        choice = {"type": choice.type, "name": choice.name} if choice.type in OWN else "auto"  # type: ignore[assignment]
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
        begun: ModelResponse,
        tools: Sequence[OwnTool],
        decode: Callable[[Sequence[int]], str],
        *,
        token_ids: bool,
        keep: Callable[[str, Message], None] | None,
    ) -> None:
        """``keep`` gets the response's id and the reply before a client knows that it is complete; None: it is not
        kept."""
        self._begun, self._decode, self._token_ids, self._keep = begun, decode, token_ids, keep
        self._tools = {own.chat_name: own for own in tools}
        # What all ids of this answer have in common, and no client can guess.
        self._stem = begun["id"].removeprefix("resp_")
        # Of a stream: the next event's number, the items that have ended, the kind of text that is open, and its text.
        self._number = 0
        self._output: list[OutputItem] = []
        self._open: Kind | None = None
        self._text = ""

    def complete(self, prompts: Prompts) -> ModelResponse:
        ((reply,),) = prompts
        return self._ended(reply, self._items(reply))

    def piece(self, choice: int, part: Part) -> bytes:
        events = b""
        if self._open != part.kind:
            events = self._begin() + self._close() + self._begin_text(part.kind)
        self._text += part.text
        return events + self._delta(part)

    def closing(self, choice: int, reply: Reply) -> bytes:
        """All that is missing of the items, and the complete response."""
        events = self._begin()
        items = self._items(reply)
        for item in items[len(self._output) :]:
            if item["type"] in ("message", "reasoning"):
                events += self._rest(item)
            else:
                events += self._whole(item)
        ended = self._ended(reply, items)
        return events + self._event(f"response.{ended['status']}", response=ended)

    def end(self, prompts: Prompts) -> bytes:
        """Nothing: the complete response was the last event."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        failed: ModelResponse = {
            **self._begun,
            "status": "failed",
            "output": self._output,
            "error": error.for_responses(),
        }
        return self._event("response.failed", response=failed)

    # -- items of a stream

    def _begin(self) -> bytes:
        if self._number:
            return b""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._begun) for kind in kinds)

    def _begin_text(self, kind: Kind) -> bytes:
        self._open, self._text = kind, ""
        empty = text_item(kind, self._stem, "")
        item = empty | {"status": "in_progress", "content": []}
        item.pop("encrypted_content", None)
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        return added + self._text_event("response.content_part.added", kind, part=empty["content"][0])

    def _delta(self, part: Part) -> bytes:
        name, more = _TEXT_EVENTS[part.kind]
        return self._text_event(f"response.{name}.delta", part.kind, delta=part.text, **more)

    def _close(self) -> bytes:
        return b"" if self._open is None else self._rest(text_item(self._open, self._stem, self._text))

    def _rest(self, item: OutputItem) -> bytes:
        """The end of an item with text; all of it if it has not begun, because it has no text."""
        kind: Kind = "reasoning" if item["type"] == "reasoning" else "content"
        events = b"" if self._open == kind else self._close() + self._begin_text(kind)
        name, more = _TEXT_EVENTS[kind]
        content = item["content"][0]
        events += self._text_event(f"response.{name}.done", kind, text=content["text"], **more)
        events += self._text_event("response.content_part.done", kind, part=content)
        self._open = None
        return events + self._done(item)

    def _text_event(self, name: str, kind: Kind, **body: Any) -> bytes:
        """An event about the item with text that is open."""
        item_id = text_item(kind, self._stem, "")["id"]
        return self._event(name, item_id=item_id, output_index=len(self._output), content_index=0, **body)

    def _whole(self, item: OutputItem) -> bytes:
        """All events of a call, which is known only when it is complete."""
        key, name = ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        text = item[key]
        place = {"item_id": item["id"], "output_index": len(self._output)}
        begun = {**item, key: ""} | ({"status": "in_progress"} if "status" in item else {})
        return (
            self._close()
            + self._event("response.output_item.added", output_index=len(self._output), item=begun)
            + self._event(f"response.{name}.delta", **place, delta=text)
            + self._event(f"response.{name}.done", **place, **{key: text})
            + self._done(item)
        )

    def _done(self, item: OutputItem) -> bytes:
        done = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return done

    def _event(self, kind: str, **body: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **body}
        self._number += 1
        return event(numbered, kind)

    # -- the response

    def _items(self, reply: Reply) -> list[OutputItem]:
        items = items_of(reply.message, self._tools, self._stem)
        if reply.finish_reason == "length" and items[-1]["type"] != "custom_tool_call":
            items[-1]["status"] = "incomplete"
        return items

    def _ended(self, reply: Reply, items: list[OutputItem]) -> ModelResponse:
        if self._keep is not None:
            self._keep(self._begun["id"], reply.message)
        cut = reply.finish_reason == "length"
        given, made = len(reply.prompt_ids), len(reply.token_ids)
        response: ModelResponse = {
            **self._begun,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": given,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(reply)},
                "total_tokens": given + made,
            },
        }
        if self._token_ids:
            response["prompt_token_ids"], response["token_ids"] = list(reply.prompt_ids), list(reply.token_ids)
        return response

    def _reasoning_tokens(self, reply: Reply) -> int:
        """The fewest tokens of the reply with which all of its reasoning is there."""
        reasoning = reply.message.get("reasoning_content")
        if not reasoning:
            return 0
        ids = reply.token_ids
        return bisect_left(range(len(ids)), True, key=lambda count: reasoning in self._decode(ids[:count]))


_TEXT_EVENTS: dict[Kind, tuple[str, dict[str, Any]]] = {
    "reasoning": ("reasoning_text", {}),
    "content": ("output_text", {"logprobs": []}),
}
"""The name of the events about a kind of text, and what else they have."""


def items_of(message: Message, tools: Mapping[str, OwnTool], stem: str) -> list[OutputItem]:
    """The items of a reply; ``tools`` are by the names that the model sees, and the items' ids follow from ``stem``."""
    items: list[OutputItem] = []
    reasoning, content, calls = (message.get(key) for key in ("reasoning_content", "content", "tool_calls"))
    if reasoning:
        items.append(text_item("reasoning", stem, reasoning))
    if content or not (reasoning or calls):
        items.append(text_item("content", stem, content or ""))
    return items + [_call_item(call, tools, f"{stem}_{index}") for index, call in enumerate(calls or ())]


def text_item(kind: Kind, stem: str, text: str) -> OutputItem:
    """The model's reasoning or message. There is no summary of the reasoning. ``encrypted_content`` is the text in
    base64, not a secret: some programs send back nothing else."""
    if kind == "content":
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


def _call_item(call: Mapping[str, Any], tools: Mapping[str, OwnTool], stem: str) -> OutputItem:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    own = tools.get(name)
    text = _custom_input(arguments) if own and isinstance(own.tool, CustomTool) else None
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


# -- conversations that clients continue by the id of their last response. They are in memory, bounded in number and
# size, and by session: an id opens nothing in another one, and no client can guess it. They end with the gateway; then
# an id gets 404, like one that never existed (decision 0068).

MAX_KEPT = 512
"""Responses of one session, and of all calls without one."""
MAX_BYTES = 4 * 2**20
"""Memory of one session's conversations as JSON, each counted completely, although those of one conversation may share
messages."""
MAX_BYTES_WITHOUT = 32 * 2**20
"""The same, of all calls without a session."""


class KeptResponses:
    """Conversations by the id of their last response; the least recently used are removed first."""

    def __init__(self, most: int = MAX_KEPT, limit: int = MAX_BYTES) -> None:
        self._most, self._limit = most, limit
        self._kept: OrderedDict[str, tuple[Sequence[Message], int]] = OrderedDict()
        self._size = 0

    def add(self, response_id: str, messages: Sequence[Message]) -> None:
        """Keep a conversation. The newest is kept whatever its size, which the model's length bounds."""
        size = sum(getsizeof(key(message)) for message in messages)
        self._kept[response_id] = (messages, size)
        self._size += size
        while len(self._kept) > 1 and (len(self._kept) > self._most or self._size > self._limit):
            _, (_, size) = self._kept.popitem(last=False)
            self._size -= size

    def get(self, response_id: str) -> Sequence[Message]:
        """A conversation, the response included. Raises ``ApiError``."""
        if response_id not in self._kept:
            message = f"Previous response with id {response_id!r} not found."
            raise ApiError(404, message, code="previous_response_not_found", param="previous_response_id")
        self._kept.move_to_end(response_id)
        return self._kept[response_id][0]
