"""Which prompts are held out, decided by their value.

Invariant: a text belongs to ``eval`` or to ``train`` for good, whatever the seed, the row or the size of a
split, because membership is a hash of the text alone. So a prompt drawn twice, in two places, can never be
trained on and evaluated as well. ``is_held_out`` is the one place that decides.
"""

from __future__ import annotations

import hashlib

HELD_OUT_ONE_IN = 10
"""One text in this many is held out, where nothing else is said."""


def is_held_out(text: str, one_in: int = HELD_OUT_ONE_IN) -> bool:
    """Whether prompts with this text belong to the ``eval`` split, as one text in ``one_in`` does."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % one_in == 0
