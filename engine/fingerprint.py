"""What a model is, as far as KV blocks and block hashes care. Torch-free; knows no wire format."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.kv_layout import LAYOUT_NAME, KvLayout

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal on two nodes exactly when KV of one means the same on the other. Mirrors the wire message."""

    protocol_version: int
    model_id: str
    weights_digest: str
    kv_dtype: str
    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    block_layout: str
    rope_digest: str
    tensor_parallel_size: int

    @classmethod
    def of(cls, layout: KvLayout, *, model_id: str, weights_digest: str, rope_digest: str) -> Fingerprint:
        """The fingerprint of a model whose KV lies in `layout`."""
        return cls(
            protocol_version=PROTOCOL_VERSION,
            model_id=model_id,
            weights_digest=weights_digest,
            kv_dtype=layout.dtype,
            num_layers=layout.num_layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            block_layout=LAYOUT_NAME,
            rope_digest=rope_digest,
            tensor_parallel_size=1,
        )

    def difference(self, other: Fingerprint) -> str | None:
        """Name the first field that differs, with both values; None when equal."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} is {mine!r} here and {theirs!r} there"
        return None
