"""Render replies for OpenAI's chat completions and completions: complete answers, and the chunks of a stream.

The answers are typed dictionaries with exactly the keys that are sent. FastAPI makes the OpenAPI document from them,
and answers are not validated again. ``openai.types`` lacks the token ids, has keys that are never sent here, and takes
a second to import (decision 0016).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, NotRequired

from typing_extensions import TypedDict

from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.custom_tools import custom_input
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.reply_stream import Part
from asyncrl_cli.gateway.service import Prompts, token_counts
from asyncrl_cli.gateway.session import Reply
from asyncrl_cli.gateway.wire import event

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks."""


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class FunctionCall(TypedDict):
    """A function with its arguments as JSON text."""

    name: str
    arguments: str


class Call(TypedDict):
    """One tool call; ``index`` only in streams."""

    index: NotRequired[int]
    id: str
    type: Literal["function"]
    function: FunctionCall


class CustomInput(TypedDict):
    name: str
    input: str


class CustomCall(TypedDict):
    """One call of a tool that takes text."""

    index: NotRequired[int]
    id: str
    type: Literal["custom"]
    custom: CustomInput


class AssistantMessage(TypedDict):
    """The model's message. Reasoning, if any, is under both names that servers use for it."""

    role: Literal["assistant"]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[Call | CustomCall]]


class TopLogprob(TypedDict):
    """A token's log-probability in nats; ``bytes``: the token in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(TypedDict):
    """One reply. ``return_token_ids`` adds the ids."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: NotRequired[list[int]]


class Delta(TypedDict, total=False):
    """A chunk's addition to a message."""

    role: Literal["assistant"]
    reasoning_content: str
    reasoning: str
    content: str
    tool_calls: list[Call | CustomCall]


class ChatChunkChoice(TypedDict):
    """A piece of one reply. The last piece has the reason, and the log-probabilities and ids if requested."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[list[int]]


class TextLogprobs(TypedDict):
    """One entry for each token. ``text_offset`` counts characters from the beginning of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(TypedDict):
    """One completion, or a piece of it in a stream. ``return_token_ids`` adds the ids."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Envelope(TypedDict):
    """Keys of all generated answers; ``created`` is a Unix time in s."""

    id: str
    created: int
    model: str
    usage: NotRequired[Usage]
    prompt_token_ids: NotRequired[list[int]]


class ChatCompletion(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunk(Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class Completion(Envelope):
    """The answer of `/v1/completions`, or one event of its stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request's wishes for its answer. Kept instead of the request, which may be large."""

    token_ids: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    usage: bool = False
    """End a stream with the token counts."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools that take text."""


class _Answer:
    prefix: ClassVar[str]
    """Prefix of the answers' ids."""
    event_type: ClassVar[str]
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, wanted: Wanted, model: str, chat: ChatFormat) -> None:
        self._wanted, self._texts = wanted, chat.token_text
        self._envelope: Envelope = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def end(self, prompts: Prompts) -> bytes:
        return (self._event([], usage=_usage(prompts)) if self._wanted.usage else b"") + END_OF_STREAM

    def failed(self, error: ApiError) -> bytes:
        return event(error.for_openai())

    def _event(self, choices: Sequence[ChatChunkChoice | TextChoice], **more: Any) -> bytes:
        return event({**self._envelope, "object": self.event_type, "choices": choices, **more})


class ChatAnswer(_Answer):
    """The answer to one request of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    event_type = "chat.completion.chunk"

    def __init__(self, wanted: Wanted, model: str, chat: ChatFormat) -> None:
        super().__init__(wanted, model, chat)
        self._begun: set[int] = set()

    def complete(self, prompts: Prompts) -> ChatCompletion:
        (replies,) = prompts
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        answer: ChatCompletion = {
            **self._envelope,
            "object": "chat.completion",
            "choices": choices,
            "usage": _usage(prompts),
        }
        if self._wanted.token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return answer

    def piece(self, choice: int, part: Part) -> bytes:
        both: Delta = {"reasoning_content": part.text, "reasoning": part.text}
        return self._begin(choice) + self._delta(choice, both if part.kind == "reasoning" else {"content": part.text})

    def closing(self, choice: int, reply: Reply) -> bytes:
        events = self._begin(choice)
        calls = _calls(reply, self._wanted.custom_tools)
        for index, call in enumerate(calls):
            call["index"] = index
        if calls:
            events += self._delta(choice, {"tool_calls": calls})
        last: ChatChunkChoice = {
            "index": choice,
            "delta": {},
            "logprobs": self._logprobs(reply),
            "finish_reason": reply.finish_reason,
        }
        if not self._wanted.token_ids:
            return events + self._event([last])
        last["token_ids"] = list(reply.token_ids)
        return events + self._event([last], prompt_token_ids=list(reply.prompt_ids))

    def _begin(self, choice: int) -> bytes:
        if choice in self._begun:
            return b""
        self._begun.add(choice)
        return self._delta(choice, {"role": "assistant", "content": ""})

    def _delta(self, choice: int, delta: Delta) -> bytes:
        return self._event([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, index: int, reply: Reply) -> ChatChoice:
        calls = _calls(reply, self._wanted.custom_tools)
        message: AssistantMessage = {
            "role": "assistant",
            "content": reply.message.get("content") or (None if calls else ""),
            "refusal": None,
        }
        if reasoning := reply.message.get("reasoning_content"):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice: ChatChoice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(reply),
            "finish_reason": reply.finish_reason,
        }
        if self._wanted.token_ids:
            choice["token_ids"] = list(reply.token_ids)
        return choice

    def _logprobs(self, reply: Reply) -> ChatLogprobs | None:
        if not self._wanted.logprobs:
            return None
        content: list[TokenLogprob] = []
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True):
            text = self._texts(token)
            own: TopLogprob = {
                "token": text,
                "logprob": max(float(logprob), LEAST_LOGPROB),
                "bytes": list(text.encode()),
            }
            content.append({**own, "top_logprobs": [own] if self._wanted.top_logprobs else []})
        return {"content": content, "refusal": None}


class TextAnswer(_Answer):
    """The answer to one request of `/v1/completions`."""

    prefix = "cmpl"
    event_type = "text_completion"

    def complete(self, prompts: Prompts) -> Completion:
        replies = [reply for of_prompt in prompts for reply in of_prompt]
        choices = [self._choice(index, reply, reply.text) for index, reply in enumerate(replies)]
        return {**self._envelope, "object": "text_completion", "choices": choices, "usage": _usage(prompts)}

    def piece(self, choice: int, part: Part) -> bytes:
        return self._event([{"index": choice, "text": part.text, "logprobs": None, "finish_reason": None}])

    def closing(self, choice: int, reply: Reply) -> bytes:
        return self._event([self._choice(choice, reply, "")])

    def _choice(self, index: int, reply: Reply, text: str) -> TextChoice:
        choice: TextChoice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(reply),
            "finish_reason": "length" if reply.finish_reason == "length" else "stop",
        }
        if self._wanted.token_ids:
            choice["token_ids"] = list(reply.token_ids)
            choice["prompt_token_ids"] = list(reply.prompt_ids)
        return choice

    def _logprobs(self, reply: Reply) -> TextLogprobs | None:
        if not self._wanted.logprobs:
            return None
        tokens = [self._texts(token) for token in reply.token_ids]
        values = [max(float(logprob), LEAST_LOGPROB) for logprob in reply.logprobs]
        offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
        top = [{text: value} for text, value in zip(tokens, values, strict=True)] if self._wanted.top_logprobs else None
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _calls(reply: Reply, custom_tools: Collection[str]) -> list[Call | CustomCall]:
    return [_call(call["id"], call["function"], custom_tools) for call in reply.message.get("tool_calls") or ()]


def _call(call_id: str, function: Mapping[str, str], custom_tools: Collection[str]) -> Call | CustomCall:
    name, arguments = function["name"], function["arguments"]
    if name in custom_tools and (text := custom_input(arguments)) is not None:
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _usage(prompts: Prompts) -> Usage:
    prompt, completion = token_counts(prompts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
