"""Prefix lookups: right hashes, bounded waiting, every failure means no hits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from engine.block_hash import hash_chain, root_hash
from engine.ids import BlockHash, Epoch, NodeId
from kv_transfer.directory import NodeRecord
from kv_transfer.memory_directory import MemoryDirectory
from router.cluster_counters import ClusterCounters
from router.cluster_timing import ClusterTiming
from router.prefix_lookup import LONG_PROMPT_TOKENS, PrefixLookup
from tests.router.fake_nodes import BLOCK_SIZE, make_fingerprint

FINGERPRINT = make_fingerprint()
HOLDER = (NodeId("p"), Epoch(1))
TIMING = ClusterTiming(lookup_timeout_s=0.05, lookup_pause_s=0.05, flush_s=0.05)


class SlowDirectory(MemoryDirectory):
    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.0
        self.cancelled = 0
        self.asked = 0

    async def lookup(self, hashes: Sequence[BlockHash], holders: Sequence[tuple[NodeId, Epoch]]) -> dict[NodeId, int]:
        self.asked += 1
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().lookup(hashes, holders)


async def make_directory(tokens: Sequence[int], salt: bytes = b"") -> SlowDirectory:
    directory = SlowDirectory()
    await directory.register(NodeRecord(*HOLDER, "prefill", "127.0.0.1:1"), ttl_s=60.0)
    chain = hash_chain(root_hash(FINGERPRINT, tenant_salt=salt), tokens, BLOCK_SIZE)
    await directory.republish(*HOLDER, 1, chain, ttl_s=60.0)
    return directory


def make_lookup(directory: MemoryDirectory, counters: ClusterCounters) -> PrefixLookup:
    return PrefixLookup(directory, timing=TIMING, counters=counters, clock=time.monotonic)


@pytest.mark.parametrize("length", [9, LONG_PROMPT_TOKENS * 2])
async def test_a_hit_never_covers_the_last_token(length: int) -> None:
    tokens = list(range(length - length % BLOCK_SIZE))
    counters = ClusterCounters()
    lookup = make_lookup(await make_directory(tokens), counters)
    assert await lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]) == {"p": len(tokens) - BLOCK_SIZE}
    assert await lookup.cached_tokens(FINGERPRINT, b"", [*tokens, 5], [HOLDER]) == {"p": len(tokens)}
    assert counters.directory_lookups == counters.directory_hits == 2
    await lookup.close()


async def test_tenants_and_epochs_do_not_share() -> None:
    tokens = list(range(12))
    lookup = make_lookup(await make_directory(tokens, salt=b"one"), ClusterCounters())
    assert await lookup.cached_tokens(FINGERPRINT, b"two", tokens, [HOLDER]) == {}
    assert await lookup.cached_tokens(FINGERPRINT, b"one", tokens, [(NodeId("p"), Epoch(2))]) == {}
    assert await lookup.cached_tokens(FINGERPRINT, b"one", tokens, [HOLDER]) == {"p": 8}
    await lookup.close()


async def test_a_slow_directory_is_not_waited_for_nor_cancelled_nor_asked_again_at_once() -> None:
    tokens = list(range(12))
    directory = await make_directory(tokens)
    directory.delay_s = 0.15
    counters = ClusterCounters()
    lookup = make_lookup(directory, counters)
    started_at = time.monotonic()
    assert await lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]) == {}
    assert time.monotonic() - started_at < 0.12
    assert await lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]) == {}
    assert directory.asked == 1 and counters.directory_errors == 1
    await asyncio.sleep(0.2)
    assert directory.cancelled == 0
    directory.delay_s = 0.0
    assert await lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]) == {}
    await asyncio.sleep(0.02)
    assert await lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]) == {"p": 8}
    await lookup.close()


async def test_while_the_directory_is_silent_only_the_first_prompt_waits() -> None:
    tokens = list(range(12))
    directory = await make_directory(tokens)
    directory.delay_s = 60.0
    counters = ClusterCounters()
    lookup = make_lookup(directory, counters)
    assert await lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]) == {}
    slowest_s = 0.0
    for _ in range(60):
        started_at = time.monotonic()
        assert await lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]) == {}
        slowest_s = max(slowest_s, time.monotonic() - started_at)
        await asyncio.sleep(0.005)
    assert slowest_s < TIMING.lookup_timeout_s / 2
    assert 2 <= directory.asked <= 5, "one at a time, with a pause after each"
    assert counters.directory_errors in (directory.asked - 1, directory.asked)
    await lookup.close()


async def test_a_caller_that_is_cancelled_does_not_cancel_the_directory() -> None:
    tokens = list(range(12))
    directory = await make_directory(tokens)
    directory.delay_s = 0.02
    lookup = make_lookup(directory, ClusterCounters())
    task = asyncio.create_task(lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]))
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.04)
    assert directory.asked == 1 and directory.cancelled == 0
    await lookup.close()


async def test_an_outage_counts_and_means_no_hits() -> None:
    tokens = list(range(12))
    directory = await make_directory(tokens)
    directory.available = False
    counters = ClusterCounters()
    lookup = make_lookup(directory, counters)
    assert await lookup.cached_tokens(FINGERPRINT, b"", tokens, [HOLDER]) == {}
    assert counters.directory_errors == 1
    await lookup.close()


async def test_short_prompts_ask_nothing() -> None:
    directory = await make_directory(list(range(12)))
    lookup = make_lookup(directory, ClusterCounters())
    assert await lookup.cached_tokens(FINGERPRINT, b"", list(range(BLOCK_SIZE)), [HOLDER]) == {}
    assert directory.asked == 0
    await lookup.close()
