"""Can another process write into a pool, is every wrong offer refused by name, and is nothing left behind?"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import AttemptFailed
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from kv_transfer.pool_memory import MEMFD_NAME, NONCE_BYTES, PeerPools, PoolMemory, TransportRefused
from kv_transfer.processes import boot_id, process_is_alive, process_start_ticks
from proto import worker_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = KvLayout(num_layers=2, kv_heads=1, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 6

OWNER = """
import sys
from google.protobuf import json_format
from kv_transfer.pool_memory import PoolMemory
pool = PoolMemory(int(sys.argv[1]))
print(json_format.MessageToJson(pool.offer(), indent=None), flush=True)
for line in sys.stdin:
    start, end = map(int, line.split())
    print(bytes(pool.view[start:end]).hex(), flush=True)
"""

WRITER = """
import sys
from google.protobuf import json_format
from engine.kv_layout import KvLayout
from kv_transfer.pool_memory import PeerPools
from kv_transfer.transports import SharedMemorySender
from proto import worker_pb2 as pb
offer = json_format.Parse(sys.argv[1], pb.SharedMemoryOffer())
layout = KvLayout(num_layers=2, kv_heads=1, head_dim=8, block_size=4, dtype="float32")
pool = PeerPools().open(offer, layout)
for index, block_id in enumerate((4, 1)):
    source = memoryview(bytes([65 + index]) * layout.block_bytes)
    for piece in SharedMemorySender(pool).send(index, source, block_id):
        print(piece.SerializeToString().hex(), flush=True)
"""


class Owner:
    """A process that owns a pool and shows parts of it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(NUM_BLOCKS * LAYOUT.block_bytes)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        fields = json.loads(self.process.stdout.readline())
        from google.protobuf import json_format

        self.offer = json_format.ParseDict(fields, pb.SharedMemoryOffer())

    def read(self, start: int, end: int) -> bytes:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{start} {end}\n")
        self.process.stdin.flush()
        return bytes.fromhex(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.kill()


@pytest.fixture
def doomed_owner() -> Iterator[Owner]:
    """For tests that kill it."""
    owner = Owner()
    yield owner
    owner.kill()


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(NUM_BLOCKS * LAYOUT.block_bytes)
    yield pool
    pool.close()


@pytest.fixture
def peers() -> Iterator[PeerPools]:
    peers = PeerPools()
    yield peers
    peers.close()


def shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def maps_of_pools() -> int:
    return Path("/proc/self/maps").read_text().count(MEMFD_NAME)


def test_another_process_writes_and_the_owner_reads(pool: PoolMemory) -> None:
    from google.protobuf import json_format

    from kv_transfer.transports import BlockReceiver

    pool.view[:] = bytes(len(pool.view))
    text = json_format.MessageToJson(pool.offer(), indent=None)
    done = subprocess.run(
        [sys.executable, "-c", WRITER, text], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    size = LAYOUT.block_bytes
    receiver = BlockReceiver(
        LAYOUT,
        kind=pb.TRANSPORT_KIND_SHARED_MEMORY,
        first_block=0,
        destinations=[pool.view[block_id * size : (block_id + 1) * size] for block_id in (4, 1)],
    )
    for line in done.stdout.split():
        receiver.accept(pb.BlockPiece.FromString(bytes.fromhex(line)))
    assert receiver.bytes_received == 2 * size
    expected = bytearray(len(pool.view))
    expected[4 * size : 5 * size] = b"A" * size
    expected[1 * size : 2 * size] = b"B" * size
    assert pool.view == expected


def test_a_killed_owner_is_noticed_and_leaves_nothing(doomed_owner: Owner, peers: PeerPools) -> None:
    files, descriptors = shared_memory_files(), open_descriptors()
    peer = peers.open(doomed_owner.offer, LAYOUT)
    assert peer.num_blocks == NUM_BLOCKS
    peer.block(BlockId(5))[:] = b"x" * LAYOUT.block_bytes
    assert doomed_owner.read(5 * LAYOUT.block_bytes, 6 * LAYOUT.block_bytes) == b"x" * LAYOUT.block_bytes
    assert peer.is_owner_alive()
    assert peers.sweep() == 0

    doomed_owner.process.kill()
    deadline = time.monotonic() + 5
    while peer.is_owner_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    # Dead, though nobody has waited for it yet: a zombie owns no memory.
    assert not peer.is_owner_alive()
    # Writing into the orphaned mapping harms nobody; opening the offer again is refused.
    peer.block(BlockId(5))[:] = b"y" * LAYOUT.block_bytes
    with pytest.raises(TransportRefused) as caught:
        peers.open(doomed_owner.offer, LAYOUT)
    assert caught.value.reason == "peer_gone"

    assert peers.sweep() == 1
    assert maps_of_pools() == 0
    with pytest.raises(AttemptFailed):
        peer.block(BlockId(0))
    assert open_descriptors() == descriptors
    assert shared_memory_files() == files


def test_an_offer_is_mapped_once(owner: Owner, peers: PeerPools) -> None:
    assert peers.open(owner.offer, LAYOUT) is peers.open(owner.offer, LAYOUT)
    assert len(peers) == 1


WRONG = [
    ("boot_id", "another boot", "other_host"),
    ("boot_id", "", "other_host"),
    ("pid", 2**22 + 1, "peer_gone"),
    ("pid", 0, "peer_gone"),
    ("pid_start_ticks", 1, "peer_gone"),
    ("fd", 2**31 + 5, "cannot_open"),
    ("fd", 0, "not_a_pool"),
    ("size_bytes", 0, "bad_pool_size"),
    ("size_bytes", NUM_BLOCKS * LAYOUT.block_bytes + 1, "bad_pool_size"),
    ("size_bytes", (NUM_BLOCKS + 1) * LAYOUT.block_bytes, "bad_pool_size"),
    ("size_bytes", (NUM_BLOCKS - 1) * LAYOUT.block_bytes, "bad_pool_size"),
    ("size_bytes", 2**62 // LAYOUT.block_bytes * LAYOUT.block_bytes, "bad_pool_size"),
    ("nonce", b"n" * NONCE_BYTES, "bad_nonce"),
    ("nonce", b"", "bad_nonce"),
]


@pytest.mark.parametrize(("name", "value", "reason"), WRONG)
def test_every_field_of_an_offer_is_checked(
    owner: Owner, peers: PeerPools, name: str, value: object, reason: str
) -> None:
    offer = pb.SharedMemoryOffer()
    offer.CopyFrom(owner.offer)
    setattr(offer, name, value)
    descriptors = open_descriptors()
    with pytest.raises(TransportRefused) as caught:
        peers.open(offer, LAYOUT)
    assert caught.value.reason == reason
    assert peers.refused == {reason: 1}
    assert (open_descriptors(), maps_of_pools(), len(peers)) == (descriptors, 0, 0)


def test_an_owner_of_another_user_is_refused(peers: PeerPools) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to start a process as another user")
    with subprocess.Popen(["sleep", "60"], user=65534) as stranger:
        try:
            start_ticks = process_start_ticks(stranger.pid)
            assert start_ticks is not None
            offer = pb.SharedMemoryOffer(boot_id=boot_id(), pid=stranger.pid, pid_start_ticks=start_ticks)
            with pytest.raises(TransportRefused) as caught:
                peers.open(offer, LAYOUT)
        finally:
            stranger.kill()
    assert caught.value.reason == "other_user"


def test_under_the_proc_of_another_namespace_nothing_is_opened(
    owner: Owner, peers: PeerPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(TransportRefused) as caught:
        peers.open(owner.offer, LAYOUT)
    assert caught.value.reason == "foreign_proc"


def test_the_wrong_fields_cover_the_message() -> None:
    assert {name for name, _, _ in WRONG} == set(pb.SharedMemoryOffer.DESCRIPTOR.fields_by_name)


def test_a_file_that_is_no_pool_is_not_opened_even_with_the_right_nonce(
    owner: Owner, peers: PeerPools, tmp_path: Path
) -> None:
    """An offer is a peer's word: it must not make us map a file of some other process for writing."""
    content = bytes(LAYOUT.block_bytes) + b"n" * NONCE_BYTES
    (tmp_path / "victim").write_bytes(content)
    unsealed = os.memfd_create(MEMFD_NAME)
    os.write(unsealed, content)
    start_ticks = process_start_ticks(os.getpid())
    with (tmp_path / "victim").open("r+b") as victim:
        for fd in (victim.fileno(), unsealed):
            offer = pb.SharedMemoryOffer(
                boot_id=owner.offer.boot_id,
                pid=os.getpid(),
                pid_start_ticks=start_ticks,
                fd=fd,
                size_bytes=LAYOUT.block_bytes,
                nonce=b"n" * NONCE_BYTES,
            )
            with pytest.raises(TransportRefused) as caught:
                peers.open(offer, LAYOUT)
            assert caught.value.reason == "not_a_pool"
    os.close(unsealed)


def test_a_peer_cannot_change_the_size(owner: Owner) -> None:
    fd = os.open(f"/proc/{owner.offer.pid}/fd/{owner.offer.fd}", os.O_RDWR)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS, 2**31])
def test_blocks_outside_the_pool_are_refused(owner: Owner, peers: PeerPools, block_id: int) -> None:
    peer = peers.open(owner.offer, LAYOUT)
    with pytest.raises(AttemptFailed) as caught:
        peer.block(BlockId(block_id))
    assert caught.value.reason == "bad_grant"


def test_the_last_block_ends_before_the_nonce(owner: Owner, peers: PeerPools) -> None:
    peer = peers.open(owner.offer, LAYOUT)
    for block_id in range(NUM_BLOCKS):
        peer.block(BlockId(block_id))[:] = b"\xff" * LAYOUT.block_bytes
    peers.close()
    assert peers.open(owner.offer, LAYOUT).num_blocks == NUM_BLOCKS


def test_closing_while_a_part_is_borrowed_unmaps_when_it_comes_back() -> None:
    pool = PoolMemory(mmap.PAGESIZE)
    borrowed = pool.view[:10]
    pool.close()
    pool.close()
    borrowed[:] = b"0123456789"
    assert maps_of_pools() == 1
    del borrowed, pool
    assert maps_of_pools() == 0


def test_sweeping_while_a_block_is_borrowed(doomed_owner: Owner, peers: PeerPools) -> None:
    block = peers.open(doomed_owner.offer, LAYOUT).block(BlockId(0))
    doomed_owner.kill()
    assert peers.sweep() == 1
    block[:] = b"z" * LAYOUT.block_bytes
    block.release()
    assert maps_of_pools() == 0


def test_offers_end_with_close(owner: Owner, peers: PeerPools) -> None:
    pool = PoolMemory(LAYOUT.block_bytes)
    offer = pool.offer()
    pool.close()
    with pytest.raises(TransportRefused):
        peers.open(offer, LAYOUT)


def test_a_process_is_told_from_another_with_its_pid() -> None:
    start_ticks = process_start_ticks(os.getpid())
    assert start_ticks is not None
    assert process_is_alive(os.getpid(), start_ticks)
    assert not process_is_alive(os.getpid(), start_ticks + 1)
    assert process_start_ticks(2**22 + 1) is None


def test_a_command_name_with_parentheses_is_read_right(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to(sys.executable)
    process = subprocess.Popen([odd, "-c", "input()"], stdin=subprocess.PIPE)
    start_ticks = process_start_ticks(process.pid)
    mine = process_start_ticks(os.getpid())
    assert start_ticks is not None and mine is not None and start_ticks >= mine
    process.communicate(b"\n")
    assert not process_is_alive(process.pid, start_ticks)
