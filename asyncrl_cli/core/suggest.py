"""Finds the known name that was probably meant by an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names most similar to ``word``, ignoring case; none with a similarity (0 to 1) below ``cutoff``."""
    names = {name.lower(): name for name in known}
    word = word.lower()
    close = get_close_matches(word, names, max(count, len(names)), cutoff)
    close.sort(key=lambda name: sorted(name) != sorted(word))  # swapped letters are the likeliest mistake
    return [names[name] for name in close[:count]]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint with the most similar known name, or ``otherwise`` if none is similar."""
    close = closest(word, known)
    return f"did you mean `{close[0]}`?" if close else otherwise
