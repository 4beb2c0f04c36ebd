"""How the bytes of blocks move from a prefill node's pool into a decode node's, and are checked on arrival.

Senders turn one block into pieces; the receiver takes pieces and at the end compares what came with what was sent.
Which blocks move, when, and who may still write is the hand-off's business (handoff.py). torch.distributed has a place
in the protocol and is refused by name here.

The receiver believes nothing: every index, offset and size is checked before a byte is copied, it allocates nothing by
a number that a peer gave, and after the first failure it accepts nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from engine.errors import AttemptFailed
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from kv_transfer.digest import DIGEST_BYTES, block_digest, transfer_digest
from kv_transfer.pool_memory import PeerPool, PeerPools, TransportRefused
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 512 * 1024


class BlockSender(Protocol):
    """One transport to one peer."""

    @property
    def kind(self) -> pb.TransportKind: ...

    def send(self, block_index: int, source: memoryview, destination: BlockId | None) -> Iterator[pb.BlockPiece]:
        """Pieces of one block, made one at a time as they are asked for.

        `source` must not change until the iterator is exhausted. `destination` is the peer's block from its grant; only
        shared memory needs it. Raises AttemptFailed.
        """
        ...


class GrpcSender:
    """The bytes travel inside the pieces. Works between any two nodes."""

    kind = pb.TRANSPORT_KIND_GRPC

    def send(self, block_index: int, source: memoryview, destination: BlockId | None) -> Iterator[pb.BlockPiece]:
        digest = block_digest(source)
        for start in range(0, len(source), MAX_PIECE_BYTES):
            end = min(start + MAX_PIECE_BYTES, len(source))
            yield pb.BlockPiece(
                block_index=block_index,
                offset_bytes=start,
                payload=bytes(source[start:end]),
                digest=digest if end == len(source) else b"",
            )


class SharedMemorySender:
    """The bytes are written straight into the peer's granted block; the piece only says so."""

    kind = pb.TRANSPORT_KIND_SHARED_MEMORY

    def __init__(self, peer_pool: PeerPool) -> None:
        self._peer_pool = peer_pool

    def send(self, block_index: int, source: memoryview, destination: BlockId | None) -> Iterator[pb.BlockPiece]:
        if destination is None:
            raise AttemptFailed(f"the grant names no place for block {block_index}", reason="bad_grant")
        with self._peer_pool.block(destination) as target:
            target[:] = source
        yield pb.BlockPiece(block_index=block_index, digest=block_digest(source))


class SentBlocks:
    """What a sender has sent of one transfer, for the closing message. Feed it every piece."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}
        self.bytes_sent = 0

    def note(self, piece: pb.BlockPiece, *, layout: KvLayout) -> None:
        if piece.digest:
            self._digests[piece.block_index] = piece.digest
            self.bytes_sent += layout.block_bytes

    def complete(self, *, num_tokens: int, layout: KvLayout) -> pb.Complete:
        """The message that ends the transfer."""
        return pb.Complete(
            num_tokens=num_tokens,
            blocks_sent=len(self._digests),
            num_layers=layout.num_layers,
            digest=transfer_digest(self._digests[index] for index in sorted(self._digests)),
        )


def choose_transport(open: pb.OpenHandoff, peer_pools: PeerPools, layout: KvLayout) -> BlockSender:
    """The fastest transport that both sides can use. Raises TransportRefused naming what was offered."""
    refusal = ""
    if pb.TRANSPORT_KIND_SHARED_MEMORY in open.transports and open.HasField("shared_memory"):
        try:
            return SharedMemorySender(peer_pools.open(open.shared_memory, layout))
        except TransportRefused as error:
            refusal = f"; shared memory was refused: {error}"
            logger.debug("shared_memory_refused node_id=%s reason=%s", open.decode_node.node_id, error.reason)
    if pb.TRANSPORT_KIND_GRPC in open.transports:
        return GrpcSender()
    offered = ", ".join(_kind_name(kind) for kind in open.transports) or "none"
    raise TransportRefused(
        f"no transport in common: offered {offered}, here grpc and shared_memory{refusal}",
        reason="no_common_transport",
    )


def _kind_name(kind: int) -> str:
    if kind not in pb.TransportKind.values():
        return str(kind)
    return pb.TransportKind.Name(kind).removeprefix("TRANSPORT_KIND_").lower()


class BlockReceiver:
    """Destination's side of one transfer, any transport. Not thread-safe.

    Blocks may come in any order, the pieces of one block in the order of their offsets. A repeated piece that says what
    is there already is counted and ignored.

        first_block                       first_block + len(destinations)
        v                                 v
        | destination 0 | destination 1 | ...
    """

    def __init__(
        self, layout: KvLayout, *, kind: pb.TransportKind, first_block: int, destinations: Sequence[memoryview]
    ) -> None:
        if kind not in (pb.TRANSPORT_KIND_GRPC, pb.TRANSPORT_KIND_SHARED_MEMORY):
            raise ValueError(f"no receiver for transport {_kind_name(kind)}")
        if any(destination.nbytes != layout.block_bytes for destination in destinations):
            raise ValueError(f"every destination must have {layout.block_bytes} bytes")
        self._layout = layout
        self._in_place = kind == pb.TRANSPORT_KIND_SHARED_MEMORY
        self._first_block = first_block
        self._destinations: tuple[memoryview, ...] = tuple(view.cast("B") for view in destinations)
        self._arrived = [0] * len(destinations)
        self._digests: list[bytes] = [b""] * len(destinations)
        self._closed_by: str | None = None
        self.bytes_received = 0
        self.duplicates_ignored = 0

    def accept(self, piece: pb.BlockPiece) -> None:
        """Take one piece. Raises AttemptFailed; the transfer is then lost and takes no more."""
        self._check_open("late_piece")
        try:
            index = piece.block_index - self._first_block
            if not 0 <= index < len(self._destinations):
                raise AttemptFailed(f"block {piece.block_index} was not granted", reason="bad_piece")
            if self._in_place:
                self._accept_in_place(index, piece)
            else:
                self._accept_payload(index, piece)
        except AttemptFailed as error:
            self.close(error.reason)
            raise

    def finish(self, complete: pb.Complete, *, num_tokens: int) -> None:
        """Check that exactly the KV of `num_tokens` tokens is here, whole. Raises AttemptFailed."""
        self._check_open("late_complete")
        try:
            self._check_complete(complete, num_tokens)
        except AttemptFailed as error:
            self.close(error.reason)
            raise
        self.close("finished")

    def close(self, why: str = "closed") -> None:
        """Take nothing more and let go of the destinations; nothing is written through this object from now on."""
        self._closed_by = self._closed_by or why
        self._destinations = ()

    def _check_open(self, reason: str) -> None:
        if self._closed_by is not None:
            raise AttemptFailed(f"the transfer has ended already ({self._closed_by})", reason=reason)

    def _accept_payload(self, index: int, piece: pb.BlockPiece) -> None:
        start, end = piece.offset_bytes, piece.offset_bytes + len(piece.payload)
        if not 1 <= len(piece.payload) <= MAX_PIECE_BYTES or end > self._layout.block_bytes:
            raise _bad(piece, f"bytes {start} to {end} of a block of {self._layout.block_bytes}")
        is_last = end == self._layout.block_bytes
        if len(piece.digest) != (DIGEST_BYTES if is_last else 0):
            raise _bad(piece, f"a digest of {len(piece.digest)} bytes")
        target = self._destinations[index][start:end]
        if end <= self._arrived[index]:
            if target != piece.payload or piece.digest != (self._digests[index] if is_last else b""):
                raise _bad(piece, "sent twice, the second time with other content")
            self.duplicates_ignored += 1
            return
        if start != self._arrived[index]:
            raise _bad(piece, f"begins at {start} where {self._arrived[index]} is next")
        target[:] = piece.payload
        self._arrived[index] = end
        self.bytes_received += len(piece.payload)
        if is_last:
            self._check_digest(index, piece)

    def _accept_in_place(self, index: int, piece: pb.BlockPiece) -> None:
        if piece.payload or piece.offset_bytes:
            raise _bad(piece, "has a payload or an offset, which shared memory does not use")
        if len(piece.digest) != DIGEST_BYTES:
            raise _bad(piece, f"a digest of {len(piece.digest)} bytes")
        if self._arrived[index]:
            if piece.digest != self._digests[index]:
                raise _bad(piece, "sent twice, the second time with other content")
            self.duplicates_ignored += 1
            return
        self._check_digest(index, piece)
        self._arrived[index] = self._layout.block_bytes
        self.bytes_received += self._layout.block_bytes

    def _check_digest(self, index: int, piece: pb.BlockPiece) -> None:
        """What is in our memory, not what came with the message, must have the digest."""
        if block_digest(self._destinations[index]) != piece.digest:
            raise AttemptFailed(f"block {piece.block_index} is not what was sent", reason="digest_mismatch")
        self._digests[index] = piece.digest

    def _check_complete(self, complete: pb.Complete, num_tokens: int) -> None:
        expected = len(self._destinations)
        if self._layout.blocks_for(num_tokens) != self._first_block + expected:
            raise AttemptFailed(
                f"{num_tokens} tokens do not end in block {self._first_block + expected}", reason="bad_complete"
            )
        for name, theirs, ours in (
            ("tokens", complete.num_tokens, num_tokens),
            ("blocks", complete.blocks_sent, expected),
            ("layers", complete.num_layers, self._layout.num_layers),
        ):
            if theirs != ours:
                raise AttemptFailed(f"{theirs} {name} were sent, {ours} expected", reason="bad_complete")
        missing = sum(arrived < self._layout.block_bytes for arrived in self._arrived)
        if missing:
            raise AttemptFailed(f"{missing} of {expected} blocks did not arrive whole", reason="incomplete")
        if complete.digest != transfer_digest(self._digests):
            raise AttemptFailed("the digest over all blocks differs", reason="digest_mismatch")


def _bad(piece: pb.BlockPiece, what: str) -> AttemptFailed:
    return AttemptFailed(f"piece of block {piece.block_index}: {what}", reason="bad_piece")
