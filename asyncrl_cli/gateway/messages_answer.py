"""Replies in the form of Anthropic's Messages API: complete answers, and the events of a stream.

As in answers.py, the types are typed dictionaries of exactly what is sent; a test compares them with anthropic.types.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from asyncrl_cli.gateway.answers import named_event
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.messages_blocks import BlockOut, reply_blocks, signature
from asyncrl_cli.gateway.messages_errors import error_body
from asyncrl_cli.gateway.requests import Prompts, Sent
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.gateway.text_stream import Kind, Part

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(TypedDict):
    """Tokens of one request. What engines find in their caches is not reported."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(TypedDict):
    """The answer of `/v1/messages`. The reasons are null only where a stream begins."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockOut]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class ModelEntry(TypedDict):
    """A served model, as Anthropic's API has it."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class ModelEntries(TypedDict):
    """The answer of `/v1/models` to Anthropic's clients."""

    data: list[ModelEntry]
    has_more: bool
    first_id: str
    last_id: str


class MessagesAnswer:
    """Answers one request of `/v1/messages`."""

    def __init__(
        self,
        model: str,
        request_id: str,
        input_tokens: int,
        stop_sequences: Sequence[str],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._model, self._request_id, self._input_tokens = model, request_id, input_tokens
        self._stop_sequences, self._decode = stop_sequences, decode
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks = 0
        self._open: Kind | None = None
        self._thinking = ""

    def complete(self, prompts: Prompts) -> MessageAnswer:
        """The answer to a request that is not streamed."""
        ((reply,),) = prompts
        reason, sequence = self._stop(reply)
        return self._message(reply_blocks(reply.message), reason, sequence, len(reply.token_ids))

    def opening(self, choice: int) -> bytes:
        """The event before the first block."""
        return _event("message_start", message=self._message([], None, None, 0))

    def piece(self, choice: int, part: Part) -> bytes:
        """More of the reply; the first part of a kind begins a block."""
        before = b""
        if self._open != part.kind:
            before = self._close() + self._start(_EMPTY[part.kind])
            self._open = part.kind
        if part.kind == "reasoning":
            self._thinking += part.text
            return before + self._delta({"type": "thinking_delta", "thinking": part.text})
        return before + self._delta({"type": "text_delta", "text": part.text})

    def closing(self, choice: int, reply: Reply, sent: Sent) -> Iterator[bytes]:
        """What has not been sent of the reply, and why it ended."""
        for block in reply_blocks(reply.message):
            match block["type"]:
                case "thinking":
                    yield from self._rest("reasoning", block["thinking"], sent)
                case "text":
                    yield from self._rest("content", block["text"], sent)
                case "tool_use":
                    yield self._close() + self._start({**block, "input": {}})
                    arguments = json.dumps(block["input"], ensure_ascii=False)
                    yield self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._stopped()
        yield self._close()
        reason, sequence = self._stop(reply)
        usage = self._usage(len(reply.token_ids))
        yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)

    def end(self, prompts: Prompts) -> Iterator[bytes]:
        """The last event."""
        yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """A failure in the middle of the stream."""
        return named_event("error", error_body(error, self._request_id))

    def _rest(self, kind: Kind, text: str, sent: Sent) -> Iterator[bytes]:
        already = sent.get(kind, "")
        if len(text) > len(already):
            yield self.piece(0, Part(kind, text[len(already) :]))
        elif not text:
            yield self._start(_EMPTY[kind]) + self._stopped()

    def _start(self, block: BlockOut) -> bytes:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _stopped(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)

    def _close(self) -> bytes:
        """End the block that is open, if one is."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": signature(self._thinking)})
        return (signed if kind == "reasoning" else b"") + self._stopped()

    def _message(
        self, content: list[BlockOut], reason: StopReason | None, sequence: str | None, output_tokens: int
    ) -> MessageAnswer:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(output_tokens),
        }

    def _usage(self, output_tokens: int) -> MessageUsage:
        return {
            "input_tokens": self._input_tokens,
            "output_tokens": output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }

    def _stop(self, reply: Reply) -> tuple[StopReason, str | None]:
        """Why a reply ended, and the request's stop sequence that ended it."""
        match reply.finish_reason:
            case "tool_calls":
                return "tool_use", None
            case "length":
                return "max_tokens", None
        text = self._decode(reply.token_ids)
        found = [(at, stop) for stop in self._stop_sequences if (at := text.find(stop)) >= 0]
        return ("stop_sequence", min(found)[1]) if found else ("end_turn", None)


_EMPTY: dict[Kind, BlockOut] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Blocks as their first events have them."""


def _event(kind: str, **body: Any) -> bytes:
    return named_event(kind, {"type": kind, **body})
