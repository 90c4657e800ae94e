"""Render replies for Anthropic's Messages API: complete answers, and the events of a stream.

Invariant: if a client sends a reply's blocks back, sessions recognize the reply's message, and the next call continues
its tokens (tests/gateway/test_messages_blocks.py). Meaningless differences do not matter: the number of blocks and
messages in a turn, cache marks, and JavaScript's notation of numbers (``wire.canonical_json``).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from asyncrl_cli.gateway.errors import ApiError, JsonObject, new_request_id
from asyncrl_cli.gateway.reply_stream import ReplyPart, TextKind
from asyncrl_cli.gateway.service import Prompts
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.gateway.wire import event, finite
from asyncrl_cli.records.prompt import Message

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesAnswer:
    def __init__(
        self, model: str, input_tokens: int, stop_sequences: Sequence[str], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._input_tokens, self._stop_sequences, self._decode = input_tokens, stop_sequences, decode
        self._request_id = new_request_id()
        self.headers: Mapping[str, str] = {"request-id": self._request_id}
        self._message: JsonObject = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }
        # State of a stream.
        self._started = False
        self._blocks = 0  # ended blocks
        self._open_kind: TextKind | None = None
        self._thinking = ""  # all reasoning so far

    def complete(self, prompts: Prompts) -> JsonObject:
        ((reply,),) = prompts
        reason, sequence = self._stop(reply)
        return {
            **self._message,
            "content": reply_blocks(reply.message),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(len(reply.token_ids)),
        }

    def part_events(self, choice: int, reply_part: ReplyPart) -> bytes:
        events = b""
        if self._open_kind != reply_part.kind:
            events = self._begin() + self._close() + self._start(_EMPTY[reply_part.kind])
            self._open_kind = reply_part.kind
        if reply_part.kind == "reasoning":
            self._thinking += reply_part.text
            return events + self._delta({"type": "thinking_delta", "thinking": reply_part.text})
        return events + self._delta({"type": "text_delta", "text": reply_part.text})

    def closing(self, choice: int, reply: Reply) -> bytes:
        """The tool calls, and the reason why the reply ended. An empty reply has an empty text block."""
        events = self._begin() + self._close()
        for block in reply_blocks(reply.message):
            if block["type"] == "tool_use":
                events += self._start({**block, "input": {}})
                arguments = json.dumps(block["input"], ensure_ascii=False)
                events += self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._stopped()
        if not self._blocks:
            events += self._start(_EMPTY["content"]) + self._stopped()
        reason, sequence = self._stop(reply)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return events + _event("message_delta", delta=delta, usage=self._usage(len(reply.token_ids)))

    def end(self, prompts: Prompts) -> bytes:
        return _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return event(error.for_anthropic(self._request_id), "error")

    def _begin(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return _event("message_start", message=self._message)

    def _start(self, block: JsonObject) -> bytes:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _stopped(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)

    def _close(self) -> bytes:
        closed_kind, self._open_kind = self._open_kind, None
        if closed_kind is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": signature(self._thinking)})
        return (signed if closed_kind == "reasoning" else b"") + self._stopped()

    def _usage(self, output_tokens: int) -> JsonObject:
        return {
            "input_tokens": self._input_tokens,
            "output_tokens": output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }

    def _stop(self, reply: Reply) -> tuple[StopReason, str | None]:
        """The reason why a reply ended, and the request's stop sequence if one ended it."""
        match reply.finish_reason:
            case "tool_calls":
                return "tool_use", None
            case "length":
                return "max_tokens", None
        text = self._decode(reply.token_ids)
        stop_positions = [(position, stop) for stop in self._stop_sequences if (position := text.find(stop)) >= 0]
        return ("stop_sequence", min(stop_positions)[1]) if stop_positions else ("end_turn", None)


_EMPTY: dict[TextKind, JsonObject] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Empty blocks, for the events that begin a block."""


def reply_blocks(message: Message) -> list[JsonObject]:
    """A reply as blocks: reasoning, text and tool calls, and at least one block."""
    blocks: list[JsonObject] = []
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
    """The signature of a thinking block: a digest of its text."""
    return blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _event(event_type: str, **body: Any) -> bytes:
    return event({"type": event_type, **body}, event_type)
