"""K/V of preempted sequences in host memory: how much there is, and which blocks are still to be saved.

Knows no place in line and no tensors. A copy that is not complete holds the blocks that are not in it yet; each is
released when the step that saves it is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decode_node.sequence import DecodeSequence, HostCopy
from engine.block_pool import BlockPool
from engine.ids import BlockId
from engine.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Copy these blocks of a preempted sequence into `copy.data`, from its block `first_block` on."""

    sequence: DecodeSequence
    copy: HostCopy
    first_block: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class RestoreBlocks:
    """Copy the blocks of `copy` from `first_block` on back to these ids."""

    sequence: DecodeSequence
    copy: HostCopy
    first_block: int
    block_ids: tuple[BlockId, ...]


class HostCopies:
    """The books of all copies.

    Args:
        pool: owner of the block ids.
        layout: for the size of a block.
        max_bytes: of all copies together.

    Attributes:
        num_bytes: of all copies, complete or not.
        count: copies begun so far.
    """

    def __init__(self, pool: BlockPool, layout: KvLayout, max_bytes: int) -> None:
        self._pool = pool
        self._layout = layout
        self._max_bytes = max_bytes
        self._saving: list[DecodeSequence] = []
        self.num_bytes = 0
        self.count = 0

    @property
    def is_saving(self) -> bool:
        """Whether a copy still holds blocks."""
        return bool(self._saving)

    def has_room(self, num_bytes: int) -> bool:
        """Whether one more copy of this size may be made."""
        return num_bytes <= self._max_bytes - self.num_bytes

    def begin(self, sequence: DecodeSequence) -> None:
        """A sequence that has no copy is preempted: its computed blocks go over to one. There must be room."""
        num_blocks = self._layout.blocks_for(sequence.num_computed)
        unsaved, sequence.block_ids = sequence.block_ids[:num_blocks], sequence.block_ids[num_blocks:]
        sequence.host_copy = HostCopy(sequence.num_computed, num_blocks, unsaved)
        self._saving.append(sequence)
        self.num_bytes += num_blocks * self._layout.block_bytes
        self.count += 1

    def save(self, most: int) -> SaveBlocks:
        """The next step saves up to so many blocks of the oldest copy that is not complete.

        Blocks go from the end, as those of an ended sequence do: what stays findable begins at the start.
        """
        sequence = self._saving[0]
        copy = sequence.host_copy
        assert copy is not None, "only what has a copy is saved"
        taken = copy.unsaved[-most:]
        del copy.unsaved[-most:]
        self._pool.release(taken)
        if not copy.unsaved:
            self._saving.pop(0)
        return SaveBlocks(sequence, copy, len(copy.unsaved), tuple(taken))

    def lose(self, move: SaveBlocks) -> None:
        """A copy is not complete: its sequence is computed again."""
        if move.sequence.host_copy is move.copy:
            self.drop(move.sequence)

    def drop(self, sequence: DecodeSequence) -> None:
        """Its copy, if it has one, is not needed any more."""
        copy, sequence.host_copy = sequence.host_copy, None
        if copy is None:
            return
        self.num_bytes -= copy.num_blocks * self._layout.block_bytes
        if copy.unsaved:
            self._saving.remove(sequence)
            self._pool.release(copy.unsaved)
            copy.unsaved = []

    def check_invariants(self, sequences: Iterable[DecodeSequence]) -> None:
        """Raise AssertionError when the books do not balance. Args: sequences: all that may have a copy."""
        copies = {sequence: sequence.host_copy for sequence in sequences if sequence.host_copy}
        copied = sum(copy.num_blocks for copy in copies.values())
        assert self.num_bytes == copied * self._layout.block_bytes <= self._max_bytes, "host memory was lost"
        saving = {sequence for sequence, copy in copies.items() if copy.unsaved}
        assert saving == set(self._saving) and len(saving) == len(self._saving), "a copy is never finished"
