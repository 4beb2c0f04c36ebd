"""Does every implementation of the directory behave as its protocol says?"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from engine.ids import BlockHash, Epoch, NodeId
from kv_transfer.directory import Directory, DirectoryUnavailable, NodeRecord, StaleEpoch
from kv_transfer.memory_directory import MemoryDirectory
from kv_transfer.redis_directory import RedisDirectory

# Neighbouring nanosecond epochs: a double cannot tell them apart.
OLD, NOW, NEW = (Epoch(1_764_444_800_123_456_000 + i) for i in range(3))
NODE, OTHER = NodeId("prefill-127.0.0.1:8001"), NodeId("prefill-host:8002")
TTL_S = 30.0


def block_hash(i: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"%d" % i).digest()[:16])


def chain(length: int, start: int = 0) -> list[BlockHash]:
    return [block_hash(i) for i in range(start, start + length)]


def record(node_id: NodeId = NODE, epoch: Epoch = NOW, role: str = "prefill") -> NodeRecord:
    return NodeRecord(node_id, epoch, role, "127.0.0.1:8001")


@pytest.fixture(params=["memory", "redis"])
async def directory(request: pytest.FixtureRequest) -> AsyncIterator[Directory]:
    made: Directory
    if request.param == "memory":
        made = MemoryDirectory()
    else:
        made = RedisDirectory(request.getfixturevalue("redis_server").url, "test")
    yield made
    await made.close()


async def held(directory: Directory, hashes: list[BlockHash], node_id: NodeId = NODE, epoch: Epoch = NOW) -> int:
    return (await directory.lookup(hashes, [(node_id, epoch)]))[node_id]


async def test_nodes_register_and_unregister(directory: Directory) -> None:
    assert await directory.nodes() == []
    await directory.register(record(OTHER, role="decode"), TTL_S)
    await directory.register(record(), TTL_S)
    await directory.register(record(), TTL_S)
    assert await directory.nodes() == [record(), record(OTHER, role="decode")]
    await directory.unregister(NODE, NOW)
    await directory.unregister(NODE, NOW)
    assert await directory.nodes() == [record(OTHER, role="decode")]


async def test_records_and_entries_lapse_unless_touched(directory: Directory) -> None:
    await directory.register(record(), 0.6)
    await directory.republish(NODE, NOW, 1, chain(2), 0.6)
    await directory.register(record(OTHER), 0.6)
    await directory.republish(OTHER, NOW, 1, chain(2), 0.6)
    for _ in range(4):
        await asyncio.sleep(0.25)
        assert await directory.touch(NODE, NOW, 0.6)
    assert await directory.nodes() == [record()]
    assert await directory.lookup(chain(2), [(NODE, NOW), (OTHER, NOW)]) == {NODE: 2, OTHER: 0}
    assert not await directory.touch(OTHER, NOW, TTL_S)
    assert not await directory.publish(OTHER, NOW, 2, chain(1), [], TTL_S)


async def test_an_older_epoch_is_refused_everywhere(directory: Directory) -> None:
    await directory.register(record(epoch=NEW), TTL_S)
    for refused in (
        directory.register(record(epoch=NOW), TTL_S),
        directory.touch(NODE, NOW, TTL_S),
        directory.publish(NODE, NOW, 1, chain(1), [], TTL_S),
        directory.republish(NODE, NOW, 1, chain(1), TTL_S),
    ):
        with pytest.raises(StaleEpoch):
            await refused
    await directory.unregister(NODE, NOW)
    assert await directory.nodes() == [record(epoch=NEW)]
    assert await held(directory, chain(1), epoch=NOW) == 0


async def test_a_newer_epoch_removes_what_older_ones_published(directory: Directory) -> None:
    for epoch in (OLD, NOW):
        await directory.register(record(epoch=epoch), TTL_S)
        await directory.republish(NODE, epoch, 1, chain(3), TTL_S)
    assert await held(directory, chain(3), epoch=OLD) == 0
    assert await held(directory, chain(3), epoch=NOW) == 3
    await directory.register(record(epoch=NEW), TTL_S)
    assert await directory.lookup(chain(3), [(NODE, NOW)]) == {NODE: 0}
    assert await directory.lookup(chain(3), [(NODE, NEW)]) == {NODE: 0}


async def test_an_older_epoch_that_died_without_a_record_is_removed_too(directory: Directory) -> None:
    await directory.register(record(epoch=OLD), 0.05)
    await directory.republish(NODE, OLD, 1, chain(3), TTL_S)
    await asyncio.sleep(0.1)
    await directory.register(record(epoch=NOW), TTL_S)
    assert await held(directory, chain(3), epoch=OLD) == 0


async def test_lookup_finds_the_longest_prefix_of_each_holder(directory: Directory) -> None:
    await directory.republish(NODE, NOW, 1, chain(5), TTL_S)
    with_a_hole = [*chain(2), *chain(2, start=3)]
    await directory.republish(OTHER, NEW, 1, with_a_hole, TTL_S)
    holders = [(NODE, NOW), (OTHER, NEW), (NodeId("nobody"), NOW)]
    assert await directory.lookup(chain(8), holders) == {NODE: 5, OTHER: 2, NodeId("nobody"): 0}
    assert await directory.lookup(chain(8, start=1), holders) == {NODE: 4, OTHER: 1, NodeId("nobody"): 0}
    assert await directory.lookup([block_hash(99), *chain(5)], holders) == dict.fromkeys(dict(holders), 0)
    assert await directory.lookup([], holders) == dict.fromkeys(dict(holders), 0)
    assert await directory.lookup(chain(8), []) == {}


async def test_lookup_of_long_chains(directory: Directory) -> None:
    await directory.republish(NODE, NOW, 1, chain(5000), TTL_S)
    assert await held(directory, chain(5000)) == 5000
    assert await held(directory, chain(6000)) == 5000


async def test_batches_apply_in_sequence_only(directory: Directory) -> None:
    assert not await directory.publish(NODE, NOW, 1, chain(1), [], TTL_S), "nothing to add to yet"
    await directory.republish(NODE, NOW, 7, [], TTL_S)
    assert await directory.publish(NODE, NOW, 8, chain(4), [], TTL_S)
    assert await held(directory, chain(4)) == 4
    for wrong in (7, 8, 10):
        assert not await directory.publish(NODE, NOW, wrong, chain(4, start=4), [], TTL_S)
    assert await held(directory, chain(8)) == 4
    assert await directory.publish(NODE, NOW, 9, [block_hash(4)], [block_hash(2), block_hash(77)], TTL_S)
    assert await held(directory, chain(8)) == 2
    assert await held(directory, chain(8, start=3)) == 2


async def test_a_large_batch(directory: Directory) -> None:
    await directory.republish(NODE, NOW, 1, chain(4000), TTL_S)
    assert await directory.publish(NODE, NOW, 2, chain(4000, start=4000), chain(3000, start=1000), TTL_S)
    assert await held(directory, chain(4000)) == 1000
    assert await held(directory, chain(4000, start=4000)) == 4000


async def test_republish_replaces_everything(directory: Directory) -> None:
    await directory.republish(NODE, NOW, 1, chain(4), TTL_S)
    await directory.republish(NODE, NOW, 2, [*chain(2), *chain(2)], TTL_S)
    assert await held(directory, chain(4)) == 2
    assert await directory.publish(NODE, NOW, 3, [block_hash(2)], [], TTL_S)
    with pytest.raises(DirectoryUnavailable):
        await directory.republish(NODE, NOW, 2, chain(9), TTL_S)
    assert await held(directory, chain(9)) == 3
    await directory.republish(NODE, NOW, 4, [], TTL_S)
    assert await held(directory, chain(4)) == 0
    assert await directory.publish(NODE, NOW, 5, chain(1), [], TTL_S)


async def test_unregister_removes_the_entries(directory: Directory) -> None:
    await directory.register(record(), TTL_S)
    await directory.republish(NODE, NOW, 1, chain(4), TTL_S)
    await directory.unregister(NODE, NOW)
    assert await held(directory, chain(4)) == 0
    assert not await directory.touch(NODE, NOW, TTL_S)


async def test_touch_tells_when_either_part_is_gone(directory: Directory) -> None:
    assert not await directory.touch(NODE, NOW, TTL_S)
    await directory.register(record(), TTL_S)
    assert not await directory.touch(NODE, NOW, TTL_S)
    await directory.republish(NODE, NOW, 1, [], TTL_S)
    assert await directory.touch(NODE, NOW, TTL_S)


@pytest.mark.parametrize(
    "values",
    [
        ("", 1, "prefill", "a:1"),
        ("n" * 300, 1, "prefill", "a:1"),
        ("n", 0, "prefill", "a:1"),
        ("n", 2**63, "prefill", "a:1"),
        ("n", 1, "router", "a:1"),
        ("n", 1, "decode", ""),
    ],
)
def test_records_are_checked(values: tuple[str, int, str, str]) -> None:
    with pytest.raises(ValueError):
        NodeRecord(NodeId(values[0]), Epoch(values[1]), values[2], values[3])


async def test_the_twin_can_be_away_and_forget() -> None:
    directory = MemoryDirectory()
    await directory.register(record(), TTL_S)
    directory.available = False
    with pytest.raises(DirectoryUnavailable):
        await directory.nodes()
    directory.available = True
    directory.flush()
    assert await directory.nodes() == []
