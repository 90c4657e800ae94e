"""Conversations as tokens: one model's tokenizer, chat template and tool parser.

A conversation is rendered as a whole once, when it begins. From then on its tokens are what they are, and
``continue_`` says which ones follow: what the template puts after a reply, and the new messages. It is found as a
difference of texts. A fixed conversation is rendered with the new messages after it, and what stands behind the fixed
reply is the answer; only that is tokenized. What came before the reply never takes part, so a template may as well
treat older turns differently from newer ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from asyncrl_cli.gateway.tool_calls import Tools, tool_parser
from asyncrl_cli.records.prompt import ChatError, Message, normalized

_FIXED_REPLY = "the-reply-of-before"
"""Stands for a reply while the text after it is found. Templates trim, so it has nothing to trim."""


class ChatFormat:
    """How one model speaks."""

    def __init__(
        self, tokenizer: Any, tool_parser_name: str | None = None, *, end_tokens: frozenset[int] | None = None
    ) -> None:
        """``tokenizer``: a transformers tokenizer. ``tool_parser_name``: as ``rollout.tool_parser``. ``end_tokens``:
        the model's (``train.tokenizer.end_tokens``); None for the tokenizer's own alone.

        Raises ``ToolParserError``. A parser other than hermes imports vLLM, which takes its time.
        """
        self._tokenizer = tokenizer
        self._tool_calls = tool_parser(tool_parser_name, tokenizer)
        self.end_tokens = frozenset({tokenizer.eos_token_id} - {None}) if end_tokens is None else end_tokens
        """Token ids at which engines end a reply; the reply keeps the one that it ended with."""
        self.vocabulary: int = len(tokenizer)
        """Token ids are below this."""
        self.longest_token: int = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token: a text has at least its length over this of tokens."""

    def render(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """A whole prompt, with the beginning of the reply that is asked for. Raises ``ChatError``."""
        return self.encode(self._text([normalized(message) for message in messages], tools, reply=True))

    def continue_(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        last_token: int | None,
        reply: Message | None = None,
    ) -> list[int]:
        """The tokens between a reply that ends with ``last_token`` and the next one, with ``messages`` in between.

        The template's end of a turn comes first, unless the model ended the turn itself: no two end tokens follow
        each other. ``reply`` is that reply as a message; templates look back at its tool calls.

        Raises ``ChatError`` when the template refuses the messages, or renders what is behind a reply differently
        when more follows.
        """
        new = [normalized(message) for message in messages]
        question: Message = {"role": "user", "content": "?"}
        said: dict[str, Any] = {"role": "assistant", "content": _FIXED_REPLY}
        before = self._text([question, said], tools)
        turn_end = _after(before, _FIXED_REPLY)
        if calls := (normalized(reply) if reply else {}).get("tool_calls"):
            said = said | {"tool_calls": calls}
            before = self._text([question, said], tools)
        whole = self._text([question, said, *new], tools, reply=True)
        if _FIXED_REPLY in before:
            before, whole = _after(before, _FIXED_REPLY), _after(whole, _FIXED_REPLY)
        if not before.endswith(turn_end) or not whole.startswith(before):
            raise ChatError("the chat template renders a turn differently when others follow")
        ids = self.encode(turn_end + whole[len(before) :])
        if last_token not in self.end_tokens or not ids:
            return ids
        # Without an end of turn in the template, the first token begins the next message (GLM's <|user|>): it goes only
        # if the model has already sampled the very same one.
        ends_twice = ids[0] == last_token or (turn_end and ids[0] in self.end_tokens)
        return ids[1:] if ends_twice else ids

    def parse(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        tools: Tools | None = None,
        stop: Sequence[str] = (),
    ) -> Message:
        """The assistant message that ``token_ids`` are, in OpenAI's shape; with ``tool_calls`` if it makes any.

        The ids of the calls are a function of the tokens before and in the reply, so that they are the same whenever
        it is.
        """
        text = before_stop(self.decode(token_ids), stop)
        if not tools:
            return {"role": "assistant", "content": text}
        # What marks a tool call is a special token in some vocabularies.
        marked = token_ids[:-1] if token_ids and token_ids[-1] in self.end_tokens else token_ids
        found = self._tool_calls(before_stop(self.decode(marked, special=True), stop), tools)
        if found is None:
            return {"role": "assistant", "content": text}
        origin = np.asarray([*prompt_ids, *token_ids], np.int32).tobytes()
        calls = [
            {
                # Nine letters and digits is what the strictest template asks for.
                "id": hashlib.blake2b(origin, salt=index.to_bytes(4, "big")).hexdigest()[:9],
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(found.calls)
        ]
        return {"role": "assistant", "content": found.content or None, "tool_calls": calls}

    def encode(self, text: str) -> list[int]:
        """A text's token ids; nothing is put before or behind it. Raises ``ChatError`` for what is no text."""
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text that a sequence begins with: ``encode``, after the tokenizer's own beginning, if any."""
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of token ids as engines decode it: without special tokens, unless they are asked for."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ChatError(f"the text is not Unicode: {error}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _text(self, messages: Sequence[Message], tools: Tools | None, reply: bool = False) -> str:
        if self._tokenizer.chat_template is None:
            raise ChatError("the model has no chat template; give it one with model.chat_template")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    add_generation_prompt=reply,
                    tokenize=False,
                )
            )
        except Exception as error:  # templates raise what they like
            raise ChatError(f"the chat template refuses these messages or tools: {error}") from error


def key(value: Any) -> str:
    """A text that is equal for equal JSON values."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"not JSON: {error}") from error


def before_stop(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of the stop strings in it."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def _after(text: str, mark: str) -> str:
    _, found, rest = text.partition(mark)
    if not found:
        raise ChatError("the chat template leaves a reply's text out")
    return rest
