"""Decodes recorded token ids with the tokenizer of the run's engines. Tokens have their log-probs and weight versions.

Needs only the ``tokenizers`` library. Invariant: the joined texts that ``split_text`` returns are the text of all ids,
even if a boundary splits a character or a token's text depends on the previous token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.core.terminal import printable
from asyncrl_cli.inspect.resolved import resolved_spec, value_at
from asyncrl_cli.journal.queries import RolloutRecord
from asyncrl_cli.records.generation import CONTEXT, sequence_of
from asyncrl_cli.runs.directory import RunDirectory

PRECEDING = 8
"""Number of previous tokens that may change a token's text. UTF-8 characters have at most four bytes."""
REPLACEMENT = "\ufffd"
"""A decoder's text for bytes that are not (yet) a character."""


class Decoder:
    """Decodes token ids, including special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: a ``tokenizers.Tokenizer``."""
        self._tokenizer = tokenizer

    def split_text(self, ids: Sequence[int], ends: Sequence[int]) -> list[str]:
        """Return the text of all ids, split at ascending token indices, the last of them ``len(ids)``.

        A character that spans several tokens belongs to the part that completes it.
        """
        texts, start = [], 0
        for end in ends:
            preceding_ids = list(ids[max(0, start - PRECEDING) : start])
            preceding_text = self._decode(preceding_ids).rstrip(REPLACEMENT) if preceding_ids else ""
            text = self._decode([*preceding_ids, *ids[start:end]])[len(preceding_text) :]
            texts.append(text if end == len(ids) else text.rstrip(REPLACEMENT))
            start = end
        return texts

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return self.split_text(ids, range(1, len(ids) + 1))

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def open_decoder(run: RunDirectory) -> Decoder | None:
    """Open the decoder for a run's tokens. None if neither its folder nor its model has a ``tokenizer.json``."""
    folders = [run.model_stub]
    saved = value_at(resolved_spec(run), "model.path")
    if isinstance(saved, str):  # engines use a saved model from its folder, so there is no model stub
        folders.append(Path(saved))
    for path in (folder / "tokenizer.json" for folder in folders):
        if path.is_file():
            from tokenizers import Tokenizer

            try:
                return Decoder(Tokenizer.from_file(str(path)))
            except Exception:  # the library has no narrower type for unreadable files
                continue
    return None


REFERENCE_SHOWN = 600
"""Largest number of characters of a reference answer."""


@dataclass(frozen=True, slots=True)
class TokenShown:
    """A token's text, its log-prob (nats) and the weight version that sampled it; both are None for context.

    ``age`` counts the versions in the rollout, from 0 for the oldest.
    """

    text: str
    logprob: float | None
    version: int | None
    age: int

    @property
    def surprise(self) -> float:
        """1 - probability: 0 for a certain token, and for context."""
        if self.logprob is None or math.isnan(self.logprob):
            return 0.0
        return 1.0 - math.exp(min(0.0, self.logprob))


def tokens_of(rollout: RolloutRecord, decoder: Decoder | None, limit: int) -> tuple[tuple[TokenShown, ...], int]:
    """Return the first ``limit`` tokens of a rollout's first sequence, and the number of further tokens.

    Without a decoder, the text of a token is its id.
    """
    main = [segment for segment in rollout.segments if sequence_of(segment.rollout_id)[-1] == 0]
    ids = [int(token) for segment in main for token in segment.ids]
    logprobs = [float(value) for segment in main for value in segment.logprobs]
    versions = [segment.version for segment in main for _ in segment.ids]
    token_texts = [f"{token} " for token in ids[:limit]] if decoder is None else decoder.token_texts(ids[:limit])
    ages = {version: age for age, version in enumerate(sorted(set(versions) - {CONTEXT}))}
    tokens = tuple(
        TokenShown(token_text, logprob=None, version=None, age=0)
        if version == CONTEXT
        else TokenShown(token_text, logprob=logprob, version=version, age=ages[version])
        for token_text, logprob, version in zip(map(printable, token_texts), logprobs, versions, strict=False)
    )
    return tokens, max(0, len(ids) - limit)


def content_text(content: Any) -> str:
    """Return a prompt's content as text: a chat's messages with their roles, images by their digests. ``content`` may
    be any JSON value."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join(
        f"{message.get('role', '?')}: {message_text(message.get('content') or '')}"
        if isinstance(message, Mapping)
        else str(message)
        for message in content
    )


def message_text(content: Any) -> str:
    """Return a message's content as text."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(
        f"[image {block['image']}]"
        if isinstance(block, Mapping) and block.get("type") == "image"
        else str(block.get("text", block) if isinstance(block, Mapping) else block)
        for block in content
    )


def reference_text(fields: Mapping[str, Any]) -> str:
    """Return the right answer: a prompt's field ``answer``, or all of its fields if there is no ``answer``."""
    answer = fields.get("answer", fields)
    text = answer if isinstance(answer, str) else json.dumps(answer, default=str, ensure_ascii=False) if answer else ""
    return text if len(text) <= REFERENCE_SHOWN else f"{text[:REFERENCE_SHOWN]} …"
