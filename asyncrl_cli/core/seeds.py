"""Random numbers that depend only on their purpose, never on when or where they are drawn."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits that depends on ``parts``, such as a seed, a group's id and an index.

    It must not change: replays of earlier runs use it.
    """
    return _number(parts) >> 1


def derive_fraction(*parts: object) -> float:
    """A number in [0, 1) that depends on ``parts``."""
    return _number(parts) / 2**64


def _number(parts: tuple[object, ...]) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
