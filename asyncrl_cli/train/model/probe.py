"""The probe: tokens that prove by their log-probs which weights an engine serves (decision 0003).

They come from the task's prompts, where the weights must be right, and which use the experts that the task needs. If a
task has no prompts, as with episodes, the probe is ordinary text. Special tokens such as placeholders of images would
need inputs that are missing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

PROBE_TOKENS = 96
"""The longest probe."""
LEAST_TOKENS = 24
"""A shorter probe is extended by ordinary text, because a median over few tokens says little."""
PROMPTS, TOKENS_OF_EACH = 8, 24
"""Number of prompts, and most tokens from each."""
TEXT = "Tom has 3 apples and buys 14 more. How many apples does he have now? 3 + 14 = 17, so he has 17 apples.\n"


def prompt_tokens(prompts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return at most ``PROBE_TOKENS`` token ids of the first prompts, one after another; empty without prompts.

    A common beginning of all prompts, such as a template's system message, is skipped: models trained on it give it a
    probability near 1 under any weights.
    """
    first_prompts = [tuple(ids) for ids in islice(prompts, PROMPTS)]
    columns = zip(*first_prompts, strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    if any(len(ids) == shared for ids in first_prompts):  # for example a single prompt, or equal prompts
        shared = 0
    joined = [token for ids in first_prompts for token in ids[shared : shared + TOKENS_OF_EACH]]
    return tuple(joined[:PROBE_TOKENS])


def probe_ids(prompt_ids: Sequence[int], tokenizer: Any, vocabulary: int, length: int) -> tuple[int, ...]:
    """Return at most ``length`` ids below ``vocabulary``: ``prompt_ids``, followed by ordinary text if these are few.

    Deterministic. Raises ``ValueError`` when the tokenizer finds no token in an English text.
    """
    ids = [token for token in prompt_ids if token < vocabulary]
    if len(ids) < LEAST_TOKENS:
        text: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        text_ids = [token for token in text if token < vocabulary]
        if not text_ids:
            raise ValueError("the model's tokenizer finds no token of the model in an English text")
        missing_tokens = LEAST_TOKENS - len(ids)
        ids += (text_ids * (missing_tokens // len(text_ids) + 1))[:missing_tokens]
    return tuple(ids[:length])
