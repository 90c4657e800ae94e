"""Conversations as tokens: one model's tokenizer, chat template and parsers (decision 0017).

A conversation is rendered once, when it begins. From then on its tokens are fixed, and ``continue_`` returns those that
follow: what the template puts after a reply, and the new messages. They are found as a difference of texts: a fixed
conversation is rendered with the new messages after it, and what comes after the fixed reply is tokenized. Messages
before the reply take no part, so a template may treat older turns differently from newer ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.gateway.parsers import Tools
from asyncrl_cli.gateway.replies import ReplyFormat
from asyncrl_cli.gateway.reply_stream import FieldStream
from asyncrl_cli.records.prompt import ChatError, Message, normalized
from asyncrl_cli.rollout.response_text import decoder

_FIXED_REPLY = "the-reply-of-before"
"""Stands for a reply while the text after it is found. Without spaces at its ends, which templates trim."""


class ChatFormat:
    def __init__(
        self,
        tokenizer: Any,
        tool_parser_name: str | None = None,
        reasoning_parser_name: str | None = None,
        *,
        end_tokens: frozenset[int] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        shows_special: bool = False,
    ) -> None:
        """``tokenizer``: a transformers tokenizer. ``tool_parser_name``, ``reasoning_parser_name``: as
        ``rollout.tool_parser`` and ``rollout.reasoning_parser``. ``end_tokens``: the model's
        (``response_text.end_tokens``); None for the tokenizer's own alone. ``template_kwargs``: as
        ``model.chat_template_kwargs``. ``shows_special``: ``task.special_tokens`` is ``shown``.

        Raises ``ParserError``. A format of vLLM's own imports vLLM (12 s).
        """
        self._tokenizer = tokenizer
        self.template_kwargs: Mapping[str, Any] = template_kwargs or {}
        self._template = ChatTemplate(tokenizer, template_kwargs)
        self.end_tokens = frozenset({tokenizer.eos_token_id} - {None}) if end_tokens is None else end_tokens
        """Token ids at which engines end a reply; the reply keeps the one that it ended with."""
        self._replies = ReplyFormat(
            tokenizer,
            tool_parser_name,
            reasoning_parser_name,
            end_tokens=self.end_tokens,
            template_kwargs=self.template_kwargs,
            prompt_end=cache(self._prompt_end),
            shows_special=shows_special,
        )
        self._response_text = decoder(tokenizer, self.end_tokens, shows_special)
        self.vocabulary: int = 1 + max(tokenizer.get_vocab().values())
        """Token ids are below this."""
        self.token_text = lru_cache(maxsize=2**16)(lambda token: self.decode([token]))
        self.longest_token: int = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token: a text has at least its length over this of tokens."""

    def render(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """A complete prompt, with the beginning of the requested reply. Raises ``ChatError``."""
        return self.encode(self._template.text(messages, tools, reply=True))

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

        Raises ``ChatError`` when the template refuses the messages, or renders the end of a reply differently when
        more follows.
        """
        text = self._template.text
        question: Message = {"role": "user", "content": "?"}
        fixed: dict[str, Any] = {"role": "assistant", "content": _FIXED_REPLY}
        before = text([question, fixed], tools)
        turn_end = _after(before, _FIXED_REPLY)
        if calls := (normalized(reply) if reply else {}).get("tool_calls"):
            fixed = fixed | {"tool_calls": calls[:1] if self._template.abilities().one_call else calls}
            before = text([question, fixed], tools)
        full = text([question, fixed, *messages], tools, reply=True)
        if _FIXED_REPLY in before:
            before, full = _after(before, _FIXED_REPLY), _after(full, _FIXED_REPLY)
        if not before.endswith(turn_end) or not full.startswith(before):
            raise ChatError("the chat template renders a turn differently when others follow")
        ids = self.encode(turn_end + full[len(before) :])
        if last_token not in self.end_tokens or not ids:
            return ids
        # Without an end of turn in the template, the first token begins the next message (GLM's <|user|>): it goes only
        # if the model has sampled the same one.
        ends_twice = ids[0] == last_token or (turn_end and ids[0] in self.end_tokens)
        return ids[1:] if ends_twice else ids

    def parse(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        tools: Tools | None = None,
        stop: Sequence[str] = (),
    ) -> Message:
        """The assistant message that ``token_ids`` are, in OpenAI's shape; with ``reasoning_content`` and
        ``tool_calls`` if it has any.

        The ids of the calls follow from the tokens before and in the reply: equal tokens give equal ids.
        """
        reasoning, content, calls = self._replies.parse(token_ids, tools, stop)
        message: dict[str, Any] = {"role": "assistant"}
        if reasoning:
            message["reasoning_content"] = reasoning
        if not calls:
            return message | {"content": content}
        origin = np.asarray([*prompt_ids, *token_ids], np.int32).tobytes()
        message["content"] = content or None
        message["tool_calls"] = [
            {
                # Nine letters and digits is what the strictest template asks for.
                "id": hashlib.blake2b(origin, salt=index.to_bytes(4, "big")).hexdigest()[:9],
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
        return message

    def stream(self, tools: Tools | None, stop: Sequence[str]) -> FieldStream:
        """Turns the tokens of a reply into parts of the message that ``parse`` makes of them."""
        return self._replies.stream(tools, stop)

    def encode(self, text: str, begins: bool = False) -> list[int]:
        """A text's token ids; ``begins``: a sequence begins with it, so with the tokenizer's first token, if any.

        Raises ``ChatError`` for text that is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ChatError(f"the text is not Unicode: {error}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=begins)["input_ids"]
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of token ids as engines decode it; ``special``: with all special tokens."""
        if special:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return self._response_text(ids)

    def _prompt_end(self) -> str:
        """What the template puts between the last message and a reply."""
        question: list[Message] = [{"role": "user", "content": "?"}]
        try:
            before, full = self._template.text(question), self._template.text(question, reply=True)
        except ChatError:
            return ""  # the prompts of such a model are text
        return full.removeprefix(before)


def _after(text: str, mark: str) -> str:
    _, found, rest = text.partition(mark)
    if not found:
        raise ChatError("the chat template omits a reply's text")
    return rest
