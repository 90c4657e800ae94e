"""Keeps special tokens in the text of messages as text (decision 0048).

Invariant: in a rendering, only the chat template writes special tokens. ``SpecialTokens.mark`` inserts ``MARK`` into
every special token in a text before the template sees it, so the tokenizer does not recognise the token. The tokenizer
of ``ignoring_marks`` removes the mark afterwards. A text without such tokens is tokenized as ever.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

from asyncrl_cli.records.prompt import ChatError

MARK = "\U0010ffff"
"""A noncharacter, which no text has; texts that have it lose it."""


class SpecialTokens:
    """A set of special tokens, to find and mark them in texts."""

    def __init__(self, tokens: Collection[str]) -> None:
        words = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        initials = "".join(map(re.escape, sorted({token[0] for token in tokens})))
        # Tokens may overlap, so each position is looked at; the set keeps this fast for a thousand tokens.
        self._pattern = re.compile(f"(?=[{initials}])(?=({words})).", re.DOTALL) if tokens else None

    def find(self, value: Any) -> str:
        """Return the first special token in the texts of a JSON value; "" if there is none."""
        match value:
            case str():
                match = self._pattern.search(value) if self._pattern else None
                return match[1] if match else ""
            case Mapping():
                return next(filter(None, (self.find(entry) for pair in value.items() for entry in pair)), "")
            case list() | tuple():
                return next(filter(None, map(self.find, value)), "")
        return ""

    def mark(self, value: Any) -> Any:
        """Return a JSON value with ``MARK`` after the first character of each special token in its texts.

        Raises ``ChatError`` for a special token of one character.
        """
        match value:
            case str():
                value = value.replace(MARK, "")
                return self._pattern.sub(_broken, value) if self._pattern else value
            case Mapping():
                return {self.mark(name): self.mark(entry) for name, entry in value.items()}
            case list() | tuple():
                return [self.mark(entry) for entry in value]
        return value


special_tokens_of = lru_cache(maxsize=8)(SpecialTokens)
"""Return the ``SpecialTokens`` with these texts."""


def special_texts(tokenizer: Any) -> frozenset[str]:
    """Return the texts of a tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {*getattr(tokenizer, "all_special_tokens", ()), *(str(token) for token in added if token.special)}
    return frozenset(texts - {""})


def ignoring_marks(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer that removes marks after it has recognised special tokens.

    Raises ``ChatError`` for a tokenizer without a backend of the library tokenizers.
    """
    from tokenizers import normalizers, pre_tokenizers

    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ChatError(
            "a message's text has a special token, which this tokenizer cannot write as text: remove it, or set "
            "data.special_tokens: tokens"
        )
    tokenizer = deepcopy(tokenizer)
    backend = tokenizer.backend_tokenizer
    if any(token.special and token.normalized for token in tokenizer.added_tokens_decoder.values()):
        # Such tokens are recognised after the normalizer, so the mark must outlast it.
        steps = [pre_tokenizers.Split(MARK, "removed"), *filter(None, [backend.pre_tokenizer])]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        steps = [normalizers.Replace(MARK, ""), *filter(None, [backend.normalizer])]
        backend.normalizer = normalizers.Sequence(steps)
    return tokenizer


def plain_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize texts without a chat template. The tokenizer adds its begin token, if it has one, to a text that does
    not begin with it."""
    begin = tokenizer.bos_token_id
    batch: list[list[int]] = tokenizer(list(texts))["input_ids"]
    return [ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids for ids in batch]


def _broken(match: re.Match[str]) -> str:
    if len(match[1]) == 1:
        raise ChatError(
            f"a message's text has {match[1]!r}, a special token of one character: remove it, or set "
            "data.special_tokens: tokens"
        )
    return match[0] + MARK
