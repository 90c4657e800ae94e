"""The sequence whose log-probs prove which weights an engine serves."""

from __future__ import annotations

from typing import Any

PROBE_TOKENS = 24
PROBE_TEXT = "Tom has 3 apples and buys 14 more. How many apples does he have now? 3 + 14 = 17, so he has 17 apples.\n"
"""Ordinary text: the ids of special tokens, such as placeholders of images, ask for inputs that are not there."""


def probe_ids(tokenizer: Any, vocabulary: int, length: int) -> tuple[int, ...]:
    """``length`` token ids below ``vocabulary``, the same at every call: the probe text, as often as it takes.

    Raises ``ValueError`` when the tokenizer finds no token in it.
    """
    text: list[int] = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    known = [token for token in text if token < vocabulary]
    if not known:
        raise ValueError("the model's tokenizer finds no token of the model in an English text")
    return tuple((known * (length // len(known) + 1))[:length])
