"""The tokens that prove, by their log-probs, which weights an engine serves (decision 0003).

They come from the task's own prompts: the model must be right there, and a mixture-of-experts model uses the experts
for them. Where a task has no prompts, as with episodes, it is ordinary text. Special tokens such
as placeholders of images would need inputs that are missing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

PROBE_TOKENS = 96
"""The longest probe."""
LEAST_TOKENS = 24
"""A shorter one is continued by ordinary text: a median of few tokens says little."""
PROMPTS, TOKENS_OF_EACH = 8, 24
"""From so many prompts, so many tokens at most."""
TEXT = "Tom has 3 apples and buys 14 more. How many apples does he have now? 3 + 14 = 17, so he has 17 apples.\n"


def prompt_tokens(prompts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """At most ``PROBE_TOKENS`` token ids of the first prompts, one after another; empty without prompts.

    What all of them begin with, such as a template's system message, is skipped: a model that was trained on it gives
    it a probability near 1 whatever its weights are.
    """
    chosen = [tuple(ids) for ids in islice(prompts, PROMPTS)]
    columns = zip(*chosen, strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    if any(len(ids) == shared for ids in chosen):  # such as one prompt, or equal ones
        shared = 0
    joined = [token for ids in chosen for token in ids[shared : shared + TOKENS_OF_EACH]]
    return tuple(joined[:PROBE_TOKENS])


def probe_ids(prompt_ids: Sequence[int], tokenizer: Any, vocabulary: int, length: int) -> tuple[int, ...]:
    """At most ``length`` ids below ``vocabulary``: ``prompt_ids``, and ordinary text after too few of them.

    The same at every call. Raises ``ValueError`` when the tokenizer finds no token in an English text.
    """
    own = [token for token in prompt_ids if token < vocabulary]
    if len(own) < LEAST_TOKENS:
        text: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        known = [token for token in text if token < vocabulary]
        if not known:
            raise ValueError("the model's tokenizer finds no token of the model in an English text")
        missing = LEAST_TOKENS - len(own)
        own += (known * (missing // len(known) + 1))[:missing]
    return tuple(own[:length])
