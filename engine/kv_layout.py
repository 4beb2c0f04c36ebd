"""How one block of K and V lies in memory. Knows no tensors and no torch."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LAYOUT_NAME = "LKHBD"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`[num_layers, 2, kv_heads, block_size, head_dim]` of `dtype`: all layers of a block are one contiguous run.

    Attributes:
        num_layers: attention layers.
        kv_heads: key/value heads of each.
        head_dim: elements of one head.
        block_size: tokens of one block.
        dtype: torch name without the prefix.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return 2 * self.kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * self.layer_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
