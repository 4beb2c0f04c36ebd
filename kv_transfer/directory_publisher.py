"""How a node keeps its directory entries true: registers, renews, and publishes which blocks it caches.

    LOST    nothing is known to be in the directory    -- register and re-publish everything -->  IN STEP
    IN STEP changes go out in batches, heartbeats renew -- an error, a gap, something gone   -->  LOST

While LOST, changes are dropped: the full re-publish replaces them, so an outage of any length costs no memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.ids import BlockHash
from kv_transfer.directory import Directory, DirectoryUnavailable, NodeRecord

logger = logging.getLogger(__name__)

MAX_BATCH = 4096
"""Block hashes in one publish; more changes at once go out as a full re-publish or several batches."""
PUBLISH_INTERVAL_S = 0.1
CLOSE_TIMEOUT_S = 1.0


@dataclass(slots=True)
class PublisherCounters:
    """published: batches; republished: full re-publishes; errors: tries that failed."""

    published: int = 0
    republished: int = 0
    errors: int = 0


class DirectoryPublisher:
    """One per node. `take_changes` and `cached_hashes` are the block pool's, called on the event loop.

    Args:
        take_changes: (added, removed) since its last call, net.
        cached_hashes: everything that can be found in the pool now.
        heartbeat_s: seconds between renewals; entries live three times as long.
    """

    def __init__(
        self,
        directory: Directory,
        record: NodeRecord,
        *,
        take_changes: Callable[[], tuple[list[BlockHash], list[BlockHash]]],
        cached_hashes: Callable[[], list[BlockHash]],
        heartbeat_s: float,
    ) -> None:
        self._directory = directory
        self._record = record
        self._take_changes = take_changes
        self._cached_hashes = cached_hashes
        self._heartbeat_s = heartbeat_s
        self._ttl_s = 3 * heartbeat_s + CLOSE_TIMEOUT_S
        self._sequence_number = 0
        self._in_step = False
        self._lost_since: float | None = None
        self._closed = False
        self.counters = PublisherCounters()

    @property
    def is_in_step(self) -> bool:
        """Whether the directory holds what this node has, as far as is known."""
        return self._in_step

    async def run(self) -> None:
        """Until cancelled or closed. Never raises for the directory's sake."""
        next_heartbeat = 0.0
        while not self._closed:
            is_due = time.monotonic() >= next_heartbeat
            if is_due:
                # Jitter, so that after an outage a whole cluster does not re-publish in the same instant.
                next_heartbeat = time.monotonic() + self._heartbeat_s * random.uniform(0.7, 1.0)
            await self._tick(is_heartbeat=is_due)
            await asyncio.sleep(min(PUBLISH_INTERVAL_S, max(0.0, next_heartbeat - time.monotonic())))

    async def close(self) -> None:
        """Unregister, as far as that is possible within a second. Call after `run` was cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._in_step = False
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._directory.unregister(self._record.node_id, self._record.epoch)
        except (DirectoryUnavailable, TimeoutError) as error:
            logger.info("directory_unregister_failed node_id=%s error=%s", self._record.node_id, error)

    async def _tick(self, *, is_heartbeat: bool) -> None:
        added, removed = self._take_changes()
        try:
            if self._in_step:
                self._in_step = await self._publish(added, removed)
            if self._in_step and is_heartbeat:
                self._in_step = await self._directory.touch(self._record.node_id, self._record.epoch, self._ttl_s)
            if not self._in_step and (is_heartbeat or self._lost_since is None):
                await self._republish()
        except DirectoryUnavailable as error:
            self.counters.errors += 1
            self._note_lost(error)

    async def _publish(self, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> bool:
        """Removed ones first: a batch cut off in between then claims too little rather than too much."""
        node_id, epoch = self._record.node_id, self._record.epoch
        for gone, come in [
            *((batch, ()) for batch in _batches(removed)),
            *(((), batch) for batch in _batches(added)),
        ]:
            self._sequence_number += 1
            if not await self._directory.publish(node_id, epoch, self._sequence_number, come, gone, self._ttl_s):
                return False
            self.counters.published += 1
        return True

    async def _republish(self) -> None:
        await self._directory.register(self._record, self._ttl_s)
        # Both in one go, without an await between: what changes after this comes with the next batch.
        self._take_changes()
        hashes = self._cached_hashes()
        self._sequence_number += 1
        await self._directory.republish(
            self._record.node_id, self._record.epoch, self._sequence_number, hashes, self._ttl_s
        )
        self.counters.republished += 1
        self._in_step = True
        if self._lost_since is not None:
            away_s = time.monotonic() - self._lost_since
            logger.info(
                "directory_regained node_id=%s away_s=%.1f blocks=%d", self._record.node_id, away_s, len(hashes)
            )
        self._lost_since = None

    def _note_lost(self, error: DirectoryUnavailable) -> None:
        self._in_step = False
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            logger.warning(
                "directory_lost node_id=%s reason=%s error=%s", self._record.node_id, error.reason, str(error)
            )


def _batches(hashes: Sequence[BlockHash]) -> list[Sequence[BlockHash]]:
    return [hashes[start : start + MAX_BATCH] for start in range(0, len(hashes), MAX_BATCH)]
