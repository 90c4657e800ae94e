"""Turns rows of ``model.warm_start.data`` into token ids, and marks the learned ones.

Invariant: a learned reply has the same tokens as in a run. Text is tokenized in the same pieces as there: the prompt as
the template renders it before the reply, then the reply up to its end token. A template that renders these pieces
differently within the whole conversation is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.chat_template import chat_of
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.rows import value_at
from asyncrl_cli.data.sources import read_source, row_location
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.prompt import ChatError, Prompt, image_digests
from asyncrl_cli.records.training import SupervisedRow
from asyncrl_cli.spec.inputs import WarmStart

DATA = "model.warm_start.data"


class Rows(NamedTuple):
    """The rows to learn from. ``locate`` returns a row's place for error messages; rows are counted from 0."""

    prompts: Sequence[Prompt]
    locate: Callable[[int], str]

    @classmethod
    def from_spec(cls, warm_start: WarmStart, base: Path) -> Rows:
        """Read the rows of ``warm_start.data``; paths and modules are relative to ``base``. Raises ``DataError``."""
        prompts = read_source(warm_start.data, "train", base)
        return cls(prompts, partial(row_location, DATA, prompts))


class _Reply(NamedTuple):
    """A learned reply, and the text before it since the last learned reply."""

    context: str
    is_templated: bool  # the chat template wrote ``context``
    text: str  # with the template's end of the turn
    image_digests: list[str]  # in ``context``


class RowEncoder(NamedTuple):
    """Encodes rows as ``prompts`` encodes prompts. ``ends``: tokens at which engines end a reply."""

    prompts: PromptEncoder
    ends: frozenset[int]
    warm_start: WarmStart

    def encode(self, prompt: Prompt) -> SupervisedRow:
        """Return the tokens up to the last learned one. Raises ``ChatError`` for a row without a reply, or if the
        template does not render it as in a run."""
        ids: list[int] = []
        learned: list[bool] = []
        row_images: list[PlacedImage] = []
        images = {image.digest: image for image in prompt.images}
        replies = self._replies(prompt)
        for reply in replies:
            context_images = [images[digest] for digest in reply.image_digests]
            context, placed_images = self.prompts.tokenized(
                reply.context, context_images, is_templated=reply.is_templated
            )
            row_images += [replace(image, offset=len(ids) + image.offset) for image in placed_images]
            turn, _ = self.prompts.tokenized(reply.text)
            # A template's text after a turn's end, often a newline, is never sampled: engines stop at the end token.
            end = next((index + 1 for index, token in enumerate(turn) if token in self.ends), None)
            if end is None and reply is not replies[-1]:
                raise ChatError("the chat template ends a reply with another token than the model; use train_on: last")
            sampled = [*turn, self.prompts.tokenizer.eos_token_id] if end is None else turn[:end]
            template_end = turn[len(sampled) :] if reply is not replies[-1] else []
            ids += [*context, *sampled, *template_end]
            learned += [False] * len(context) + [True] * len(sampled) + [False] * len(template_end)
        if learned[0]:
            raise ChatError("there is no text before the reply")
        return SupervisedRow(tuple(ids), tuple(learned), tuple(row_images))

    def _replies(self, prompt: Prompt) -> list[_Reply]:
        messages, tools, variables = chat_of(prompt)
        if (column := self.warm_start.response_column) is not None:
            reply = value_at(prompt.fields, column, None)
            if not isinstance(reply, str) or not reply:
                raise ChatError(f"the row has no text in the column `{column}`")
            if not self.prompts.is_templated(prompt):
                return [_Reply(str(prompt.content), False, reply, [])]
            messages = (*messages, {"role": "assistant", "content": reply})
        indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not indices or indices[-1] != len(messages) - 1 or len(messages) == 1:
            raise ChatError("the conversation does not end with an assistant's message after another message")
        learned_indices = indices if self.warm_start.train_on == "all" else indices[-1:]
        if any(index - 1 in indices for index in learned_indices):
            raise ChatError("two assistant messages follow one another: join them")
        template = self.prompts.template.with_variables(variables)
        full = template.text(messages, tools)
        replies: list[_Reply] = []
        end = first_message = 0
        for index in learned_indices:
            prompt_text = template.text(messages[:index], tools, reply=True)
            through = template.text(messages[: index + 1], tools)
            if not (through.startswith(prompt_text) and full.startswith(through) and end <= len(prompt_text)):
                advice = ": use train_on: last" if index < len(messages) - 1 else ""
                fault = f"the chat template renders the first {index} messages differently once later ones are there"
                raise ChatError(fault + advice)
            digests = image_digests(messages[first_message:index])
            replies.append(_Reply(full[end : len(prompt_text)], True, full[len(prompt_text) : len(through)], digests))
            end, first_message = len(through), index + 1
        return replies


def encode_rows(rows: Rows, encoder: RowEncoder, max_length: int) -> list[SupervisedRow]:
    """Return the rows of at most ``max_length`` tokens.

    Raises ``DataError`` for a row that cannot be encoded, with its place, and if no row is short enough.
    """
    encoded = (encode_row(rows, index, encoder) for index in range(len(rows.prompts)))
    if fitting := [row for row in encoded if len(row.ids) <= max_length]:
        return fitting
    message = f"all {len(rows.prompts):,} rows are longer than model.max_length {max_length}"
    raise DataError(message, location=DATA, hint="raise model.max_length, or shorten the rows")


def encode_row(rows: Rows, index: int, encoder: RowEncoder) -> SupervisedRow:
    """Encode row ``index``. Raises ``DataError`` with its place."""
    try:
        return encoder.encode(rows.prompts[index])
    except ChatError as error:
        hint = "correct or remove the row; with a prompt and a reply in two columns, set response_column"
        raise DataError(str(error), location=rows.locate(index), hint=hint) from error
