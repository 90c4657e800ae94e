"""The prompt record: one row of the data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set.

    ``uid`` names the row for good: it is the same in every epoch, after every restart, and whatever the order.
    ``content`` is plain text, or chat messages that the tokenizer's chat template turns into tokens.
    ``fields`` is everything else of the row; the reward function sees it and the model does not.
    """

    uid: str
    content: str | tuple[Message, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)


def prompt_from(row: Mapping[str, Any]) -> Prompt:
    """The prompt whose ``dataclasses.asdict`` went through JSON."""
    content = row["content"]
    return Prompt(row["uid"], content if isinstance(content, str) else tuple(content), row["fields"])
