"""The directory inside one process: twin of redis_directory.py for tests and simulations, with faults on demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.ids import BlockHash, Epoch, NodeId
from kv_transfer.directory import Directory, DirectoryUnavailable, NodeRecord, StaleEpoch


@dataclass(slots=True)
class _Blocks:
    sequence_number: int
    expires_at: float
    hashes: set[BlockHash] = field(default_factory=set)


class MemoryDirectory(Directory):
    """Set `available` to False for an outage; `flush` forgets everything, as FLUSHALL does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[NodeId, tuple[NodeRecord, float]] = {}
        self._blocks: dict[tuple[NodeId, Epoch], _Blocks] = {}
        self.available = True

    def flush(self) -> None:
        self._records.clear()
        self._blocks.clear()

    async def register(self, record: NodeRecord, ttl_s: float) -> None:
        self._check(record.node_id, record.epoch)
        self._records[record.node_id] = (record, self._clock() + ttl_s)
        for node_id, epoch in list(self._blocks):
            if node_id == record.node_id and epoch < record.epoch:
                del self._blocks[node_id, epoch]

    async def unregister(self, node_id: NodeId, epoch: Epoch) -> None:
        self._check_available()
        self._blocks.pop((node_id, epoch), None)
        record = self._live_record(node_id)
        if record is not None and record.epoch == epoch:
            del self._records[node_id]

    async def nodes(self) -> list[NodeRecord]:
        self._check_available()
        records = [self._live_record(node_id) for node_id in sorted(self._records)]
        return [record for record in records if record is not None]

    async def lookup(self, hashes: Sequence[BlockHash], holders: Sequence[tuple[NodeId, Epoch]]) -> dict[NodeId, int]:
        self._check_available()
        return {node_id: self._prefix_length(hashes, node_id, epoch) for node_id, epoch in holders}

    async def publish(
        self,
        node_id: NodeId,
        epoch: Epoch,
        sequence_number: int,
        added: Sequence[BlockHash],
        removed: Sequence[BlockHash],
        ttl_s: float,
    ) -> bool:
        self._check(node_id, epoch)
        blocks = self._live_blocks(node_id, epoch)
        if blocks is None or blocks.sequence_number != sequence_number - 1:
            return False
        blocks.hashes.difference_update(removed)
        blocks.hashes.update(added)
        blocks.sequence_number = sequence_number
        blocks.expires_at = self._clock() + ttl_s
        return True

    async def republish(
        self, node_id: NodeId, epoch: Epoch, sequence_number: int, hashes: Sequence[BlockHash], ttl_s: float
    ) -> None:
        self._check(node_id, epoch)
        blocks = self._live_blocks(node_id, epoch)
        if blocks is not None and blocks.sequence_number >= sequence_number:
            raise DirectoryUnavailable("a later re-publish came first", reason="republish_lost")
        self._blocks[node_id, epoch] = _Blocks(sequence_number, self._clock() + ttl_s, set(hashes))

    async def touch(self, node_id: NodeId, epoch: Epoch, ttl_s: float) -> bool:
        self._check(node_id, epoch)
        record, blocks = self._live_record(node_id), self._live_blocks(node_id, epoch)
        expires_at = self._clock() + ttl_s
        if blocks is not None:
            blocks.expires_at = expires_at
        if record is not None and record.epoch == epoch:
            self._records[node_id] = (record, expires_at)
            return blocks is not None
        return False

    async def close(self) -> None:
        return None

    def _check_available(self) -> None:
        if not self.available:
            raise DirectoryUnavailable("the directory is away")

    def _check(self, node_id: NodeId, epoch: Epoch) -> None:
        self._check_available()
        record = self._live_record(node_id)
        if record is not None and record.epoch > epoch:
            raise StaleEpoch(f"epoch {record.epoch} of {node_id} has registered, which is newer than {epoch}")

    def _live_record(self, node_id: NodeId) -> NodeRecord | None:
        record, expires_at = self._records.get(node_id, (None, 0.0))
        return record if self._clock() < expires_at else None

    def _live_blocks(self, node_id: NodeId, epoch: Epoch) -> _Blocks | None:
        blocks = self._blocks.get((node_id, epoch))
        return blocks if blocks is not None and self._clock() < blocks.expires_at else None

    def _prefix_length(self, hashes: Sequence[BlockHash], node_id: NodeId, epoch: Epoch) -> int:
        blocks = self._live_blocks(node_id, epoch)
        if blocks is None:
            return 0
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in blocks.hashes), len(hashes))
