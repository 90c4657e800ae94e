"""Recorded token ids as text: decoded with the tokenizer that the run's engines start from, and token by token with
log-prob and weight version, to be coloured.

Needs the ``tokenizers`` library alone. Invariant: the parts that ``parts`` returns make up the text of all ids, also
where a boundary splits a character or where a token's text depends on the one before it.
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
"""Tokens before one that its text may depend on: no character of UTF-8 has more than four bytes."""
REPLACEMENT = "\ufffd"
"""Shown by a decoder for bytes that are not (yet) a character."""


class Decoder:
    """A tokenizer, for reading only. Special tokens are shown."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: a ``tokenizers.Tokenizer``."""
        self._tokenizer = tokenizer

    def parts(self, ids: Sequence[int], ends: Sequence[int]) -> list[str]:
        """The text of all ids, split at token indices that rise to ``len(ids)``.

        A character that tokens share belongs to the part that completes it.
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
    """The decoder for a run's tokens; None when neither its folder nor the model it names has a ``tokenizer.json``."""
    folders = [run.model_stub]
    saved = value_at(resolved_spec(run), "model.path")
    if isinstance(saved, str):  # a saved model is used from its own folder, and has no model stub
        folders.append(Path(saved))
    for path in (folder / "tokenizer.json" for folder in folders):
        if path.is_file():
            from tokenizers import Tokenizer

            try:
                return Decoder(Tokenizer.from_file(str(path)))
            except Exception:  # the library raises nothing narrower for a file that it cannot read
                continue
    return None


REFERENCE_SHOWN = 600
"""Characters of a reference answer."""


@dataclass(frozen=True, slots=True)
class TokenShown:
    """A token's text, the log-prob (nats) it was sampled with and the version that sampled it; both None for context.
    ``age`` counts the versions of this rollout from its oldest, 0."""

    text: str
    logprob: float | None
    version: int | None
    age: int

    @property
    def surprise(self) -> float:
        """1 - probability: 0 for a token that was certain, or context."""
        if self.logprob is None or math.isnan(self.logprob):
            return 0.0
        return 1.0 - math.exp(min(0.0, self.logprob))


def tokens_of(rollout: RolloutRecord, decoder: Decoder | None, limit: int) -> tuple[tuple[TokenShown, ...], int]:
    """The first ``limit`` tokens of a rollout's first sequence, and how many more it has; ids without a decoder."""
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
    """A message's content as text, with the digests of its images."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(
        f"[image {part['image']}]"
        if isinstance(part, Mapping) and part.get("type") == "image"
        else str(part.get("text", part) if isinstance(part, Mapping) else part)
        for part in content
    )


def content_text(content: Any) -> str:
    """A prompt's content as text; a chat's messages with their roles. It may be anything that a file has there."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join(
        f"{message.get('role', '?')}: {message_text(message.get('content') or '')}"
        if isinstance(message, Mapping)
        else str(message)
        for message in content
    )


def images_of(group: GroupRecord) -> dict[Image, str]:
    """The images of a group's prompt and of its rollouts, each with a line about its file, size and tokens."""
    placed = [*group.images, *(placed for rollout in group.rollouts for placed in rollout.images)]
    lengths = {one.image: one.length for one in reversed(placed) if one.length}
    found = {}
    for image in dict.fromkeys((*group.prompt.images, *(one.image for one in placed))):
        width, height = image.decoded().size
        tokens = f", {counted(lengths[image], 'token')}" if image in lengths else ""
        found[image] = f"{image.file_name}: {width} x {height} pixels{tokens}, {len(image.data):,} bytes"
    return found


def reference_text(fields: Mapping[str, Any]) -> str:
    """The right answer, as far as a prompt's fields have it: ``answer``, or else all of them."""
    known = fields.get("answer", fields)
    text = known if isinstance(known, str) else json.dumps(known, default=str, ensure_ascii=False) if known else ""
    return text if len(text) <= REFERENCE_SHOWN else f"{text[:REFERENCE_SHOWN]} …"
