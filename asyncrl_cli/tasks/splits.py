"""Which prompts are held out, decided by their value.

Invariant: a text belongs to ``eval`` or to ``train`` for good, whatever the seed, the row or the size of a
split, because membership is a hash of the text alone. So a prompt drawn twice, in two places, can never be
trained on and evaluated as well. ``is_held_out`` is the one place that decides.
"""

from __future__ import annotations

import hashlib

HELD_OUT_ONE_IN = 10
"""One text in this many is held out."""


def is_held_out(text: str) -> bool:
    """Whether prompts with this text belong to the ``eval`` split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0
