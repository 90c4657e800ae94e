"""The experts that an engine chose for the tokens of a sequence (``algorithm.router_replay``, decision 0054).

An array has one row per token: for each layer the k experts chosen in the forward pass that predicted this token, which
is the pass of the previous token. Every sampled token has a row, and the first token of a sequence has none. Experts
count from 0: uint8 for models with up to 256 experts, otherwise uint16.

An engine never chooses an expert twice in a layer. So a row of equal ids (``UNKNOWN``) means that the choice is not
known; then, as in layers without experts, the trainer uses its own choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.unsignedinteger[Any]]
"""[tokens, layers · k]."""
UNKNOWN = 0
"""The value of all ids in the row of a token with unknown experts."""


def join_experts(runs: Iterable[tuple[int, Experts | None]]) -> Experts | None:
    """Concatenate the rows of a sequence's parts. A part is a number of tokens and their rows, or None if unknown.
    Returns None if no part has rows. Raises ``ValueError`` for rows of different models."""
    runs = list(runs)
    known_rows = next((experts for _, experts in runs if experts is not None), None)
    if known_rows is None:
        return None
    width, dtype = known_rows.shape[1], known_rows.dtype
    rows = [np.full((count, width), UNKNOWN, dtype) if experts is None else experts for count, experts in runs]
    return np.concatenate(rows, dtype=dtype, casting="no")


def filled(experts: Experts | None, substitutes: Experts | None) -> Experts | None:
    """Replace unknown rows of ``experts`` by rows of ``substitutes``; both have the same number of rows."""
    if experts is None or substitutes is None:
        return substitutes if experts is None else experts
    return np.where((experts == UNKNOWN).all(axis=1, keepdims=True), substitutes, experts)


def to_bytes(experts: Experts) -> bytes:
    """The stored form: a byte with the size of an id, then the ids, little-endian, row by row."""
    size = experts.dtype.itemsize
    return bytes([size]) + experts.astype(f"<u{size}", copy=False).tobytes()


def from_bytes(stored: bytes, tokens: int) -> Experts:
    """The array for ``tokens`` tokens. Raises ``ValueError`` for invalid bytes."""
    ids: Experts = np.frombuffer(stored, f"<u{stored[0]}", offset=1)
    return ids.reshape(tokens, -1)
