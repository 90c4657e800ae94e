"""Conversations as tokens: one model's tokenizer, chat template and parsers (decision 0017).

By default a conversation is rendered once, when it begins. Then its tokens are fixed, and ``continue_`` returns only
the next ones: the template's text after a reply, and the new messages. It finds them as a difference of texts: it
renders a placeholder conversation followed by the new messages, and tokenizes the text after the placeholder reply.
Earlier messages are not rendered again, so a template may treat older turns differently from newer ones.

A reply's tokens become a message with reasoning, content and tool calls, complete or while they are generated. Unless
``task.special_tokens`` is ``shown``, special tokens are removed, except the marks of a message's parts. asyncrl knows
the marks of the formats that it parses itself. vLLM's parsers get the text with all special tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.data.images import ImageTokens
from asyncrl_cli.data.special_tokens import plain_ids
from asyncrl_cli.gateway.parsers import (
    FORMS,
    HERMES,
    HERMES_MARKS,
    ToolParser,
    Tools,
    hermes,
    vllm_reasoning_parser,
    vllm_tool_parser,
)
from asyncrl_cli.gateway.reply_stream import FieldStream, Form, divided
from asyncrl_cli.records.images import Image, PlacedImage
from asyncrl_cli.records.prompt import ChatError, Message, image_digests, normalized
from asyncrl_cli.rollout.response_text import cut, decoder, special_tokens

_FIXED_REPLY = "the-reply-of-before"
"""The placeholder reply. It has no spaces at its ends, because templates trim them."""


class Tokens(NamedTuple):
    """Token ids, and the positions of images in them."""

    ids: list[int]
    images: tuple[PlacedImage, ...]


class ChatFormat:
    def __init__(
        self,
        tokenizer: Any,
        tool_parser_name: str | None = None,
        reasoning_parser_name: str | None = None,
        *,
        end_tokens: frozenset[int] | None = None,
        template: ChatTemplate | None = None,
        shows_special: bool = False,
        images: ImageTokens | None = None,
        renders_history: bool = False,
    ) -> None:
        """``tokenizer``: a transformers tokenizer. ``tool_parser_name``, ``reasoning_parser_name``:
        ``rollout.tool_parser`` and ``rollout.reasoning_parser``. ``end_tokens``: the model's end tokens
        (``response_text.end_tokens``); by default the tokenizer's only. ``template``: by
        default the tokenizer's, without variables. ``shows_special``: ``task.special_tokens`` is ``shown``. ``images``:
        encodes messages with images. ``renders_history``: the template renders all messages of each call
        (``rollout.history``).

        Raises ``ParserError``. A parser of vLLM imports vLLM (12 s).
        """
        self._tokenizer = tokenizer
        self.renders_history = renders_history
        self._images = images or ImageTokens("", 0, 0)
        self.max_images, self.max_pixels = self._images.max_images, self._images.max_pixels
        self.check_images = self._images.check_count
        self._template = template or ChatTemplate(tokenizer)
        self.template_kwargs: Mapping[str, Any] = self._template.values
        self.end_tokens = frozenset({tokenizer.eos_token_id} - {None}) if end_tokens is None else end_tokens
        """Token ids at which engines end a reply; the reply includes its end token."""
        self._reads_tools = tool_parser_name in (None, HERMES)
        self._tools: ToolParser = hermes
        if tool_parser_name not in (None, HERMES):
            self._tools = vllm_tool_parser(tool_parser_name, tokenizer, reasoning_parser_name is not None)
        self._named_form = FORMS.get(reasoning_parser_name or "")
        self._parser_name = reasoning_parser_name
        self._reasoning = None
        if reasoning_parser_name is not None and self._named_form is None:
            self._reasoning = vllm_reasoning_parser(reasoning_parser_name, tokenizer, self.template_kwargs)
        self._special: dict[int, str] = {
            index: tokenizer.convert_ids_to_tokens(index) for index in special_tokens(tokenizer)
        }
        self._droppable = self._special.keys() & self.end_tokens if shows_special else self._special.keys()
        self._response_text = decoder(tokenizer, self.end_tokens, shows_special)
        self.vocabulary: int = 1 + max(tokenizer.get_vocab().values())
        """All token ids are smaller."""
        self.token_text = lru_cache(maxsize=2**16)(lambda token: self.decode([token]))
        self.longest_token: int = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token. A text has at least (its length / this) tokens."""

    def varied(self, variables: Mapping[str, Any], continues: bool) -> ChatFormat:
        """The format for a call with more ``variables`` for the template. ``continues``: the reply continues a message,
        so it is content without reasoning.

        Raises ``ChatError`` for a variable that the template does not read.
        """
        variant = copy(self)
        variant._template = self._template.with_variables(variables)
        variant.template_kwargs = {**self.template_kwargs, **variables}
        variant.__dict__.pop("_form", None)  # cached, and depends on the variables
        if continues:
            variant._named_form = variant._reasoning = None
        elif self._reasoning is not None and self._parser_name is not None:
            variant._reasoning = vllm_reasoning_parser(self._parser_name, self._tokenizer, variant.template_kwargs)
        _ = variant._form  # computed here, in a thread: with some variables a template may take long
        return variant

    def render(
        self, messages: Sequence[Message], tools: Tools | None = None, images: Mapping[str, Image] | None = None
    ) -> Tokens:
        """Render a complete prompt: up to the beginning of the requested reply, or to the end of a message that the
        reply continues. ``images``: the messages' images, by digest. Raises ``ChatError``."""
        return self._encode_with(self._template.text(messages, tools, reply=True), messages, images)

    def continue_(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        last_token: int | None,
        reply: Message | None = None,
        images: Mapping[str, Image] | None = None,
    ) -> Tokens:
        """The tokens between a reply that ends with ``last_token`` and the next reply, with ``messages`` in between.

        They begin with the template's end of a turn, unless the model ended the turn itself: there are never two end
        tokens in a row. ``reply``: the reply as a message, because templates look back at its tool calls. ``images``:
        the messages' images, by digest.

        Raises ``ChatError`` if the template refuses the messages, or renders the end of a reply differently when
        messages follow.
        """
        text = self._template.text
        question: Message = {"role": "user", "content": "?"}
        placeholder_reply: dict[str, Any] = {"role": "assistant", "content": _FIXED_REPLY}
        reply_text = text([question, placeholder_reply], tools)
        turn_end = _text_after(reply_text, _FIXED_REPLY)
        if calls := (normalized(reply) if reply else {}).get("tool_calls"):
            placeholder_reply = placeholder_reply | {
                "tool_calls": calls[:1] if self._template.abilities.one_call else calls
            }
            reply_text = text([question, placeholder_reply], tools)
            if not reply_text.endswith(turn_end) and last_token is not None and last_token in self.end_tokens:
                # A template may end calls with another token than texts (gpt-oss).
                _, end_mark, space = reply_text.rpartition(self.decode([last_token], special=True))
                turn_end = end_mark + space if end_mark and not space.strip() else turn_end
        next_text = text([question, placeholder_reply, *messages], tools, reply=True)
        if _FIXED_REPLY in reply_text:
            reply_text, next_text = _text_after(reply_text, _FIXED_REPLY), _text_after(next_text, _FIXED_REPLY)
        if not reply_text.endswith(turn_end) or not next_text.startswith(reply_text):
            raise ChatError("the chat template renders a turn differently when other turns follow")
        ids, places = self._encode_with(turn_end + next_text[len(reply_text) :], messages, images)
        if last_token not in self.end_tokens or not ids:
            return Tokens(ids, places)
        # If the template has no end of turn, the first token begins the next message (GLM's <|user|>). It is removed
        # only if the model sampled the same token.
        ends_twice = ids[0] == last_token or (turn_end and ids[0] in self.end_tokens)
        if not ends_twice:
            return Tokens(ids, places)
        return Tokens(ids[1:], tuple(replace(place, offset=place.offset - 1) for place in places))

    def parse(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools | None = None, stop: Sequence[str] = ()
    ) -> Message:
        """Parse a reply's ``token_ids`` as an assistant message in OpenAI's format, with ``reasoning_content`` and
        ``tool_calls`` if there are any.

        The ids of the calls are digests of the prompt's and the reply's tokens, so a replay gives the same ids.
        """
        dropped = self._dropped(tools)
        content = cut(self.decode([token for token in token_ids if token not in dropped], special=True), stop)
        marked = content
        if self._reasoning is not None or (tools and not self._reads_tools):  # vLLM's parsers need all marks
            has_end_token = bool(token_ids) and token_ids[-1] in self.end_tokens
            marked = cut(self.decode(token_ids[:-1] if has_end_token else token_ids, special=True), stop)
        reasoning, calls = "", tuple[tuple[str, str], ...]()
        if self._reasoning is not None:
            reasoning, content = self._reasoning(marked)
            marked = content
        elif self._form is not None:
            reasoning, content = divided(content, self._form)
            marked = divided(marked, self._form)[1]
        if tools and (tool_calls := self._tools(marked, tools)) is not None:
            content, calls = tool_calls.content, tool_calls.calls
        message: dict[str, Any] = {"role": "assistant"}
        if reasoning:
            message["reasoning_content"] = reasoning
        if not calls:
            return message | {"content": content}
        origin = np.asarray([*prompt_ids, *token_ids], np.int32).tobytes()
        message["content"] = content or None
        message["tool_calls"] = [
            {
                # The strictest template requires nine letters and digits.
                "id": hashlib.blake2b(origin, salt=index.to_bytes(4, "big")).hexdigest()[:9],
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
        return message

    def stream(self, tools: Tools | None, stop: Sequence[str]) -> FieldStream:
        """A stream that turns a reply's tokens into parts of the message that ``parse`` returns for them."""
        call_marks = HERMES_MARKS[:1] if self._reads_tools else None
        return FieldStream(
            partial(self.decode, special=True),
            stop,
            dropped=self._dropped(tools),
            form=self._form,
            calls=call_marks if tools else (),
            is_held=self._reasoning is not None,
        )

    def _encode_with(self, text: str, messages: Sequence[Message], images: Mapping[str, Image] | None) -> Tokens:
        digests = image_digests(messages)
        _check_unicode(text)
        if not digests:
            return Tokens(self._template.encode([text])[0], ())
        return Tokens(*self._images.encode(text, [(images or {})[digest] for digest in digests]))

    def encode(self, text: str) -> list[int]:
        """Tokenize a prompt without the template, with the tokenizer's begin token, if it has one.

        Raises ``ChatError`` for text that is not Unicode.
        """
        _check_unicode(text)
        return plain_ids(self._tokenizer, [text])[0]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Decode token ids as engines do; ``special``: with all special tokens."""
        if special:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return self._response_text(ids)

    @cached_property
    def _form(self) -> Form | None:
        """The marks around reasoning. None if replies have no reasoning, if the prompt closes it already, or if vLLM's
        parser reads it."""
        form = self._named_form
        if form is None or self.template_kwargs.get("enable_thinking") is False:
            return None
        question: list[Message] = [{"role": "user", "content": "?"}]
        try:
            question_text, prompt_text = self._template.text(question), self._template.text(question, reply=True)
        except ChatError:
            return form  # a model without a usable chat template gets plain text as prompts
        return None if form.closed_in(prompt_text.removeprefix(question_text)) else form

    def _dropped(self, tools: Tools | None) -> set[int]:
        """Special tokens to remove from a text: they are not marks of its parts, and the task hides them."""
        marks = [*(self._form.marks if self._form else ()), *(HERMES_MARKS if tools and self._reads_tools else ())]
        return {token for token in self._droppable if self._special[token] not in marks}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ChatError(f"the text is not Unicode: {error}") from error


def _text_after(text: str, mark: str) -> str:
    _, separator, text_after = text.partition(mark)
    if not separator:
        raise ChatError("the chat template omits a reply's text")
    return text_after
