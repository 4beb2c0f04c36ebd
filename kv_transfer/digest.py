"""How the content of blocks is summed up so that both ends can compare it. Knows no messages and no pools."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

DIGEST_BYTES = 16


def block_digest(block: memoryview) -> bytes:
    """xxh3-128 of one whole block."""
    return xxhash.xxh3_128_digest(block)


def transfer_digest(block_digests: Iterable[bytes]) -> bytes:
    """xxh3-128 over the digests of all blocks of a transfer, in the order of their block index."""
    return xxhash.xxh3_128_digest(b"".join(block_digests))
