"""Does the directory follow what a node caches, through gaps, outages, restarts and a rival with its name?"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from engine.ids import BlockHash, Epoch, NodeId
from kv_transfer import directory_publisher
from kv_transfer.directory import Directory, DirectoryUnavailable, NodeRecord
from kv_transfer.directory_publisher import DirectoryPublisher
from kv_transfer.memory_directory import MemoryDirectory
from kv_transfer.redis_directory import RedisDirectory
from tests.redis_process import RedisProcess

NODE, EPOCH = NodeId("decode-1"), Epoch(1_764_444_800_123_456_789)
RECORD = NodeRecord(NODE, EPOCH, "decode", "127.0.0.1:9")
HEARTBEAT_S = 0.2


def chain(length: int) -> list[BlockHash]:
    return [BlockHash(b"%016d" % i) for i in range(length)]


class Cache:
    """Stands for a node's block pool: what is cached, and the net change since somebody last asked."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()
        self._known: set[BlockHash] = set()

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        added, removed = list(self.hashes - self._known), list(self._known - self.hashes)
        self._known = set(self.hashes)
        return added, removed

    def cached_hashes(self) -> list[BlockHash]:
        return list(self.hashes)


class Node:
    """A publisher at work on a cache."""

    def __init__(self, directory: Directory, record: NodeRecord = RECORD) -> None:
        self.directory = directory
        self.record = record
        self.cache = Cache()
        self.publisher = DirectoryPublisher(
            directory,
            record,
            take_changes=self.cache.take_changes,
            cached_hashes=self.cache.cached_hashes,
            heartbeat_s=HEARTBEAT_S,
        )
        self.task = asyncio.create_task(self.publisher.run())

    async def is_true(self, blocks: int) -> bool:
        """Whether the directory says that this node lives and holds exactly the first `blocks` blocks."""
        try:
            found = await self.directory.lookup(chain(blocks + 5), [(self.record.node_id, self.record.epoch)])
            return found[self.record.node_id] == blocks and self.record in await self.directory.nodes()
        except DirectoryUnavailable:
            return False

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        await self.publisher.close()


@pytest.fixture(params=["memory", "redis"])
async def directory(request: pytest.FixtureRequest) -> AsyncIterator[Directory]:
    made: Directory
    if request.param == "memory":
        made = MemoryDirectory()
    else:
        made = RedisDirectory(request.getfixturevalue("redis_server").url, "test")
    yield made
    await made.close()


@pytest.fixture
async def node(directory: Directory) -> AsyncIterator[Node]:
    node = Node(directory)
    yield node
    await node.stop()


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Seconds until the condition held."""
    started = time.monotonic()
    while not await condition():
        assert time.monotonic() - started < within_s, "not in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def forget_everything(directory: Directory, request: pytest.FixtureRequest) -> None:
    if isinstance(directory, MemoryDirectory):
        directory.flush()
    else:
        request.getfixturevalue("redis_server").client().flushall()


async def test_a_node_registers_publishes_and_follows_its_cache(directory: Directory, node: Node) -> None:
    node.cache.hashes = set(chain(10))
    await eventually(lambda: node.is_true(10), 2)
    node.cache.hashes = set(chain(20))
    await eventually(lambda: node.is_true(20), 2)
    node.cache.hashes -= set(chain(20)[7:])
    await eventually(lambda: node.is_true(7), 2)
    assert node.publisher.counters.published >= 2
    assert (node.publisher.counters.republished, node.publisher.counters.errors) == (1, 0)
    assert node.publisher.is_in_step


async def test_an_idle_node_stays_registered(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_publisher, "CLOSE_TIMEOUT_S", 0.0)
    node = Node(directory)
    node.cache.hashes = set(chain(3))
    await eventually(lambda: node.is_true(3), 2)
    await asyncio.sleep(5 * HEARTBEAT_S)
    assert await node.is_true(3)
    assert node.publisher.counters.republished == 1
    await node.stop()


async def test_what_was_forgotten_comes_back_within_a_heartbeat(
    directory: Directory, node: Node, request: pytest.FixtureRequest
) -> None:
    node.cache.hashes = set(chain(10))
    await eventually(lambda: node.is_true(10), 2)
    await forget_everything(directory, request)
    # Nothing changes in the cache: the heartbeat alone must find out.
    assert await eventually(lambda: node.is_true(10), 2) < HEARTBEAT_S + 0.5
    assert node.publisher.counters.republished == 2


async def test_a_gap_leads_to_a_full_republish_at_once(directory: Directory, node: Node) -> None:
    node.cache.hashes = set(chain(10))
    await eventually(lambda: node.is_true(10), 2)
    # Somebody else's batch with our next number: ours no longer follows.
    assert await directory.publish(NODE, EPOCH, 2, [], chain(10), 30.0) or await directory.publish(
        NODE, EPOCH, 3, [], chain(10), 30.0
    )
    node.cache.hashes = set(chain(11))
    await eventually(lambda: node.is_true(11), 2)
    assert node.publisher.counters.republished == 2


async def test_changes_during_a_republish_are_not_lost() -> None:
    """The cache changes while the full list is on its way; the next batch must bring it."""

    class Slow(MemoryDirectory):
        async def republish(
            self, node_id: NodeId, epoch: Epoch, sequence_number: int, hashes: Sequence[BlockHash], ttl_s: float
        ) -> None:
            node.cache.hashes = set(chain(4))
            await asyncio.sleep(0.05)
            await super().republish(node_id, epoch, sequence_number, hashes, ttl_s)

    node = Node(Slow())
    node.cache.hashes = set(chain(10))
    await eventually(lambda: node.is_true(4), 2)
    assert node.publisher.counters.republished == 1
    await node.stop()


async def test_a_change_right_after_the_full_list_was_read_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(MemoryDirectory())

    def read_and_change_soon() -> list[BlockHash]:
        hashes = node.cache.cached_hashes()
        asyncio.get_running_loop().call_soon(setattr, node.cache, "hashes", set(chain(4)))
        return hashes

    monkeypatch.setattr(node.publisher, "_cached_hashes", read_and_change_soon)
    node.cache.hashes = set(chain(10))
    await eventually(lambda: node.is_true(4), 2)
    await node.stop()


async def test_many_changes_go_out_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_publisher, "MAX_BATCH", 100)
    sizes = []

    class Measuring(MemoryDirectory):
        async def publish(
            self,
            node_id: NodeId,
            epoch: Epoch,
            sequence_number: int,
            added: Sequence[BlockHash],
            removed: Sequence[BlockHash],
            ttl_s: float,
        ) -> bool:
            sizes.append(len(added) + len(removed))
            return await super().publish(node_id, epoch, sequence_number, added, removed, ttl_s)

    node = Node(Measuring())
    await eventually(lambda: node.is_true(0), 2)
    node.cache.hashes = set(chain(250))
    await eventually(lambda: node.is_true(250), 2)
    node.cache.hashes = set()
    await eventually(lambda: node.is_true(0), 2)
    assert sizes == [100, 100, 50, 100, 100, 50]
    assert node.publisher.counters.republished == 1
    await node.stop()


async def test_an_outage_costs_two_log_lines_and_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    directory = MemoryDirectory()
    node = Node(directory)
    node.cache.hashes = set(chain(5))
    await eventually(lambda: node.is_true(5), 2)
    directory.available = False
    for i in range(100):
        node.cache.hashes = set(chain(i + 10))
        await asyncio.sleep(0.01)
    assert not node.task.done()
    assert node.publisher.counters.errors >= 3
    directory.available = True
    await eventually(lambda: node.is_true(109), 2)
    events = [record.getMessage().split()[0] for record in caplog.records if "directory" in record.getMessage()]
    assert events == ["directory_lost", "directory_regained"]
    await node.stop()


async def test_redis_killed_for_a_while(redis_server: RedisProcess) -> None:
    directory = RedisDirectory(redis_server.url, "test")
    node = Node(directory)
    node.cache.hashes = set(chain(5))
    await eventually(lambda: node.is_true(5), 2)
    redis_server.kill()
    await asyncio.sleep(2 * HEARTBEAT_S)
    node.cache.hashes = set(chain(8))
    assert node.publisher.counters.errors >= 1
    redis_server.start()
    assert await eventually(lambda: node.is_true(8), 3) < HEARTBEAT_S + 0.5
    assert not node.task.done()
    await node.stop()
    await directory.close()


async def test_redis_silent_for_a_while(redis_server: RedisProcess) -> None:
    directory = RedisDirectory(redis_server.url, "test")
    node = Node(directory)
    node.cache.hashes = set(chain(5))
    await eventually(lambda: node.is_true(5), 2)
    redis_server.pause()
    await asyncio.sleep(1.5)
    node.cache.hashes = set(chain(3))
    redis_server.resume()
    await eventually(lambda: node.is_true(3), 3)
    await node.stop()
    await directory.close()


async def test_the_older_of_two_with_one_name_gives_way_and_takes_over_when_alone(directory: Directory) -> None:
    older = Node(directory)
    older.cache.hashes = set(chain(3))
    await eventually(lambda: older.is_true(3), 2)
    newer = Node(directory, NodeRecord(NODE, Epoch(EPOCH + 1), "decode", "127.0.0.1:10"))
    newer.cache.hashes = set(chain(6))
    await eventually(lambda: newer.is_true(6), 2)
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert await newer.is_true(6)
    assert not await older.is_true(3)
    assert not older.task.done() and not older.publisher.is_in_step
    await newer.stop()
    await eventually(lambda: older.is_true(3), 2)
    await older.stop()


async def test_close_unregisters(directory: Directory, node: Node) -> None:
    node.cache.hashes = set(chain(3))
    await eventually(lambda: node.is_true(3), 2)
    await node.stop()
    assert await directory.nodes() == []
    assert await directory.lookup(chain(3), [(NODE, EPOCH)]) == {NODE: 0}
    await node.publisher.close()


async def test_close_without_a_directory_ends_within_its_time(redis_server: RedisProcess) -> None:
    directory = RedisDirectory(redis_server.url, "test")
    node = Node(directory)
    await eventually(lambda: node.is_true(0), 2)
    redis_server.pause()
    try:
        started = time.monotonic()
        await node.stop()
        assert time.monotonic() - started < 2.0
    finally:
        redis_server.resume()
    await directory.close()


async def test_run_ends_after_close_even_if_nobody_cancels_it(directory: Directory) -> None:
    node = Node(directory)
    await eventually(lambda: node.is_true(0), 2)
    await node.publisher.close()
    await asyncio.wait_for(node.task, 1)
    assert await directory.nodes() == []


async def test_a_failure_that_is_not_the_directorys_is_not_swallowed() -> None:
    node = Node(MemoryDirectory())
    await eventually(lambda: node.is_true(0), 2)

    def broken() -> tuple[list[BlockHash], list[BlockHash]]:
        raise RuntimeError("a bug in the pool")

    node.publisher._take_changes = broken
    with pytest.raises(RuntimeError, match="a bug in the pool"):
        await asyncio.wait_for(node.task, 1)
