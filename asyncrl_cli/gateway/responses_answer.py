"""Replies in the form of the Responses API: complete answers, and the events of a stream.

A stream has all the events of OpenAI's, numbered from 0: ``response.created`` and ``in_progress``, then of each item
``output_item.added``, its parts and deltas, and ``output_item.done``, one item after the other, and the complete
response at the end. What the deltas add up to is what the item has at its end.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from asyncrl_cli.gateway.answers import named_event
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.json_values import finite
from asyncrl_cli.gateway.requests import Prompts, Sent
from asyncrl_cli.gateway.responses_items import (
    OutputItem,
    OutputMessage,
    Reasoning,
    items_of,
    message_item,
    reasoning_item,
)
from asyncrl_cli.gateway.responses_protocol import OWN, OtherTool, OwnTool, ResponsesRequest
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.gateway.text_stream import Kind, Part
from asyncrl_cli.records.prompt import Message


class InputDetails(TypedDict):
    """Always 0: what a prefix cache had is not known here."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Tokens of the reasoning, the marks around it included."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(TypedDict):
    """Why a response failed after its first event."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class Incomplete(TypedDict):
    """Why a reply was cut."""

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


@dataclass(frozen=True, slots=True)
class Repeated:
    """What an answer repeats of its request. Kept instead of the request, which may be large."""

    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float | None
    token_ids: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    own_tools: Mapping[str, OwnTool]

    @classmethod
    def of(cls, body: ResponsesRequest, model: str, fixed_sampling: bool) -> Repeated:
        """``model``: the served one. ``fixed_sampling``: the temperature is not the request's."""
        choice = body.tool_choice or "auto"
        return cls(
            model=model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            temperature=None if fixed_sampling else body.temperature,
            token_ids=bool(body.return_token_ids),
            tool_choice=choice if isinstance(choice, str) else _choice(choice.type, choice.name),
            tools=finite(json.dumps(_dumped(body))),
            own_tools={own.chat_name: own for own in body.own_tools()},
        )


def _dumped(body: ResponsesRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_unset=True) for tool in body.tools or () if not isinstance(tool, OtherTool)]


def _choice(kind: str, name: str | None) -> Any:
    return {"type": kind, "name": name} if kind in OWN else "auto"


class ResponsesAnswer:
    """Answers one request of `/v1/responses`."""

    def __init__(
        self,
        asked: Repeated,
        stem: str,
        decode: Callable[[Sequence[int]], str],
        keep: Callable[[str, Message], None] | None,
    ) -> None:
        """``stem``: what all ids of this answer have in common, and no client can guess. ``keep`` gets the response's
        id and the reply before a client knows that it is complete; None: it is not kept."""
        self._asked, self._stem, self._decode, self._keep = asked, stem, decode, keep
        self._id, self._created = f"resp_{stem}", int(time.time())
        self._number = 0
        self._output: list[OutputItem] = []
        self._open: Kind | None = None
        self._text = ""

    def complete(self, prompts: Prompts) -> ModelResponse:
        """The answer to a request that is not streamed."""
        ((reply,),) = prompts
        return self._ended(reply, self._items(reply))

    def opening(self, choice: int) -> bytes:
        """The first events."""
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def piece(self, choice: int, part: Part) -> bytes:
        """More of the item that is open, or the beginning of the next one."""
        events = b""
        if self._open != part.kind:
            events = self._close() + self._begin(part.kind)
        self._text += part.text
        return events + self._delta(part.kind, part.text)

    def closing(self, choice: int, reply: Reply, sent: Sent) -> Iterator[bytes]:
        """All that is missing of the items, and the complete response."""
        items = self._items(reply)
        for item in items[len(self._output) :]:
            if item["type"] in ("message", "reasoning"):
                yield self._rest(item)
            else:
                yield self._whole(item)
        ended = self._ended(reply, items)
        yield self._event(f"response.{ended['status']}", response=ended)

    def end(self, prompts: Prompts) -> Iterator[bytes]:
        """Nothing: the complete response was the last event."""
        return iter(())

    def failed(self, error: ApiError) -> bytes:
        """The event of a failure."""
        response = self._response("failed", self._output)
        code: Literal["server_error", "invalid_prompt"] = "server_error" if error.status >= 500 else "invalid_prompt"
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    # -- items of a stream

    def _begin(self, kind: Kind) -> bytes:
        self._open, self._text = kind, ""
        item: dict[str, Any] = {**self._text_item(kind, ""), "status": "in_progress", "content": []}
        item.pop("encrypted_content", None)
        part = self._text_item(kind, "")["content"][0]
        return self._event("response.output_item.added", output_index=len(self._output), item=item) + self._event(
            "response.content_part.added", **self._place(kind), part=part
        )

    def _delta(self, kind: Kind, text: str) -> bytes:
        if kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._place(kind), delta=text)
        return self._event("response.output_text.delta", **self._place(kind), delta=text, logprobs=[])

    def _close(self) -> bytes:
        return b"" if self._open is None else self._rest(self._text_item(self._open, self._text))

    def _rest(self, item: OutputMessage | Reasoning) -> bytes:
        """What is missing of an item with text, perhaps all of it."""
        kind: Kind = "reasoning" if item["type"] == "reasoning" else "content"
        events = b"" if self._open == kind else self._close() + self._begin(kind)
        text = item["content"][0]["text"]
        if rest := text[len(self._text) :]:
            events += self._delta(kind, rest)
        if kind == "reasoning":
            events += self._event("response.reasoning_text.done", **self._place(kind), text=text)
        else:
            events += self._event("response.output_text.done", **self._place(kind), text=text, logprobs=[])
        events += self._event("response.content_part.done", **self._place(kind), part=item["content"][0])
        self._open = None
        return events + self._done(item)

    def _whole(self, item: OutputItem) -> bytes:
        """All events of a call, which is known only when it is complete."""
        key, name = ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        text = cast("dict[str, Any]", item)[key]
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
        event = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return event

    def _place(self, kind: Kind) -> dict[str, Any]:
        return {"item_id": self._text_item(kind, "")["id"], "output_index": len(self._output), "content_index": 0}

    def _text_item(self, kind: Kind, text: str) -> OutputMessage | Reasoning:
        return (
            reasoning_item(f"rs_{self._stem}", text) if kind == "reasoning" else message_item(f"msg_{self._stem}", text)
        )

    def _event(self, kind: str, **body: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **body}
        self._number += 1
        return named_event(kind, numbered)

    # -- the response

    def _items(self, reply: Reply) -> list[OutputItem]:
        items = items_of(reply.message, self._asked.own_tools, self._stem)
        if reply.finish_reason == "length" and items[-1]["type"] != "custom_tool_call":
            items[-1]["status"] = "incomplete"
        return items

    def _ended(self, reply: Reply, items: list[OutputItem]) -> ModelResponse:
        if self._keep is not None:
            self._keep(self._id, reply.message)
        response = self._response("completed", items)
        if reply.finish_reason == "length":
            response["status"], response["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
        given, made = len(reply.prompt_ids), len(reply.token_ids)
        response["usage"] = {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(reply)},
            "total_tokens": given + made,
        }
        if self._asked.token_ids:
            response["prompt_token_ids"], response["token_ids"] = list(reply.prompt_ids), list(reply.token_ids)
        return response

    def _reasoning_tokens(self, reply: Reply) -> int:
        """The fewest tokens of the reply with which all of its reasoning is there."""
        reasoning = reply.message.get("reasoning_content")
        if not reasoning:
            return 0
        ids = reply.token_ids
        return bisect_left(range(len(ids)), True, key=lambda count: reasoning in self._decode(ids[:count]))

    def _response(
        self, status: Literal["in_progress", "completed", "incomplete", "failed"], output: list[OutputItem]
    ) -> ModelResponse:
        asked = self._asked
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": asked.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "store": asked.store,
            "temperature": asked.temperature,
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_p": 1.0,
            "usage": None,
        }
