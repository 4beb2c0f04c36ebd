"""Who owns which block of a node's pool. Knows ids, references and hashes; no bytes, no tensors, no requests.

A block is in exactly one of four places:

    free         no references, content worthless
    cached       no references, content findable by its hash; the front is evicted first
    in use       at least one reference; findable too once it has been published
    quarantined  nobody's: a sender may still write into it

    free ──allocate──> in use ──release, unpublished──> free
    cached ──match──> in use ──release, published──> cached ──allocate evicts──> in use
    in use ──quarantine──> quarantined ──end_quarantine──> free

Every operation is O(1) per block. Calls that would break the books raise BlockMisuse and change nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.ids import BlockHash, BlockId


class NoFreeBlocks(Exception):
    """Fewer blocks are free or evictable than were asked for. Nothing was taken."""


class BlockMisuse(Exception):
    """A double free or the like: a mistake of the caller, found before it did harm."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by place; `total` is the sum of the others."""

    total: int
    free: int
    cached: int
    in_use: int
    quarantined: int


class BlockPool:
    """The only owner of block ids on a node. Others hold ids on loan and bring them back with `release`.

    Callers release the blocks of a sequence in one call, in order, so that of a chain the later blocks are evicted
    before the earlier ones and what stays cached stays reachable from its start. Not thread-safe; never blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        self._references = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(map(BlockId, range(num_blocks)))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._quarantined: set[BlockId] = set()
        self._changes: dict[BlockHash, bool] = {}  # True: became findable; False: is no longer

    @property
    def counts(self) -> BlockCounts:
        """Blocks by place."""
        total, free, cached, quarantined = (
            len(self._references),
            len(self._free),
            len(self._cached),
            len(self._quarantined),
        )
        return BlockCounts(total, free, cached, total - free - cached - quarantined, quarantined)

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[BlockId]:
        """Hand out `count` blocks with one reference each, evicting the oldest cached ones; all or none.

        Raises:
            NoFreeBlocks: fewer are allocatable.
        """
        if count > self.num_allocatable:
            raise NoFreeBlocks(f"{count} blocks wanted, {self.num_allocatable} of {len(self._references)} allocatable")
        taken: list[BlockId] = []
        for _ in range(count):
            if self._free:
                block_id, _ = self._free.popitem(last=False)
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._forget(block_id)
            self._references[block_id] = 1
            taken.append(block_id)
        return taken

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """Length in blocks of the longest findable prefix of a chain. Takes nothing, refreshes nothing."""
        for length, block_hash in enumerate(hashes):
            if block_hash not in self._by_hash:
                return length
        return len(hashes)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest findable prefix of a chain, one more reference on each."""
        matched = [self._by_hash[block_hash] for block_hash in hashes[: self.peek(hashes)]]
        for block_id in matched:
            if self._references[block_id] == 0:
                del self._cached[block_id]
            self._references[block_id] += 1
        return matched

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """One more reference on each; they must be in use."""
        self._require_references(block_ids, "share", dict.fromkeys(block_ids, 1))
        for block_id in block_ids:
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """One reference less on each, given in the order of their sequence; the last one frees or caches the block."""
        self._require_references(block_ids, "release", Counter(block_ids))
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                place = self._free if self._hashes[block_id] is None else self._cached
                place[block_id] = None

    def publish(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Make a full block in use findable. False when another block already has that hash; idempotent otherwise."""
        self._require_references([block_id], "publish", {block_id: 1})
        mine = self._hashes[block_id]
        if mine is not None and mine != block_hash:
            raise BlockMisuse(f"publish: block {block_id} already has another hash")
        holder = self._by_hash.setdefault(block_hash, block_id)
        if holder != block_id:
            return False
        if mine is None:
            self._hashes[block_id] = block_hash
            self._note_change(block_hash, added=True)
        return True

    def publish_or_adopt(self, block_id: BlockId, block_hash: BlockHash) -> BlockId:
        """As `publish`; where another block has that hash, the caller's reference moves to it. Returns the block held.

        So of a prefix that several compute at once one copy stays, and as everybody holds all of a chain up to its own
        last full block, no block is findable whose predecessors are not. The caller must not use `block_id` any more
        when another one comes back.
        """
        if self.publish(block_id, block_hash):
            return block_id
        (holder,) = self.match([block_hash])
        self.release([block_id])
        return holder

    def ref_count(self, block_id: BlockId) -> int:
        """References on a block."""
        self._require_known([block_id], "ref_count")
        return self._references[block_id]

    def quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Set aside blocks that a sender may still write into: one reference each, never published."""
        self._require_known(block_ids, "quarantine")
        for block_id, times in Counter(block_ids).items():
            if times != 1 or self._references[block_id] != 1 or self._hashes[block_id] is not None:
                raise BlockMisuse(f"quarantine: block {block_id} is not held by one owner and unpublished")
        for block_id in block_ids:
            self._references[block_id] = 0
            self._quarantined.add(block_id)

    def end_quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """The sender has stopped: the blocks are free again."""
        if len(set(block_ids)) != len(block_ids) or not self._quarantined.issuperset(block_ids):
            raise BlockMisuse("end_quarantine: a block is not in quarantine")
        for block_id in block_ids:
            self._quarantined.discard(block_id)
            self._free[block_id] = None

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Hashes that became findable, and that no longer are, since the last call; net."""
        changes, self._changes = self._changes, {}
        added = [block_hash for block_hash, is_added in changes.items() if is_added]
        removed = [block_hash for block_hash, is_added in changes.items() if not is_added]
        return added, removed

    def cached_hashes(self) -> list[BlockHash]:
        """Every findable hash, of blocks in use too."""
        return list(self._by_hash)

    def check_invariants(self) -> None:
        """Raise BlockMisuse when the books contradict each other. O(pool); for tests and idle loops."""
        for block_id, references in enumerate(self._references):
            block = BlockId(block_id)
            places = (block in self._free) + (block in self._cached) + (block in self._quarantined)
            if references < 0 or places != (1 if references == 0 else 0):
                raise BlockMisuse(f"block {block} has {references} references and is in {places} lists")
            block_hash = self._hashes[block]
            if block_hash is not None and self._by_hash.get(block_hash) != block:
                raise BlockMisuse(f"block {block} has a hash that does not lead back to it")
            if block_hash is not None and (block in self._free or block in self._quarantined):
                raise BlockMisuse(f"block {block} is published but neither cached nor in use")
            if block in self._cached and block_hash is None:
                raise BlockMisuse(f"block {block} is cached without a hash")
        if len(self._by_hash) != sum(block_hash is not None for block_hash in self._hashes):
            raise BlockMisuse("a hash leads to a block that does not carry it")

    def _forget(self, block_id: BlockId) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is None:
            raise BlockMisuse(f"block {block_id} is cached without a hash")
        self._hashes[block_id] = None
        del self._by_hash[block_hash]
        self._note_change(block_hash, added=False)

    def _note_change(self, block_hash: BlockHash, *, added: bool) -> None:
        if self._changes.get(block_hash, added) != added:
            del self._changes[block_hash]
        else:
            self._changes[block_hash] = added

    def _require_known(self, block_ids: Sequence[BlockId], action: str) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < len(self._references):
                raise BlockMisuse(f"{action}: block {block_id} is not of this pool")

    def _require_references(self, block_ids: Sequence[BlockId], action: str, wanted: dict[BlockId, int]) -> None:
        self._require_known(block_ids, action)
        for block_id, count in wanted.items():
            if self._references[block_id] < count:
                raise BlockMisuse(f"{action}: block {block_id} has {self._references[block_id]} references")
