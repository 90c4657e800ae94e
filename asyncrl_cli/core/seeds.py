"""Random numbers that depend only on their purpose, never on when or where they are drawn."""

from __future__ import annotations

import hashlib


def derive_seed(*purpose: object) -> int:
    """A seed of 63 bits that depends on ``purpose``, such as a seed, a group's id and an index.

    It must not change: replays of earlier runs use it.
    """
    return _digest(purpose) >> 1


def derive_fraction(*purpose: object) -> float:
    """A number in [0, 1) that depends on ``purpose``."""
    return _digest(purpose) / 2**64


def _digest(purpose: tuple[object, ...]) -> int:
    digest = hashlib.blake2b("/".join(map(str, purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
