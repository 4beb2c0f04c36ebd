"""How a pool's memory is shared with other processes of the same host, and how they open it.

The memory is anonymous (memfd): it has no name in any file system, so nothing is left behind even after kill -9. A peer
of the same host and user opens it through /proc/PID/fd/FD. The file is sealed: nobody can change its size, so no peer
can make another one fault. A nonce after the pool's bytes proves that it is the memory that was offered:

    | block 0 | block 1 | ... | block n-1 | nonce |
    0                                     size_bytes

A mapping outlives its owner. `PeerPools.sweep`, called from time to time, lets go of the pools of dead processes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import stat
from collections import Counter
from pathlib import Path

from engine.errors import AttemptFailed
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from kv_transfer.processes import boot_id, can_name_processes, process_start_ticks
from kv_transfer.processes import process_is_alive as process_is_alive
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

NONCE_BYTES = 32
MEMFD_NAME = "pdserve-kv-pool"

# From linux/fcntl.h: Python's fcntl has the F_*_SEAL(S) constants only on some builds.
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SIZE_SEALS = 0x1 | 0x2 | 0x4
"""No more seals, no shrinking, no growing."""


class TransportRefused(AttemptFailed):
    """This pair cannot use the transport; `reason` says why. The caller takes the next one."""

    reason = "transport_refused"


class PoolMemory:
    """Owner's side: the memory of one pool, open to peers until `close`."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ValueError(f"a pool needs at least 1 byte, not {num_bytes}")
        self._num_bytes = num_bytes
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, num_bytes + NONCE_BYTES)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SIZE_SEALS)
            self._map: mmap.mmap | None = mmap.mmap(self._fd, num_bytes + NONCE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        self._map[num_bytes:] = self._nonce
        whole = memoryview(self._map)
        self.view = whole[:num_bytes]
        """The pool's bytes, writable."""
        whole.release()

    def offer(self) -> pb.SharedMemoryOffer:
        """What a peer needs to open this memory."""
        assert self._fd >= 0, "offer after close"
        start_ticks = process_start_ticks(os.getpid())
        assert start_ticks is not None, "this process runs"
        return pb.SharedMemoryOffer(
            boot_id=boot_id(),
            pid=os.getpid(),
            pid_start_ticks=start_ticks,
            fd=self._fd,
            size_bytes=self._num_bytes,
            nonce=self._nonce,
        )

    def close(self) -> None:
        """Offer it no longer and let go of it. Memory still borrowed (a tensor on `view`) lives until given back."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        _release(self.view, self._map)
        self._map = None


class PeerPool:
    """Sender's side: another process's pool, mapped writable. Made by PeerPools."""

    def __init__(self, mapping: mmap.mmap, *, size_bytes: int, block_bytes: int, pid: int, start_ticks: int) -> None:
        self._map: mmap.mmap | None = mapping
        self._view = memoryview(mapping)
        self._block_bytes = block_bytes
        self._pid = pid
        self._start_ticks = start_ticks
        self.num_blocks = size_bytes // block_bytes

    def block(self, block_id: BlockId) -> memoryview:
        """The writable bytes of one block. Raises AttemptFailed for ids outside the pool and after `close`."""
        if self._map is None:
            raise TransportRefused("the peer's pool was closed", reason="peer_gone")
        if not 0 <= block_id < self.num_blocks:
            raise AttemptFailed(f"block {block_id} lies outside a pool of {self.num_blocks}", reason="bad_grant")
        start = block_id * self._block_bytes
        return self._view[start : start + self._block_bytes]

    def is_owner_alive(self) -> bool:
        return process_is_alive(self._pid, self._start_ticks)

    def close(self) -> None:
        """Unmap; where a block is still borrowed, that happens when it is given back. Idempotent."""
        if self._map is None:
            return
        _release(self._view, self._map)
        self._map = None


class PeerPools:
    """Opens offers once each and keeps the mappings. Not thread-safe; call from one thread."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int, int, int, bytes, int], PeerPool] = {}
        self._boot_id = boot_id()
        self.refused: Counter[str] = Counter()
        """Offers refused, by reason."""

    def __len__(self) -> int:
        return len(self._pools)

    def open(self, offer: pb.SharedMemoryOffer, layout: KvLayout) -> PeerPool:
        """Map the offered pool, or find it mapped. Raises TransportRefused with the reason; never blocks for long."""
        key = (offer.pid, offer.pid_start_ticks, offer.fd, offer.size_bytes, offer.nonce, layout.block_bytes)
        try:
            if offer.boot_id != self._boot_id:
                raise TransportRefused("the peer runs on another host", reason="other_host")
            if not can_name_processes():
                # The owner could never tell whether we live.
                raise TransportRefused("/proc here belongs to another PID namespace", reason="foreign_proc")
            if not process_is_alive(offer.pid, offer.pid_start_ticks):
                raise TransportRefused(f"process {offer.pid} is not the peer, or it ended", reason="peer_gone")
            _check_user(offer.pid)
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = _open(offer, layout)
                logger.info("peer_pool_opened pid=%d blocks=%d", offer.pid, pool.num_blocks)
            return pool
        except TransportRefused as error:
            self.refused[error.reason] += 1
            raise

    def sweep(self) -> int:
        """Let go of the pools of processes that have ended; how many."""
        dead = [key for key, pool in self._pools.items() if not pool.is_owner_alive()]
        for key in dead:
            self._pools.pop(key).close()
            logger.info("peer_pool_closed pid=%d", key[0])
        return len(dead)

    def close(self) -> None:
        """Let go of all. Idempotent."""
        while self._pools:
            self._pools.popitem()[1].close()


def _open(offer: pb.SharedMemoryOffer, layout: KvLayout) -> PeerPool:
    if offer.size_bytes < 1 or offer.size_bytes % layout.block_bytes:
        raise TransportRefused(
            f"a pool of {offer.size_bytes} bytes does not divide into blocks of {layout.block_bytes}",
            reason="bad_pool_size",
        )
    if len(offer.nonce) != NONCE_BYTES:
        raise TransportRefused(f"the nonce has {len(offer.nonce)} bytes, not {NONCE_BYTES}", reason="bad_nonce")
    fd = _open_memfd(offer.pid, offer.fd)
    try:
        _check_size(fd, offer.size_bytes + NONCE_BYTES)
        # The pid may have been reused between the first look at it and the opening.
        if not process_is_alive(offer.pid, offer.pid_start_ticks):
            raise TransportRefused(f"process {offer.pid} ended", reason="peer_gone")
        mapping = mmap.mmap(fd, offer.size_bytes + NONCE_BYTES)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportRefused(f"cannot map the peer's pool: {error}", reason="cannot_map") from error
    finally:
        os.close(fd)
    if not secrets.compare_digest(mapping[offer.size_bytes :], offer.nonce):
        mapping.close()
        raise TransportRefused("the nonce is not the one in memory", reason="bad_nonce")
    return PeerPool(
        mapping,
        size_bytes=offer.size_bytes,
        block_bytes=layout.block_bytes,
        pid=offer.pid,
        start_ticks=offer.pid_start_ticks,
    )


def _check_user(pid: int) -> None:
    """Root could open a stranger's pool, but the stranger may be unable to see whether root's process lives."""
    try:
        is_ours = Path(f"/proc/{pid}").stat().st_uid == Path("/proc/self").stat().st_uid
    except OSError as error:
        raise TransportRefused(f"process {pid} ended", reason="peer_gone") from error
    if not is_ours:
        raise TransportRefused("the peer runs as another user", reason="other_user")


def _open_memfd(pid: int, fd: int) -> int:
    """Open another process's pool and nothing else: an offer must not make us open or write any other file of it."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        target = str(path.readlink())
        if target != f"/memfd:{MEMFD_NAME} (deleted)":
            raise TransportRefused("the offered descriptor is no pool", reason="not_a_pool")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise TransportRefused(f"cannot open the peer's pool: {error.strerror}", reason="cannot_open") from error


def _check_size(fd: int, expected_bytes: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or fcntl.fcntl(fd, _F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
        raise TransportRefused("the offered memory is not sealed", reason="not_a_pool")
    if status.st_size != expected_bytes:
        raise TransportRefused(
            f"the offered memory has {status.st_size} bytes, not {expected_bytes}", reason="bad_pool_size"
        )


def _release(view: memoryview, mapping: mmap.mmap | None) -> None:
    assert mapping is not None
    try:
        view.release()
        mapping.close()
    except BufferError:
        # Somebody still borrows a part. The mapping ends with the last reference to it; ours goes now.
        logger.debug("mapping_still_borrowed")
