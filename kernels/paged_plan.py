"""Where one batch reads and writes in the pool: computed once, used by every layer and every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch


class PagedPlan:
    """The places of one batch. All offsets are int64.

    Args:
        pool: `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`, contiguous.
        slots: [T] int64.
        query_starts: S + 1 host integers.
        context_lens: S host integers.
        block_tables: [S, longest] int64.

    Attributes:
        pool: as given.
        slots: as given.
        query_starts: as given.
        context_lens: as given.
        block_tables: as given.
        key_rows: [kv_heads * T] int64, places of the new keys in rows of `head_dim`, see `layer_rows`.
        value_rows: the same for values.
        derived: what an implementation works out at its first call and wants again in the next layer, under its own
            keys.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        *,
        slots: torch.Tensor,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        block_tables: torch.Tensor,
    ) -> None:
        _, num_layers, _, kv_heads, block_size, head_dim = pool.shape
        if not pool.is_contiguous():
            raise ValueError("the pool must be contiguous")
        self.pool = pool
        self.slots = slots
        self.query_starts = query_starts
        self.context_lens = context_lens
        self.block_tables = block_tables
        self.derived: dict[object, object] = {}
        self._flat = pool.view(-1)
        self._layer_elements = 2 * kv_heads * block_size * head_dim
        self._block_runs = num_layers * 2 * kv_heads
        heads = torch.arange(kv_heads, device=pool.device)
        runs = (slots // block_size) * self._block_runs + heads[:, None]  # [kv_heads, T]
        self.key_rows = (runs * block_size + slots % block_size).flatten()
        self.value_rows = ((runs + kv_heads) * block_size + slots % block_size).flatten()
        self._keys_and_values = torch.arange(2 * kv_heads, device=pool.device)[:, None]

    @cached_property
    def query_starts_tensor(self) -> torch.Tensor:
        """`query_starts` as [S + 1] int64, where the pool is."""
        return torch.tensor(self.query_starts, dtype=torch.int64, device=self.pool.device)

    @cached_property
    def context_lens_tensor(self) -> torch.Tensor:
        """`context_lens` as [S] int64, where the pool is."""
        return torch.tensor(self.context_lens, dtype=torch.int64, device=self.pool.device)

    def layer_rows(self, layer: int, elements: int) -> torch.Tensor:
        """The pool from the start of `layer` in block 0, as rows of `elements`: indices are the same for each layer."""
        offset = layer * self._layer_elements
        rows = (self._flat.numel() - offset) // elements
        return self._flat.as_strided((rows, elements), (elements, 1), self._flat.storage_offset() + offset)

    def runs_of(self, sequence: int, first_block: int) -> torch.Tensor:
        """Runs of `block_size * head_dim` elements of one sequence from its `first_block` on.

        Keys of all heads, then values: [2 * kv_heads * blocks] int64, rows of `layer_rows(_, block_size * head_dim)`.
        """
        num_blocks = -(-self.context_lens[sequence] // self.pool.shape[4])
        blocks = self.block_tables[sequence, first_block:num_blocks]
        return (blocks * self._block_runs + self._keys_and_values).flatten()
