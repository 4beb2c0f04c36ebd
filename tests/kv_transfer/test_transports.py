"""Do blocks arrive whole over each transport, and is every wrong, missing, late or repeated piece refused by name?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import AttemptFailed
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from kv_transfer.pool_memory import PeerPools, PoolMemory, TransportRefused
from kv_transfer.transports import (
    MAX_PIECE_BYTES,
    BlockReceiver,
    BlockSender,
    GrpcSender,
    SentBlocks,
    SharedMemorySender,
    choose_transport,
)
from proto import worker_pb2 as pb

SMALL = KvLayout(num_layers=2, kv_heads=1, head_dim=16, block_size=4, dtype="float32")
LARGE = KvLayout(num_layers=5, kv_heads=8, head_dim=128, block_size=32, dtype="float32")
assert LARGE.block_bytes > 2 * MAX_PIECE_BYTES, "a large block comes in three pieces"

FIRST_BLOCK = 3
NUM_BLOCKS = 4
POOL_BLOCKS = 8
GRANT = [BlockId(block_id) for block_id in (6, 0, 3, 5)]


@dataclass
class Pair:
    """A sender and a receiver with the pool between them."""

    layout: KvLayout
    kind: pb.TransportKind
    memory: PoolMemory
    peers: PeerPools = field(default_factory=PeerPools)
    sent: SentBlocks = field(default_factory=SentBlocks)

    def __post_init__(self) -> None:
        numbers = random.Random(1)
        self.sources = [memoryview(numbers.randbytes(self.layout.block_bytes)) for _ in range(NUM_BLOCKS)]
        self.memory.view[:] = bytes(len(self.memory.view))
        self.sender: BlockSender = GrpcSender()
        if self.kind == pb.TRANSPORT_KIND_SHARED_MEMORY:
            self.sender = SharedMemorySender(self.peers.open(self.memory.offer(), self.layout))
        assert self.sender.kind == self.kind
        self.receiver = self.new_receiver()

    def block(self, block_id: BlockId) -> memoryview:
        size = self.layout.block_bytes
        return self.memory.view[block_id * size : (block_id + 1) * size]

    def new_receiver(self) -> BlockReceiver:
        return BlockReceiver(
            self.layout,
            kind=self.kind,
            first_block=FIRST_BLOCK,
            destinations=[self.block(block_id) for block_id in GRANT],
        )

    def pieces(self, *positions: int) -> list[pb.BlockPiece]:
        pieces = []
        for position in positions or range(NUM_BLOCKS):
            for piece in self.sender.send(FIRST_BLOCK + position, self.sources[position], GRANT[position]):
                self.sent.note(piece, layout=self.layout)
                pieces.append(pb.BlockPiece.FromString(piece.SerializeToString()))
        return pieces

    @property
    def num_tokens(self) -> int:
        return (FIRST_BLOCK + NUM_BLOCKS) * self.layout.block_size

    def complete(self) -> pb.Complete:
        return self.sent.complete(num_tokens=self.num_tokens, layout=self.layout)

    def close(self) -> None:
        self.receiver.close()
        self.peers.close()
        self.memory.close()


def make_pair(layout: KvLayout, kind: pb.TransportKind) -> Pair:
    return Pair(layout, kind, PoolMemory(POOL_BLOCKS * layout.block_bytes))


KINDS = [pb.TRANSPORT_KIND_GRPC, pb.TRANSPORT_KIND_SHARED_MEMORY]


@pytest.fixture(params=[(SMALL, KINDS[0]), (LARGE, KINDS[0]), (SMALL, KINDS[1]), (LARGE, KINDS[1])])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = make_pair(*request.param)
    yield pair
    pair.close()


@pytest.fixture
def grpc_pair() -> Iterator[Pair]:
    pair = make_pair(LARGE, pb.TRANSPORT_KIND_GRPC)
    yield pair
    pair.close()


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(AttemptFailed) as caught:
        action()
    return caught.value.reason


def test_blocks_arrive_and_nothing_else_is_touched(pair: Pair) -> None:
    for piece in pair.pieces():
        assert len(piece.payload) <= MAX_PIECE_BYTES
        pair.receiver.accept(piece)
    pair.receiver.finish(pair.complete(), num_tokens=pair.num_tokens)
    for block_id in range(POOL_BLOCKS):
        expected = pair.sources[GRANT.index(block_id)] if block_id in GRANT else bytes(pair.layout.block_bytes)
        assert pair.block(BlockId(block_id)) == expected
    assert pair.receiver.bytes_received == pair.sent.bytes_sent == NUM_BLOCKS * pair.layout.block_bytes


def test_blocks_may_come_in_any_order(pair: Pair) -> None:
    for piece in pair.pieces(2, 0, 3, 1):
        pair.receiver.accept(piece)
    pair.receiver.finish(pair.complete(), num_tokens=pair.num_tokens)


def test_a_partly_filled_last_block_counts_as_a_block(pair: Pair) -> None:
    for piece in pair.pieces():
        pair.receiver.accept(piece)
    for wrong in (pair.num_tokens + 1, pair.num_tokens - pair.layout.block_size):
        other = pair.new_receiver()
        complete = pair.sent.complete(num_tokens=wrong, layout=pair.layout)
        assert refusal(lambda other=other, c=complete, n=wrong: other.finish(c, num_tokens=n)) == "bad_complete"
    last = pair.num_tokens - pair.layout.block_size + 1
    pair.receiver.finish(pair.sent.complete(num_tokens=last, layout=pair.layout), num_tokens=last)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_send_still_finishes(kind: pb.TransportKind) -> None:
    receiver = BlockReceiver(SMALL, kind=kind, first_block=5, destinations=[])
    tokens = 5 * SMALL.block_size
    receiver.finish(SentBlocks().complete(num_tokens=tokens, layout=SMALL), num_tokens=tokens)
    assert receiver.bytes_received == 0


# What a wrong piece may look like. Each change is made to an otherwise right piece of an otherwise right transfer.
def _set(**values: object) -> Callable[[pb.BlockPiece], None]:
    def change(piece: pb.BlockPiece) -> None:
        for name, value in values.items():
            setattr(piece, name, value)

    return change


def _flip_payload(piece: pb.BlockPiece) -> None:
    piece.payload = bytes([piece.payload[0] ^ 1]) + piece.payload[1:]


def _cut_payload(piece: pb.BlockPiece) -> None:
    piece.payload = piece.payload[:-1]


def _grow_payload(piece: pb.BlockPiece) -> None:
    piece.payload = piece.payload + b"x"


def _flip_digest(piece: pb.BlockPiece) -> None:
    piece.digest = bytes([piece.digest[0] ^ 1]) + piece.digest[1:]


SHARED_CHANGES = [
    ("block_index below", _set(block_index=FIRST_BLOCK - 1), "bad_piece"),
    ("block_index above", _set(block_index=FIRST_BLOCK + NUM_BLOCKS), "bad_piece"),
    ("block_index huge", _set(block_index=2**32 - 1), "bad_piece"),
    ("digest missing", _set(digest=b""), "bad_piece"),
    ("digest short", _set(digest=b"x" * 15), "bad_piece"),
    ("digest long", _set(digest=b"x" * 17), "bad_piece"),
    ("digest other", _flip_digest, "digest_mismatch"),
]
GRPC_CHANGES = [
    ("offset too far", _set(offset_bytes=2**32 - 1), "bad_piece"),
    ("offset ahead", _set(offset_bytes=1), "bad_piece"),
    ("payload empty", _set(payload=b""), "bad_piece"),
    ("payload other", _flip_payload, "digest_mismatch"),
    ("payload short", _cut_payload, "bad_piece"),
    ("payload long", _grow_payload, "bad_piece"),
    ("payload far too long", _set(payload=bytes(MAX_PIECE_BYTES + 1)), "bad_piece"),
]
IN_PLACE_CHANGES = [
    ("offset", _set(offset_bytes=1), "bad_piece"),
    ("payload", _set(payload=b"x"), "bad_piece"),
]


@pytest.mark.parametrize(
    ("kind", "what", "change", "reason"),
    [(KINDS[0], *case) for case in SHARED_CHANGES + GRPC_CHANGES]
    + [(KINDS[1], *case) for case in SHARED_CHANGES + IN_PLACE_CHANGES],
)
def test_every_field_of_a_piece_is_checked(
    kind: pb.TransportKind, what: str, change: Callable[[pb.BlockPiece], None], reason: str
) -> None:
    pair = make_pair(SMALL, kind)
    pieces = pair.pieces()
    for piece in pieces[:2]:
        pair.receiver.accept(piece)
    change(pieces[2])
    before = bytes(pair.memory.view)
    assert refusal(lambda: pair.receiver.accept(pieces[2])) == reason
    if reason == "bad_piece":
        assert pair.memory.view == before, "a refused piece must not have been copied"
    # After the first failure nothing is accepted and the transfer cannot finish, whatever comes.
    assert refusal(lambda: pair.receiver.accept(pieces[3])) == "late_piece"
    assert refusal(lambda: pair.receiver.finish(pair.complete(), num_tokens=pair.num_tokens)) == "late_complete"
    pair.close()


def test_a_digest_before_the_last_piece_and_a_gap_between_pieces(grpc_pair: Pair) -> None:
    pieces = grpc_pair.pieces(0)
    assert [len(piece.digest) for piece in pieces] == [0, 0, 16]
    early = pb.BlockPiece()
    early.CopyFrom(pieces[0])
    early.digest = pieces[2].digest
    assert refusal(lambda: grpc_pair.new_receiver().accept(early)) == "bad_piece"
    receiver = grpc_pair.new_receiver()
    receiver.accept(pieces[0])
    assert refusal(lambda: receiver.accept(pieces[2])) == "bad_piece"


def test_a_piece_above_the_limit_is_refused_even_where_it_would_fit(grpc_pair: Pair) -> None:
    for size, fits in ((MAX_PIECE_BYTES, True), (MAX_PIECE_BYTES + 1, False)):
        piece = pb.BlockPiece(block_index=FIRST_BLOCK, payload=bytes(grpc_pair.sources[0][:size]))
        receiver = grpc_pair.new_receiver()
        if fits:
            receiver.accept(piece)
        else:
            assert refusal(lambda r=receiver, p=piece: r.accept(p)) == "bad_piece"


def test_pieces_of_several_blocks_may_interleave(grpc_pair: Pair) -> None:
    """Layer by layer, blocks grow side by side."""
    columns = [grpc_pair.pieces(position) for position in range(NUM_BLOCKS)]
    for row in zip(*columns, strict=True):
        for piece in row:
            grpc_pair.receiver.accept(piece)
    grpc_pair.receiver.finish(grpc_pair.complete(), num_tokens=grpc_pair.num_tokens)


def test_repeated_pieces_are_ignored_if_they_say_the_same(pair: Pair) -> None:
    for piece in pair.pieces():
        pair.receiver.accept(piece)
        pair.receiver.accept(piece)
    assert pair.receiver.duplicates_ignored > 0
    assert pair.receiver.bytes_received == NUM_BLOCKS * pair.layout.block_bytes
    pair.receiver.finish(pair.complete(), num_tokens=pair.num_tokens)


def test_repeated_pieces_that_say_something_else_are_refused(pair: Pair) -> None:
    pieces = pair.pieces()
    for change in (_flip_digest, _flip_payload) if pair.kind == pb.TRANSPORT_KIND_GRPC else (_flip_digest,):
        receiver = pair.new_receiver()
        for piece in pieces:
            receiver.accept(piece)
        changed = pb.BlockPiece()
        changed.CopyFrom(pieces[-1])
        change(changed)
        assert refusal(lambda r=receiver, p=changed: r.accept(p)) == "bad_piece"
        assert pair.block(GRANT[-1]) == pair.sources[-1], "what was verified stays as it was"


def test_a_missing_block_or_piece_is_noticed(pair: Pair) -> None:
    pieces = pair.pieces()
    for missing in ({len(pieces) - 1}, {i for i, piece in enumerate(pieces) if piece.block_index == FIRST_BLOCK + 1}):
        receiver = pair.new_receiver()
        for i, piece in enumerate(pieces):
            if i not in missing:
                receiver.accept(piece)
        assert refusal(lambda r=receiver: r.finish(pair.complete(), num_tokens=pair.num_tokens)) == "incomplete"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_tokens", 1, "bad_complete"),
        ("num_tokens", 0, "bad_complete"),
        ("blocks_sent", NUM_BLOCKS - 1, "bad_complete"),
        ("blocks_sent", NUM_BLOCKS + 1, "bad_complete"),
        ("num_layers", 1, "bad_complete"),
        ("num_layers", 0, "bad_complete"),
        ("digest", b"", "digest_mismatch"),
        ("digest", b"x" * 16, "digest_mismatch"),
    ],
)
def test_every_field_of_the_closing_message_is_checked(pair: Pair, name: str, value: object, reason: str) -> None:
    for piece in pair.pieces():
        pair.receiver.accept(piece)
    complete = pair.complete()
    setattr(complete, name, value)
    assert refusal(lambda: pair.receiver.finish(complete, num_tokens=pair.num_tokens)) == reason


def test_the_cases_cover_the_messages() -> None:
    assert set(pb.BlockPiece.DESCRIPTOR.fields_by_name) == {"block_index", "offset_bytes", "payload", "digest"}
    assert set(pb.Complete.DESCRIPTOR.fields_by_name) == {"num_tokens", "blocks_sent", "num_layers", "digest"}


def test_one_byte_changed_in_the_destination_before_the_piece_is_found() -> None:
    pair = make_pair(LARGE, pb.TRANSPORT_KIND_SHARED_MEMORY)
    (piece,) = pair.pieces(1)
    pair.block(GRANT[1])[LARGE.block_bytes // 2] ^= 1
    assert refusal(lambda: pair.receiver.accept(piece)) == "digest_mismatch"
    pair.close()


def test_two_blocks_swapped_by_the_sender_are_found(pair: Pair) -> None:
    """Right bytes at the wrong index: each block's digest is right, the one over all is not."""
    pieces = pair.pieces(0, 1, 2, 3)
    swapped = {FIRST_BLOCK: FIRST_BLOCK + 1, FIRST_BLOCK + 1: FIRST_BLOCK}
    if pair.kind == pb.TRANSPORT_KIND_SHARED_MEMORY:
        first = bytes(pair.block(GRANT[0]))
        pair.block(GRANT[0])[:] = pair.block(GRANT[1])
        pair.block(GRANT[1])[:] = first
    for piece in pieces:
        piece.block_index = swapped.get(piece.block_index, piece.block_index)
        pair.receiver.accept(piece)
    assert refusal(lambda: pair.receiver.finish(pair.complete(), num_tokens=pair.num_tokens)) == "digest_mismatch"


def test_after_the_end_nothing_is_accepted_or_written(pair: Pair) -> None:
    pieces = pair.pieces()
    for piece in pieces:
        pair.receiver.accept(piece)
    pair.receiver.finish(pair.complete(), num_tokens=pair.num_tokens)
    pair.memory.view[:] = bytes(len(pair.memory.view))
    assert refusal(lambda: pair.receiver.accept(pieces[0])) == "late_piece"
    assert refusal(lambda: pair.receiver.finish(pair.complete(), num_tokens=pair.num_tokens)) == "late_complete"
    assert pair.memory.view == bytes(len(pair.memory.view))


def test_a_closed_receiver_lets_go_of_the_memory(pair: Pair) -> None:
    destination = bytearray(pair.layout.block_bytes)
    receiver = BlockReceiver(pair.layout, kind=pair.kind, first_block=0, destinations=[memoryview(destination)])
    with pytest.raises(BufferError):
        destination.append(0)
    receiver.close()
    destination.append(0)
    assert refusal(lambda: receiver.accept(pb.BlockPiece())) == "late_piece"


def test_shared_memory_needs_a_granted_place(pair: Pair) -> None:
    if pair.kind != pb.TRANSPORT_KIND_SHARED_MEMORY:
        assert list(pair.sender.send(0, pair.sources[0], None))
        return
    for destination in (None, BlockId(POOL_BLOCKS), BlockId(-1)):
        assert refusal(lambda d=destination: list(pair.sender.send(0, pair.sources[0], d))) == "bad_grant"


def test_grpc_pieces_are_made_one_at_a_time(grpc_pair: Pair) -> None:
    source = bytearray(grpc_pair.sources[0])
    pieces = grpc_pair.sender.send(0, memoryview(source), None)
    next(pieces)
    source[MAX_PIECE_BYTES] ^= 1
    assert next(pieces).payload[0] == source[MAX_PIECE_BYTES]


def test_receivers_are_made_for_whole_blocks_and_known_transports() -> None:
    with pytest.raises(ValueError, match="bytes"):
        BlockReceiver(SMALL, kind=KINDS[0], first_block=0, destinations=[memoryview(bytearray(3))])
    with pytest.raises(ValueError, match="torch_distributed"):
        BlockReceiver(SMALL, kind=pb.TRANSPORT_KIND_TORCH_DISTRIBUTED, first_block=0, destinations=[])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            pb.BlockPiece,
            block_index=st.integers(0, 8) | st.integers(0, 2**32 - 1),
            offset_bytes=st.sampled_from([0, 1, 512]) | st.integers(0, 2**32 - 1),
            payload=st.binary(max_size=64) | st.just(bytes(SMALL.block_bytes)),
            digest=st.binary(max_size=20),
        ),
        max_size=10,
    ),
    st.sampled_from(KINDS),
)
def test_no_nonsense_raises_anything_else_or_completes(pieces: list[pb.BlockPiece], kind: pb.TransportKind) -> None:
    destinations = [memoryview(bytearray(b"\x01" * SMALL.block_bytes)) for _ in range(2)]
    receiver = BlockReceiver(SMALL, kind=kind, first_block=3, destinations=destinations)
    for piece in pieces:
        try:
            receiver.accept(piece)
        except AttemptFailed:
            break
    tokens = 5 * SMALL.block_size
    complete = SentBlocks().complete(num_tokens=tokens, layout=SMALL)
    complete.blocks_sent = 2
    with pytest.raises(AttemptFailed):
        receiver.finish(complete, num_tokens=tokens)


# The choice ----------------------------------------------------------------------------------------------------------


def offered(*kinds: int, offer: pb.SharedMemoryOffer | None = None) -> pb.OpenHandoff:
    return pb.OpenHandoff(transports=kinds, shared_memory=offer)


def test_shared_memory_is_taken_where_both_can() -> None:
    pair = make_pair(SMALL, pb.TRANSPORT_KIND_SHARED_MEMORY)
    chosen = choose_transport(offered(*KINDS, offer=pair.memory.offer()), pair.peers, SMALL)
    assert chosen.kind == pb.TRANSPORT_KIND_SHARED_MEMORY
    pair.close()


def test_grpc_is_taken_where_shared_memory_is_refused_or_not_offered() -> None:
    pair = make_pair(SMALL, pb.TRANSPORT_KIND_SHARED_MEMORY)
    elsewhere = pair.memory.offer()
    elsewhere.boot_id = "another host"
    for message in (
        offered(*KINDS, offer=elsewhere),
        offered(*KINDS),
        offered(pb.TRANSPORT_KIND_GRPC, offer=pair.memory.offer()),
        offered(99, pb.TRANSPORT_KIND_TORCH_DISTRIBUTED, pb.TRANSPORT_KIND_GRPC),
    ):
        assert choose_transport(message, pair.peers, SMALL).kind == pb.TRANSPORT_KIND_GRPC
    assert pair.peers.refused == {"other_host": 1}
    pair.close()


def test_no_transport_in_common_is_refused_with_names() -> None:
    peers = PeerPools()
    for kinds, text in (
        ((pb.TRANSPORT_KIND_TORCH_DISTRIBUTED,), "torch_distributed"),
        ((99,), "99"),
        ((), "none"),
    ):
        with pytest.raises(TransportRefused, match=text) as caught:
            choose_transport(offered(*kinds), peers, SMALL)
        assert caught.value.reason == "no_common_transport"
