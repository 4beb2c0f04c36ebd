"""The block pool's books: races and mistakes told as stories, then random histories against a simple model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockCounts, BlockMisuse, BlockPool, NoFreeBlocks
from engine.ids import BlockHash, BlockId


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def chain(first: int, length: int) -> list[BlockHash]:
    return [block_hash(first + i) for i in range(length)]


def publish_all(pool: BlockPool, blocks: list[BlockId], hashes: list[BlockHash]) -> None:
    for block, name in zip(blocks, hashes, strict=True):
        assert pool.publish(block, name)


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(2)
    assert pool.counts == BlockCounts(total=4, free=1, cached=0, in_use=3, quarantined=0)
    assert len(pool.allocate(1)) == 1
    assert pool.allocate(0) == []


def test_released_chain_is_evicted_from_its_tail_and_oldest_chain_first() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    publish_all(pool, old, chain(10, 2))
    publish_all(pool, new, chain(20, 2))
    pool.release(old)
    pool.release(new)
    assert pool.counts.cached == 4
    assert [pool.allocate(1)[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    publish_all(pool, blocks, chain(1, 2))
    pool.release(blocks)
    pool.allocate(1)
    assert pool.peek(chain(1, 2)) == 2
    pool.allocate(1)
    assert pool.peek(chain(1, 2)) == 1


def test_match_takes_references_so_that_a_hit_is_never_evicted() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    publish_all(pool, blocks, chain(1, 2))
    pool.release(blocks)
    assert pool.match(chain(1, 3)) == blocks
    assert [pool.ref_count(b) for b in blocks] == [1, 1]
    pool.allocate(1)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(1)
    pool.release(blocks)
    assert pool.num_allocatable == 2


def test_match_stops_at_the_first_gap() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.publish(blocks[0], block_hash(1))
    pool.publish(blocks[2], block_hash(3))
    assert pool.match(chain(1, 3)) == [blocks[0]]


def test_two_sequences_that_computed_the_same_block_keep_their_own() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, block_hash(1))
    assert not pool.publish(second, block_hash(1))
    assert pool.publish(first, block_hash(1))
    pool.release([second])
    pool.release([first])
    assert pool.counts == BlockCounts(total=2, free=1, cached=1, in_use=0, quarantined=0)
    assert pool.match([block_hash(1)]) == [first]


def test_a_block_computed_twice_is_given_up_for_the_one_that_is_findable() -> None:
    pool = BlockPool(4)
    first, second, next_of_second = pool.allocate(3)
    assert pool.publish_or_adopt(first, block_hash(1)) == first
    assert pool.publish_or_adopt(second, block_hash(1)) == first
    assert [pool.ref_count(block) for block in (first, second)] == [2, 0]
    assert pool.publish_or_adopt(next_of_second, block_hash(2)) == next_of_second
    # The one that computed it first ends, and everything that can be evicted is.
    pool.release([first])
    pool.release(pool.allocate(pool.num_allocatable))
    assert pool.match(chain(1, 2)) == [first, next_of_second]


def test_a_block_that_was_released_is_the_last_to_go_again_after_a_hit() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    publish_all(pool, old, chain(10, 2))
    publish_all(pool, new, chain(20, 2))
    pool.release(old)
    pool.release(new)
    # Used last, evicted last; of a chain the tail goes first.
    pool.release(pool.match(chain(10, 2)))
    assert [pool.allocate(1)[0] for _ in range(4)] == [new[1], new[0], old[1], old[0]]


def test_double_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    pool.release([one])
    before = pool.counts
    for bad in ([one], [two, one], [two, two], [BlockId(3)], [BlockId(-1)]):
        with pytest.raises(BlockMisuse):
            pool.release(bad)
        assert pool.counts == before
        assert pool.ref_count(two) == 1
        pool.check_invariants()


def test_use_of_a_block_without_references_raises() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    for action in (pool.share, pool.quarantine):
        with pytest.raises(BlockMisuse):
            action([block])
    with pytest.raises(BlockMisuse):
        pool.publish(block, block_hash(1))
    with pytest.raises(BlockMisuse):
        pool.end_quarantine([block])


def test_a_block_keeps_its_one_hash() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, block_hash(1))
    with pytest.raises(BlockMisuse):
        pool.publish(block, block_hash(2))


def test_shared_and_published_blocks_cannot_be_quarantined() -> None:
    pool = BlockPool(3)
    shared, published, mine = pool.allocate(3)
    pool.share([shared])
    pool.publish(published, block_hash(1))
    for bad in ([mine, shared], [mine, published], [mine, mine]):
        with pytest.raises(BlockMisuse):
            pool.quarantine(bad)
        assert pool.counts.quarantined == 0


def test_quarantined_blocks_are_nobodys_until_the_sender_stopped() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.quarantine(blocks[:1])
    pool.release(blocks[1:])
    assert pool.counts == BlockCounts(total=2, free=1, cached=0, in_use=0, quarantined=1)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(2)
    with pytest.raises(BlockMisuse):
        pool.release(blocks[:1])
    pool.end_quarantine(blocks[:1])
    assert sorted(pool.allocate(2)) == sorted(blocks)


def test_changes_are_net() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, block_hash(1))
    assert pool.take_changes() == ([block_hash(1)], [])
    pool.release([block])
    blocks = pool.allocate(2)  # evicts hash 1
    pool.publish(blocks[0], block_hash(2))
    pool.publish(blocks[1], block_hash(1))  # back before anyone was told
    assert pool.take_changes() == ([block_hash(2)], [])
    pool.release(blocks)
    pool.allocate(2)
    added, removed = pool.take_changes()
    assert added == [] and sorted(removed) == chain(1, 2)
    assert pool.take_changes() == ([], [])
    assert pool.cached_hashes() == []


class PoolHistory(RuleBasedStateMachine):
    """Random histories of several owners; the model is a counter of references and a map of hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.owners: list[list[BlockId]] = []
        self.quarantined: list[BlockId] = []
        self.directory: set[BlockHash] = set()

    def references(self) -> Counter[BlockId]:
        return Counter(block for owner in self.owners for block in owner)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        in_use = set(self.references())
        fits = count <= 7 - len(in_use) - len(self.quarantined)
        if not fits:
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not in_use.intersection(blocks) and not set(self.quarantined).intersection(blocks)
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(self.owners.pop(owner))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.pool.share(owner)
        self.owners.append(list(owner))

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), first=st.integers(0, 9))
    def publish(self, data: st.DataObject, first: int) -> None:
        owner = data.draw(st.sampled_from([o for o in self.owners if o]))
        for offset, block in enumerate(owner):
            try:
                became = self.pool.publish(block, block_hash(first + offset))
            except BlockMisuse:
                continue  # it had another hash; the invariants below prove that nothing changed
            if became:
                assert self.pool.peek([block_hash(first + offset)]) == 1

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), first=st.integers(0, 9))
    def publish_or_adopt(self, data: st.DataObject, first: int) -> None:
        owner = data.draw(st.sampled_from([o for o in self.owners if o]))
        for offset, block in enumerate(owner):
            try:
                held = self.pool.publish_or_adopt(block, block_hash(first + offset))
            except BlockMisuse:
                continue
            owner[offset] = held
            self.pool.check_invariants()

    @rule(first=st.integers(0, 9), length=st.integers(1, 4))
    def match(self, first: int, length: int) -> None:
        expected = self.pool.peek(chain(first, length))
        blocks = self.pool.match(chain(first, length))
        assert len(blocks) == expected
        assert not set(self.quarantined).intersection(blocks)
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        try:
            self.pool.quarantine(self.owners[index])
        except BlockMisuse:
            return
        self.quarantined += self.owners.pop(index)

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.pool.end_quarantine(self.quarantined)
        self.quarantined = []

    @rule(block=st.integers(0, 6))
    def release_of_what_nobody_holds(self, block: int) -> None:
        if self.references()[BlockId(block)] == 0:
            with pytest.raises(BlockMisuse):
                self.pool.release([BlockId(block)])

    @rule()
    def tell_the_directory(self) -> None:
        added, removed = self.pool.take_changes()
        assert not self.directory.intersection(added) and self.directory.issuperset(removed)
        self.directory = (self.directory - set(removed)) | set(added)
        assert self.directory == set(self.pool.cached_hashes())

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        references = self.references()
        for block in map(BlockId, range(7)):
            assert self.pool.ref_count(block) == references[block]
        counts = self.pool.counts
        assert counts.in_use == len(references)
        assert counts.quarantined == len(self.quarantined)
        assert counts.total == counts.free + counts.cached + counts.in_use + counts.quarantined == 7
        assert self.pool.num_allocatable == counts.free + counts.cached


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
