"""The manifest: one checksum of the bytes, the same on all hosts."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.weights.layout import CHUNK_BYTES, chunks_of, plan_slots
from asyncrl_cli.weights.manifest import Manifest

RANKS = 3
SLOTS = plan_slots([("a", torch.bfloat16, (2 * CHUNK_BYTES,)), ("b", torch.float32, (5, 7))])
DIGESTS = {chunk.index: f"{chunk.index:064x}" for chunk in chunks_of(SLOTS, RANKS)}
MANIFEST = Manifest.from_digests(7, SLOTS, RANKS, [DIGESTS])


@given(st.lists(st.integers(0, 3), min_size=len(DIGESTS), max_size=len(DIGESTS)), st.randoms())
def test_the_checksum_does_not_depend_on_the_hosts(host_of_chunk: list[int], random: object) -> None:
    parts = [{index: digest for index, digest in DIGESTS.items() if host_of_chunk[index] == host} for host in range(4)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    manifest = Manifest.from_digests(7, SLOTS, RANKS, parts)
    assert manifest == MANIFEST
    assert manifest.checksum == MANIFEST.checksum


@given(st.integers(0, len(DIGESTS) - 1), st.integers(0, 63))
def test_the_checksum_changes_with_each_digest(index: int, position: int) -> None:
    digest = DIGESTS[index]
    other = digest[:position] + ("f" if digest[position] != "f" else "0") + digest[position + 1 :]
    assert Manifest.from_digests(7, SLOTS, RANKS, [DIGESTS, {index: other}]).checksum != MANIFEST.checksum


def test_the_checksum_is_of_layout_and_bytes() -> None:
    assert replace(MANIFEST, version=8).checksum == MANIFEST.checksum, "the same bytes under another version"
    renamed = (replace(SLOTS[0], name="other"), *SLOTS[1:])
    assert replace(MANIFEST, slots=renamed).checksum != MANIFEST.checksum
    assert pickle.loads(pickle.dumps(MANIFEST)).checksum == MANIFEST.checksum
