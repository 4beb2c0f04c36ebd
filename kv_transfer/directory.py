"""What nodes and routers ask of the directory: who lives, and who holds which prefix. Knows no Redis.

Everything in it is a hint with a time to live. Wrong or missing means that something is recomputed, never a wrong
token; DirectoryUnavailable means: go on without. Implementations: redis_directory.py, memory_directory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import AttemptFailed
from engine.ids import BlockHash, Epoch, NodeId

ROLES = ("prefill", "decode")


class DirectoryUnavailable(AttemptFailed):
    """The directory did not answer, or refused. `reason` names which."""

    reason = "directory_unavailable"


class StaleEpoch(DirectoryUnavailable):
    """A newer incarnation of this node has registered."""

    reason = "stale_epoch"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One incarnation of a node, as it registered itself."""

    node_id: NodeId
    epoch: Epoch
    role: str
    address: str

    def __post_init__(self) -> None:
        if not self.node_id or len(self.node_id) > 256:
            raise ValueError("node_id must have 1 to 256 characters")
        if not 0 < self.epoch < 2**63:
            raise ValueError(f"epoch must be a positive 63-bit number, not {self.epoch}")
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {self.role!r}")
        if not self.address or len(self.address) > 512:
            raise ValueError("address must have 1 to 512 characters")


class Directory(Protocol):
    """Safe to call from one event loop by many tasks, and to cancel at any moment. All raise DirectoryUnavailable."""

    async def register(self, record: NodeRecord, ttl_s: float) -> None:
        """Say that a node lives. What older epochs of it published is gone. Raises StaleEpoch for an older epoch."""
        ...

    async def unregister(self, node_id: NodeId, epoch: Epoch) -> None:
        """Remove one incarnation and what it published; newer ones stay."""
        ...

    async def nodes(self) -> list[NodeRecord]:
        """All whose time to live has not passed, by node id."""
        ...

    async def lookup(self, hashes: Sequence[BlockHash], holders: Sequence[tuple[NodeId, Epoch]]) -> dict[NodeId, int]:
        """How many blocks from the front of `hashes` each holder has; 0 for unknown ones. One round trip."""
        ...

    async def publish(
        self,
        node_id: NodeId,
        epoch: Epoch,
        sequence_number: int,
        added: Sequence[BlockHash],
        removed: Sequence[BlockHash],
        ttl_s: float,
    ) -> bool:
        """Apply a batch, wholly or not at all. False when `sequence_number` does not follow the last, or all is gone.

        After False the node must `republish`. Raises StaleEpoch when a newer epoch has registered.
        """
        ...

    async def republish(
        self, node_id: NodeId, epoch: Epoch, sequence_number: int, hashes: Sequence[BlockHash], ttl_s: float
    ) -> None:
        """Replace everything this incarnation published; readers see the old or the new. Raises StaleEpoch.

        `sequence_number` must be above all before it.
        """
        ...

    async def touch(self, node_id: NodeId, epoch: Epoch, ttl_s: float) -> bool:
        """Renew record and entries. False when either is gone. Raises StaleEpoch."""
        ...

    async def close(self) -> None: ...
