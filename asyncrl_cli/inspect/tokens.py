"""A recorded rollout as tokens that can be coloured: text (printable), log-prob and weight version of each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.core.terminal import printable
from asyncrl_cli.inspect.decoding import Decoder
from asyncrl_cli.journal.queries import RolloutRecord
from asyncrl_cli.records.generation import CONTEXT, sequence_of
from asyncrl_cli.records.prompt import Prompt

REFERENCE_SHOWN = 600
"""Characters of a reference answer."""


@dataclass(frozen=True, slots=True)
class TokenShown:
    """A token's text, the log-prob (nats) it was sampled with and the version that sampled it; both None where it was
    given. ``age`` counts the versions of this rollout from its oldest, 0."""

    text: str
    logprob: float | None
    version: int | None
    age: int

    @property
    def surprise(self) -> float:
        """1 - probability: 0 for a token that was certain, or given."""
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
        TokenShown(piece, None, None, 0) if version == CONTEXT else TokenShown(piece, logprob, version, ages[version])
        for piece, logprob, version in zip(map(printable, pieces), logprobs, versions, strict=False)
    )
    return shown, max(0, len(ids) - limit)


def prompt_text(prompt: Prompt) -> str:
    """A prompt as text; a chat's messages with their roles."""
    return content_text(prompt.content)


def content_text(content: Any) -> str:
    """The same, of a prompt's content, whatever a file says that it is."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join(
        f"{message.get('role', '?')}: {message.get('content') or ''}" if isinstance(message, Mapping) else str(message)
        for message in content
    )


def reference_text(fields: Mapping[str, Any]) -> str:
    """The right answer, as far as a prompt's fields have it: ``answer``, or else all of them."""
    known = fields.get("answer", fields)
    text = known if isinstance(known, str) else json.dumps(known, default=str, ensure_ascii=False) if known else ""
    return text if len(text) <= REFERENCE_SHOWN else f"{text[:REFERENCE_SHOWN]} …"
