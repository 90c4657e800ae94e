"""The text of a response (decision 0083).

Invariant: equal tokens have equal text for rewards, environments, agents, evaluations and the APIs. The text ends
before the first stop string and has no special tokens; with ``task.special_tokens: shown`` only end tokens are removed.
The tokens, which are trained on, stay complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

Decode = Callable[[Iterable[int]], str]


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids of a tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(
        {*tokenizer.all_special_ids, *(token for token, added_token in added.items() if added_token.special)}
    )


def end_tokens(folder: str | Path, tokenizer: Any) -> frozenset[int]:
    """Return the token ids at which vLLM ends a reply. ``folder``: the model's folder or hub id.

    They are the tokenizer's end token and the end tokens in the model's generation config, or else in its config. Many
    chat models (Gemma, Llama, GLM) end a turn with another token than the tokenizer's.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # not every model has one
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    listed = generation.eos_token_id
    ids = listed if isinstance(listed, list | tuple) else [listed]
    return frozenset(token for token in (tokenizer.eos_token_id, *ids) if token is not None)


def decoder(tokenizer: Any, end_tokens: Collection[int], shows_special: bool) -> Decode:
    """Make a function that decodes a response. ``shows_special``: with special tokens, except ``end_tokens``."""
    if not shows_special:
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))
    dropped = special_tokens(tokenizer) & frozenset(end_tokens)
    return lambda ids: str(
        tokenizer.decode([token for token in ids if token not in dropped], skip_special_tokens=False)
    )


def cut(text: str, marks: Iterable[str]) -> str:
    """Return the text before the first of the ``marks``, such as stop strings."""
    return text[: min((position for mark in marks if (position := text.find(mark)) >= 0), default=len(text))]
