"""Decodes recorded token ids with the tokenizer of the run's engines. Tokens have their log-probs and weight versions.

Needs only the ``tokenizers`` library. Invariant: the joined parts that ``parts`` returns are the text of all ids, even
if a boundary splits a character or a token's text depends on the previous token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.core.terminal import counted, printable
from asyncrl_cli.inspect.resolved import resolved_spec, value_at
from asyncrl_cli.journal.queries import GroupRecord, RolloutRecord
from asyncrl_cli.records.generation import CONTEXT, sequence_of
from asyncrl_cli.records.images import Image
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

    def parts(self, ids: Sequence[int], ends: Sequence[int]) -> list[str]:
        """Return the text of all ids, split at ascending token indices, the last of them ``len(ids)``.

        A character that spans several tokens belongs to the part that completes it.
        """
        texts, start = [], 0
        for end in ends:
            texts.append(self._text(ids, start, end, last=end == len(ids)))
            start = end
        return texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return self.parts(ids, range(1, len(ids) + 1))

    def _text(self, ids: Sequence[int], start: int, end: int, last: bool) -> str:
        known = list(ids[max(0, start - PRECEDING) : start])
        before = self._decode(known).rstrip(REPLACEMENT) if known else ""
        text = self._decode([*known, *ids[start:end]])
        return text[len(before) :] if last else text[len(before) :].rstrip(REPLACEMENT)

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
    pieces = [f"{token} " for token in ids[:limit]] if decoder is None else decoder.pieces(ids[:limit])
    ages = {version: age for age, version in enumerate(sorted(set(versions) - {CONTEXT}))}
    shown = tuple(
        TokenShown(piece, logprob=None, version=None, age=0)
        if version == CONTEXT
        else TokenShown(piece, logprob=logprob, version=version, age=ages[version])
        for piece, logprob, version in zip(map(printable, pieces), logprobs, versions, strict=False)
    )
    return shown, max(0, len(ids) - limit)


def message_text(content: Any) -> str:
    """Return a message's content as text, with the digests of its images."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(
        f"[image {part['image']}]"
        if isinstance(part, Mapping) and part.get("type") == "image"
        else str(part.get("text", part) if isinstance(part, Mapping) else part)
        for part in content
    )


def content_text(content: Any) -> str:
    """Return a prompt's content as text, and a chat's messages with their roles. ``content`` may be any JSON value."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join(
        f"{message.get('role', '?')}: {message_text(message.get('content') or '')}"
        if isinstance(message, Mapping)
        else str(message)
        for message in content
    )


def images_of(group: GroupRecord) -> dict[Image, str]:
    """Return the images of a group's prompt and rollouts, each with a line about its file, size and tokens."""
    placed = [*group.images, *(placed for rollout in group.rollouts for placed in rollout.images)]
    lengths = {one.image: one.length for one in reversed(placed) if one.length}
    found = {}
    for image in dict.fromkeys((*group.prompt.images, *(one.image for one in placed))):
        width, height = image.decoded().size
        tokens = f", {counted(lengths[image], 'token')}" if image in lengths else ""
        found[image] = f"{image.file_name}: {width} x {height} pixels{tokens}, {len(image.data):,} bytes"
    return found


def reference_text(fields: Mapping[str, Any]) -> str:
    """Return the right answer: a prompt's field ``answer``, or all of its fields if there is no ``answer``."""
    known = fields.get("answer", fields)
    text = known if isinstance(known, str) else json.dumps(known, default=str, ensure_ascii=False) if known else ""
    return text if len(text) <= REFERENCE_SHOWN else f"{text[:REFERENCE_SHOWN]} …"
