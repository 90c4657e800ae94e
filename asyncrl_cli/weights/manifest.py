"""Names weight versions and the hosts that have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.weights.layout import TensorSlot, chunks_of


class PullFailed(RunError):
    """A host could not get a version; the message names the holders and what was wrong with each.

    The chunks that it has got are kept: the next pull of the version continues from there.
    """


class ReplicaGone(RunError):
    """A path does not lead to the version's memory any more: its agent has ended or reused it."""


class Superseded(PullFailed):
    """Pull cancelled: a newer version superseded it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the agent of a host serves weights."""

    node_id: str  # Ray's
    url: str

    def __str__(self) -> str:
        return f"{self.url} (node {self.node_id[:8]})"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that is complete on this host."""

    path: str  # opens its memory, in processes of this host
    fetched_bytes: int = 0  # over the network
    seconds: float = 0.0  # from the call to the last checked chunk
    faults: Mapping[str, str] = field(default_factory=dict)  # the last fault of each holder, by node id


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version."""

    version: int
    slots: tuple[TensorSlot, ...]
    ranks: int  # trainer ranks that wrote it, on which the chunks depend
    digests: tuple[str, ...]  # BLAKE3 (hex) of each chunk, by the chunk's index

    @classmethod
    def of(
        cls, version: int, slots: tuple[TensorSlot, ...], ranks: int, parts: Iterable[Mapping[int, str]]
    ) -> Manifest:
        """Join the digests that agents computed, by chunk index. Raises ``RunError`` when a chunk has none."""
        digests = {index: digest for part in parts for index, digest in part.items()}
        count = len(chunks_of(slots, ranks))
        missing = count - len(digests)
        if missing:
            raise RunError(
                f"{missing} of {count} chunks of weight version {version} have no digest",
                location="weights",
                hint="this is a fault of the publish; please report it with the driver's log",
            )
        return cls(version, slots, ranks, tuple(digests[index] for index in range(count)))

    @property
    def checksum(self) -> str:
        """BLAKE3 (hex) of the layout and the digests. Equal for equal bytes written by the same number of ranks,
        whichever version, and whichever hosts have them."""
        from blake3 import blake3

        layout = [(slot.name, slot.dtype, slot.shape, slot.offset, slot.itemsize) for slot in self.slots]
        text = json.dumps([layout, self.ranks, self.digests], separators=(",", ":"))
        return str(blake3(text.encode()).hexdigest())
