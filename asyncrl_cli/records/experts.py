"""The experts that an engine chose for the tokens of a sequence (``algorithm.router_replay``).

An array has a row for each token: for every layer of the model the k experts that were chosen in the pass that
predicted this token. So a row is about the token before, whose pass ends in the prediction; every sampled token has
one, and the first of a sequence has none. Experts are counted from 0: uint8 for models of up to 256, else uint16.

An engine never chooses an expert twice in a layer. Equal ids in a row (``UNKNOWN``, in all of it) therefore mean that
the choice is not known: then, as in layers without experts, the trainer's own counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.unsignedinteger[Any]]
"""[tokens, layers · k]."""
UNKNOWN = 0
"""All ids of a token whose experts are not known."""


def join_experts(parts: Iterable[tuple[int, Experts | None]]) -> Experts | None:
    """The rows of parts of a sequence, one after another; a part is its number of tokens, and None where no row of it
    is known. None when no part has any. Raises ``ValueError`` for rows of different models."""
    parts = list(parts)
    known = next((experts for _, experts in parts if experts is not None), None)
    if known is None:
        return None
    rows = [unknown_like(known, count) if experts is None else experts for count, experts in parts]
    return np.concatenate(rows, dtype=known.dtype, casting="no")


def filled(experts: Experts | None, others: Experts | None) -> Experts | None:
    """``experts``, with the rows of ``others`` for tokens whose own are not known; both have as many rows."""
    if experts is None or others is None:
        return others if experts is None else experts
    return np.where((experts == UNKNOWN).all(axis=1, keepdims=True), others, experts)


def unknown_like(experts: Experts, tokens: int) -> Experts:
    """Rows of so many tokens for the same model, of which nothing is known."""
    return np.full((tokens, experts.shape[1]), UNKNOWN, experts.dtype)


def to_bytes(experts: Experts) -> bytes:
    """As stored: a byte with the size of an id, and the ids, little-endian, row by row."""
    size = experts.dtype.itemsize
    return bytes([size]) + experts.astype(f"<u{size}", copy=False).tobytes()


def from_bytes(stored: bytes, tokens: int) -> Experts:
    """The array of so many ``tokens``. Raises ``ValueError`` for bytes that are none."""
    ids: Experts = np.frombuffer(stored, f"<u{stored[0]}", offset=1)
    return ids.reshape(tokens, -1)
