"""Descriptions of weight versions and of the hosts that have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.weights.layout import TensorSlot, chunks_of


class PullFailed(RunError):
    """A host could not get a version. The message has each holder's fault.

    The chunks that arrived are kept: the version's next pull continues with them.
    """


class ReplicaGone(RunError):
    """A path no longer leads to the version's memory, because its agent has ended or has reused the memory."""


class Superseded(PullFailed):
    """Pull cancelled: a newer version superseded it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address at which a host's agent serves weights."""

    node_id: str  # Ray's node id
    url: str

    def __str__(self) -> str:
        return f"{self.url} (node {self.node_id[:8]})"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that is complete on this host."""

    path: str  # of its memory, for processes on this host
    fetched_bytes: int = 0  # over the network
    seconds: float = 0.0  # from the call to the last checked chunk
    faults: Mapping[str, str] = field(default_factory=dict)  # each holder's last fault, by node id


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version's layout and checksums."""

    version: int
    slots: tuple[TensorSlot, ...]
    ranks: int  # number of trainer ranks that wrote it; the chunks depend on it
    digests: tuple[str, ...]  # BLAKE3 (hex) by chunk index

    @classmethod
    def from_digests(
        cls, version: int, slots: tuple[TensorSlot, ...], ranks: int, by_agent: Iterable[Mapping[int, str]]
    ) -> Manifest:
        """Join the agents' digests, which are by chunk index."""
        digests = {index: digest for agent_digests in by_agent for index, digest in agent_digests.items()}
        return cls(version, slots, ranks, tuple(digests[chunk.index] for chunk in chunks_of(slots, ranks)))

    @property
    def checksum(self) -> str:
        """BLAKE3 (hex) of the layout and the digests. It depends only on the bytes and the number of ranks that wrote
        them, not on the version or the hosts."""
        from blake3 import blake3

        layout = [(slot.name, slot.dtype, slot.shape, slot.offset, slot.itemsize) for slot in self.slots]
        text = json.dumps([layout, self.ranks, self.digests], separators=(",", ":"))
        return str(blake3(text.encode()).hexdigest())
