"""Render replies for OpenAI's chat completions and completions: complete answers, and the chunks of a stream.

``openai.types`` lacks the token ids, has keys that are never sent here, and takes a second to import (decision 0016).
The golden requests in tests/gateway hold every key of the answers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.errors import ApiError, JsonObject
from asyncrl_cli.gateway.reply_stream import ReplyPart
from asyncrl_cli.gateway.service import Prompts, token_counts
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.gateway.wire import event

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks."""


END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """A request's wishes for its answer. Kept instead of the request, which may be large."""

    token_ids: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    usage: bool = False
    """End a stream with the token counts."""


class _Answer:
    prefix: ClassVar[str]
    """Prefix of the answers' ids."""
    event_type: ClassVar[str]
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: AnswerOptions, model: str, chat: ChatFormat) -> None:
        self._options, self._texts = options, chat.token_text
        self._envelope: JsonObject = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def end(self, prompts: Prompts) -> bytes:
        return (self._event([], usage=_usage(prompts)) if self._options.usage else b"") + END_OF_STREAM

    def failed(self, error: ApiError) -> bytes:
        return event(error.for_openai())

    def _event(self, choices: Sequence[JsonObject], **extra_keys: Any) -> bytes:
        return event({**self._envelope, "object": self.event_type, "choices": choices, **extra_keys})


class ChatAnswer(_Answer):
    """The answer to one request of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    event_type = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions, model: str, chat: ChatFormat) -> None:
        super().__init__(options, model, chat)
        self._begun_choices: set[int] = set()

    def complete(self, prompts: Prompts) -> JsonObject:
        (replies,) = prompts
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        answer: JsonObject = {
            **self._envelope,
            "object": "chat.completion",
            "choices": choices,
            "usage": _usage(prompts),
        }
        if self._options.token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return answer

    def part_events(self, choice: int, reply_part: ReplyPart) -> bytes:
        both: JsonObject = {"reasoning_content": reply_part.text, "reasoning": reply_part.text}
        return self._begin(choice) + self._delta(
            choice, both if reply_part.kind == "reasoning" else {"content": reply_part.text}
        )

    def closing(self, choice: int, reply: Reply) -> bytes:
        events = self._begin(choice)
        if calls := [{**call, "index": index} for index, call in enumerate(reply.message.get("tool_calls", ()))]:
            events += self._delta(choice, {"tool_calls": calls})
        final_choice: JsonObject = {
            "index": choice,
            "delta": {},
            "logprobs": self._logprobs(reply),
            "finish_reason": reply.finish_reason,
        }
        if not self._options.token_ids:
            return events + self._event([final_choice])
        final_choice["token_ids"] = list(reply.token_ids)
        return events + self._event([final_choice], prompt_token_ids=list(reply.prompt_ids))

    def _begin(self, choice: int) -> bytes:
        if choice in self._begun_choices:
            return b""
        self._begun_choices.add(choice)
        return self._delta(choice, {"role": "assistant", "content": ""})

    def _delta(self, choice: int, delta: JsonObject) -> bytes:
        return self._event([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, index: int, reply: Reply) -> JsonObject:
        calls = reply.message.get("tool_calls")
        message: JsonObject = {
            "role": "assistant",
            "content": reply.message.get("content") or (None if calls else ""),
            "refusal": None,
        }
        if reasoning := reply.message.get("reasoning_content"):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice: JsonObject = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(reply),
            "finish_reason": reply.finish_reason,
        }
        if self._options.token_ids:
            choice["token_ids"] = list(reply.token_ids)
        return choice

    def _logprobs(self, reply: Reply) -> JsonObject | None:
        if not self._options.logprobs:
            return None
        content: list[JsonObject] = []
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True):
            text = self._texts(token)
            token_entry: JsonObject = {
                "token": text,
                "logprob": max(float(logprob), LEAST_LOGPROB),
                "bytes": list(text.encode()),
            }
            content.append({**token_entry, "top_logprobs": [token_entry] if self._options.top_logprobs else []})
        return {"content": content, "refusal": None}


class TextAnswer(_Answer):
    """The answer to one request of `/v1/completions`."""

    prefix = "cmpl"
    event_type = "text_completion"

    def complete(self, prompts: Prompts) -> JsonObject:
        replies = [reply for prompt_replies in prompts for reply in prompt_replies]
        choices = [self._choice(index, reply, reply.text) for index, reply in enumerate(replies)]
        return {**self._envelope, "object": "text_completion", "choices": choices, "usage": _usage(prompts)}

    def part_events(self, choice: int, reply_part: ReplyPart) -> bytes:
        return self._event([{"index": choice, "text": reply_part.text, "logprobs": None, "finish_reason": None}])

    def closing(self, choice: int, reply: Reply) -> bytes:
        return self._event([self._choice(choice, reply, "")])

    def _choice(self, index: int, reply: Reply, text: str) -> JsonObject:
        choice: JsonObject = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(reply),
            "finish_reason": "length" if reply.finish_reason == "length" else "stop",
        }
        if self._options.token_ids:
            choice["token_ids"] = list(reply.token_ids)
            choice["prompt_token_ids"] = list(reply.prompt_ids)
        return choice

    def _logprobs(self, reply: Reply) -> JsonObject | None:
        if not self._options.logprobs:
            return None
        tokens = [self._texts(token) for token in reply.token_ids]
        values = [max(float(logprob), LEAST_LOGPROB) for logprob in reply.logprobs]
        offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
        top = (
            [{text: value} for text, value in zip(tokens, values, strict=True)] if self._options.top_logprobs else None
        )
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _usage(prompts: Prompts) -> JsonObject:
    prompt, completion = token_counts(prompts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
