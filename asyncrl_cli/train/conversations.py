"""Turns rows of ``model.warm_start.data`` into token ids, and marks the learned ones.

Invariant: a learned reply has the same tokens as in a run. Text is tokenized in the same pieces as there: the prompt as
the template renders it before the reply, then the reply up to its end token. A template that renders these pieces
differently within the whole conversation is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.chat_template import ChatTemplate, chat_of
from asyncrl_cli.data.images import ImageTokens
from asyncrl_cli.data.rows import value_at
from asyncrl_cli.data.sources import read_source, row_location
from asyncrl_cli.data.special_tokens import plain_ids
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.prompt import ChatError, Prompt, image_digests, to_json
from asyncrl_cli.spec.inputs import WarmStart

DATA = "model.warm_start.data"


class Example(NamedTuple):
    """Token ids, and for each whether it is learned; the first token never is."""

    ids: list[int]
    learned: list[bool]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to learn from. ``locate`` returns a row's place for error messages; rows are counted from 0."""

    prompts: Sequence[Prompt]
    locate: Callable[[int], str]

    @classmethod
    def read(cls, spec: WarmStart, base: Path) -> Rows:
        """Read the rows of ``spec.data``; paths and modules are relative to ``base``. Raises ``DataError``."""
        assert spec.data is not None
        prompts = read_source(spec.data, "train", base)
        return cls(prompts, partial(row_location, spec.data, base, DATA, prompts))

    def digest(self) -> str:
        """Return a digest of all rows in their order."""
        found = hashlib.sha256()
        for prompt in self.prompts:
            found.update(json.dumps(to_json(prompt), sort_keys=True).encode())
        return found.hexdigest()


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """Encodes rows with a model's tokenizer and template. ``ends``: tokens at which engines end a reply.
    ``texts_are_chats``: text prompts become user messages. ``images`` encodes texts with images."""

    tokenizer: Any
    template: ChatTemplate
    texts_are_chats: bool
    ends: frozenset[int]
    spec: WarmStart
    images: ImageTokens = field(default_factory=partial(ImageTokens, "", 0, 0))

    def encode(self, prompt: Prompt) -> Example:
        """Return the tokens up to the last learned one. Raises ``ChatError`` for a row without a reply, or if the
        template does not render it as in a run."""
        ids: list[int] = []
        learned: list[bool] = []
        placed: list[PlacedImage] = []
        known = {image.digest: image for image in prompt.images}
        pieces = self._pieces(prompt)
        for number, (context, templated, reply, digests) in enumerate(pieces, start=1):
            if digests:
                before, own = self.images.encode(context, [known[digest] for digest in digests])
                placed += [replace(one, offset=len(ids) + one.offset) for one in own]
            else:
                before = self.template.encode([context])[0] if templated else plain_ids(self.tokenizer, [context])[0]
            tokens = self.template.encode([reply])[0]
            sampled = until_end(tokens, self.ends)
            if sampled is None and number < len(pieces):
                raise ChatError("the chat template ends a reply with another token than the model; use train_on: last")
            sampled = sampled or [*tokens, self.tokenizer.eos_token_id]
            after = tokens[len(sampled) :] if number < len(pieces) else []
            ids += [*before, *sampled, *after]
            learned += [False] * len(before) + [True] * len(sampled) + [False] * len(after)
        if learned[0]:
            raise ChatError("there is no text before the reply")
        return Example(ids, learned, tuple(placed))

    def special_text(self, prompt: Prompt) -> str:
        """Return the first special token in the row's messages that stays text; "" if there is none."""
        messages, tools, _ = chat_of(prompt)
        reply = prompt.fields.get(self.spec.response_column or "", "")
        if isinstance(prompt.content, str) and not self.texts_are_chats:
            return ""
        return self.template.special_text([*messages, {"role": "assistant", "content": reply}], tools)

    def _pieces(self, prompt: Prompt) -> list[tuple[str, bool, str, list[str]]]:
        """For each learned reply: the text before it, whether the template wrote that, the reply with its end, and the
        digests of the images in the text."""
        messages, tools, variables = chat_of(prompt)
        if (column := self.spec.response_column) is not None:
            reply = value_at(prompt.fields, column, None)
            if not isinstance(reply, str) or not reply:
                raise ChatError(f"the row has no text in the column `{column}`")
            if isinstance(prompt.content, str) and not self.texts_are_chats:
                return [(prompt.content, False, reply, [])]
            messages = (*messages, {"role": "assistant", "content": reply})
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not replies or replies[-1] != len(messages) - 1 or len(messages) == 1:
            raise ChatError("the conversation does not end with an assistant's message after another message")
        learned = replies if self.spec.train_on == "all" else replies[-1:]
        if any(index - 1 in replies for index in learned):
            raise ChatError("two assistant messages follow one another: join them")
        template = self.template.with_variables(variables)
        full = template.text(messages, tools)
        pieces, at, first = [], 0, 0
        for index in learned:
            before = template.text(messages[:index], tools, reply=True)
            through = template.text(messages[: index + 1], tools)
            if not (through.startswith(before) and full.startswith(through) and at <= len(before)):
                advice = ": use train_on: last" if index < len(messages) - 1 else ""
                fault = f"the chat template renders the first {index} messages differently once later ones are there"
                raise ChatError(fault + advice)
            digests = image_digests(messages[first:index])
            pieces.append((full[at : len(before)], True, full[len(before) : len(through)], digests))
            at, first = len(through), index + 1
        return pieces


def until_end(tokens: Sequence[int], ends: frozenset[int]) -> list[int] | None:
    """Return a reply's tokens up to its end token; None if there is none. A template's text after a turn's end, often a
    newline, is never sampled, because engines stop at the end token."""
    end = next((index for index, token in enumerate(tokens) if token in ends), None)
    return None if end is None else list(tokens[: end + 1])


def encode_rows(rows: Rows, encoder: RowEncoder, max_length: int) -> tuple[list[Example], int]:
    """Return the examples of at most ``max_length`` tokens, and the number of longer rows.

    Raises ``DataError`` for a row that cannot be encoded, with its place, and if no row is short enough.
    """
    examples = []
    for index, prompt in enumerate(rows.prompts):
        example = encode_row(rows, index, prompt, encoder)
        if len(example.ids) <= max_length:
            examples.append(example)
    if not examples:
        message = f"all {len(rows.prompts):,} rows are longer than model.max_length {max_length}"
        raise DataError(message, location=DATA, hint="raise model.max_length, or shorten the rows")
    return examples, len(rows.prompts) - len(examples)


def encode_row(rows: Rows, index: int, prompt: Prompt, encoder: RowEncoder) -> Example:
    """Encode row ``index``. Raises ``DataError`` with its place."""
    try:
        return encoder.encode(prompt)
    except ChatError as error:
        hint = "correct or remove the row; with a prompt and a reply in two columns, set response_column"
        raise DataError(str(error), location=rows.locate(index), hint=hint) from error
