"""How much of a prompt each node has cached, as far as the directory knows. A hint: every failure means "nothing".

Block hashes of long prompts are computed off the event loop. A call to the directory is never cancelled midway (a
cancelled Redis command would leave its answer for the next caller); it is merely not waited for. Once one has failed,
no prompt waits until another has succeeded: a lookup now and then tries the directory in the background.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.block_hash import hash_chain, root_hash
from engine.fingerprint import Fingerprint
from engine.ids import BlockHash, Epoch, NodeId
from kv_transfer.directory import Directory
from router.cluster_counters import ClusterCounters
from router.cluster_timing import ClusterTiming

logger = logging.getLogger(__name__)

LONG_PROMPT_TOKENS = 1024
MAX_LOOKUPS_UNDER_WAY = 64


class PrefixLookup:
    """Asks the directory for one prompt at a time; many may be under way."""

    def __init__(
        self, directory: Directory, *, timing: ClusterTiming, counters: ClusterCounters, clock: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._timing = timing
        self._counters = counters
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="block-hash")
        self._under_way: set[asyncio.Task[dict[NodeId, int]]] = set()
        self._probe: asyncio.Task[dict[NodeId, int]] | None = None
        self._paused_until = 0.0
        self._is_failing = False

    async def cached_tokens(
        self,
        fingerprint: Fingerprint,
        tenant_salt: bytes,
        token_ids: Sequence[int],
        holders: Sequence[tuple[NodeId, Epoch]],
    ) -> dict[NodeId, int]:
        """Tokens of the longest cached prefix of each holder; nodes without one may be missing. Never raises."""
        block_size = fingerprint.block_size
        # A hit never covers the last token: its logits are needed.
        num_blocks = (len(token_ids) - 1) // block_size
        if num_blocks < 1 or not holders or self._clock() < self._paused_until or self._probe is not None:
            return {}
        if len(self._under_way) >= MAX_LOOKUPS_UNDER_WAY:
            self._failed("too many lookups are under way")
            return {}
        hashed = token_ids[: num_blocks * block_size]
        if len(hashed) > LONG_PROMPT_TOKENS:
            loop = asyncio.get_running_loop()
            chain = await loop.run_in_executor(self._threads, _chain, fingerprint, tenant_salt, hashed)
        else:
            chain = _chain(fingerprint, tenant_salt, hashed)
        if self._is_failing:
            self._start_probe(chain, holders)
            return {}
        blocks = await self._ask(chain, holders)
        return {node_id: min(count, num_blocks) * block_size for node_id, count in blocks.items() if count > 0}

    async def close(self) -> None:
        """Wait briefly for calls under way, then end them; no thread stays behind."""
        if self._under_way:
            _, late = await asyncio.wait(self._under_way, timeout=self._timing.flush_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._probe is not None:
            # Ends with the call it waits for.
            await self._probe
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start_probe(self, chain: Sequence[BlockHash], holders: Sequence[tuple[NodeId, Epoch]]) -> None:
        if self._probe is None:
            self._probe = asyncio.create_task(self._ask(chain, holders))
            self._probe.add_done_callback(self._probed)

    def _probed(self, probe: asyncio.Task[dict[NodeId, int]]) -> None:
        self._probe = None
        if not probe.cancelled() and probe.exception() is None and not self._is_failing:
            logger.info("directory_lookup_back")

    async def _ask(self, chain: Sequence[BlockHash], holders: Sequence[tuple[NodeId, Epoch]]) -> dict[NodeId, int]:
        task = asyncio.create_task(self._directory.lookup(chain, holders))
        self._under_way.add(task)
        task.add_done_callback(self._settled)
        self._counters.directory_lookups += 1
        done, _ = await asyncio.wait({task}, timeout=self._timing.lookup_timeout_s)
        if not done:
            self._failed(f"no answer within {self._timing.lookup_timeout_s} s")
            return {}
        if task.cancelled():
            return {}
        error = task.exception()
        if error is not None:
            self._failed(f"{type(error).__name__}: {error}")
            return {}
        blocks = task.result()
        self._is_failing = False
        if any(blocks.values()):
            self._counters.directory_hits += 1
        return blocks

    def _settled(self, task: asyncio.Task[dict[NodeId, int]]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            # Marks the exception of a call nobody waited for as seen; it was counted when it was late.
            task.exception()

    def _failed(self, why: str) -> None:
        self._counters.directory_errors += 1
        self._paused_until = self._clock() + self._timing.lookup_pause_s
        if not self._is_failing:
            # Once per outage, however long it lasts.
            self._is_failing = True
            logger.warning("directory_lookup_failed reason=%r", why)


def _chain(fingerprint: Fingerprint, tenant_salt: bytes, token_ids: Sequence[int]) -> list[BlockHash]:
    return hash_chain(root_hash(fingerprint, tenant_salt=tenant_salt), token_ids, fingerprint.block_size)
