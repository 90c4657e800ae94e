"""Finds the known name that was probably meant by an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, candidates: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names most similar to ``word``, ignoring case, with a similarity (0 to 1) of at least ``cutoff``."""
    names = {name.lower(): name for name in candidates}
    word = word.lower()
    close = get_close_matches(word, names, max(count, len(names)), cutoff)
    close.sort(key=lambda name: sorted(name) != sorted(word))  # swapped letters are the likeliest mistake
    return [names[name] for name in close[:count]]


def did_you_mean(word: str, candidates: Iterable[str], otherwise: str = "") -> str:
    """A hint with the most similar known name, or a name that contains the word; ``otherwise`` if there is none."""
    names = list(candidates)
    close = closest(word, names) or [name for name in names if word.lower() in re.split(r"[-_.]", name.lower())]
    return f"did you mean `{close[0]}`?" if close else otherwise
