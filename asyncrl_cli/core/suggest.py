"""Which known name was meant by an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names most like ``word``, upper or lower case; none below the ``cutoff``, a likeness from 0 to 1."""
    names = {name.lower(): name for name in known}
    return [names[name] for name in get_close_matches(word.lower(), names, count, cutoff)]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The hint that names the most likely one, or ``otherwise`` if none is alike."""
    close = closest(word, known)
    return f"did you mean `{close[0]}`?" if close else otherwise
