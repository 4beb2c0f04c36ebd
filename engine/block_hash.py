"""What a full KV block is called everywhere: a hash of its tokens and everything before them. Torch-free.

sha256 cut to 128 bits over typed, length-prefixed fields, so that no two different inputs share their bytes. The root
covers what makes the bytes of a block mean what they mean; two tenants or two models never share a name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

from engine.fingerprint import Fingerprint
from engine.ids import BlockHash

HASH_BYTES = 16
_DOMAIN = b"pdserve.block_hash.v1"
_TEXT, _INTEGER, _BYTES, _PARENT, _TOKENS = range(1, 6)
_ROOT_FIELDS = (
    "model_id",
    "weights_digest",
    "kv_dtype",
    "num_layers",
    "kv_heads",
    "head_dim",
    "block_size",
    "block_layout",
    "rope_digest",
)
"""Fields of a fingerprint that decide the bytes of a block. The protocol version and the number of ranks do not."""


def root_hash(fingerprint: Fingerprint, *, tenant_salt: bytes = b"", adapter_digest: bytes = b"") -> BlockHash:
    """The parent of every first block of one model, adapter and tenant."""
    content = _field(_BYTES, _DOMAIN)
    for name in _ROOT_FIELDS:
        value = getattr(fingerprint, name)
        content += _field(_TEXT, name.encode())
        content += _field(_INTEGER, b"%d" % value) if isinstance(value, int) else _field(_TEXT, str(value).encode())
    for name, digest in (("adapter_digest", adapter_digest), ("tenant_salt", tenant_salt)):
        content += _field(_TEXT, name.encode()) + _field(_BYTES, digest)
    return BlockHash(sha256(content).digest()[:HASH_BYTES])


def extend(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block of `token_ids` that follows `parent`."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(sha256(_field(_PARENT, parent) + _field(_TOKENS, packed)).digest()[:HASH_BYTES])


def hash_chain(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The hashes of the full blocks of a sequence, in order; a last block that is not full has none."""
    num_blocks = len(token_ids) // block_size
    full = token_ids[: num_blocks * block_size]
    packed = struct.pack(f"<{len(full)}I", *full)  # once for all blocks: routers hash long prompts
    stride = block_size * 4
    before_parent = struct.pack("<BI", _PARENT, HASH_BYTES)
    before_tokens = struct.pack("<BI", _TOKENS, stride)
    chain: list[BlockHash] = []
    parent = root
    for start in range(0, len(packed), stride):
        content = b"".join((before_parent, parent, before_tokens, packed[start : start + stride]))
        parent = BlockHash(sha256(content).digest()[:HASH_BYTES])
        chain.append(parent)
    return chain


def _field(kind: int, value: bytes) -> bytes:
    return struct.pack("<BI", kind, len(value)) + value
