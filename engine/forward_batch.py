"""What one forward pass computes: ragged tokens, their positions, slots and block tables. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from engine.ids import BlockId

WantedLogits = Literal["none", "last", "all"]
"""Of which tokens of a slice logits are wanted."""


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The part of one sequence that a step computes.

        |<------- start ------->|<-- token_ids -->|
        | in the cache already  | computed now    |
        |<------------ block_ids cover ---------->|

    Attributes:
        token_ids: the tokens to compute now, at least one.
        start: position of the first of them; as many tokens are in the cache.
        block_ids: blocks of the sequence, covering `start + len(token_ids)` tokens or more.
        logits: of which of the tokens logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[BlockId]
    logits: WantedLogits


@dataclass(slots=True)
class ForwardBatch:
    """Slices laid end to end, on the host. T tokens of S sequences; R rows of logits, in the order of the slices.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64.
        slots: [T] int64, `block_id * block_size + offset` of each token's place in the pool.
        query_starts: [S + 1] int64, where each slice begins among the T tokens.
        context_lens: [S] int64, tokens in the cache after this pass.
        block_tables: [S, longest] int64, rows filled up with block 0.
        logits_rows: [R] int64, tokens whose logits are wanted.
        query_start_list: `query_starts` once more.
        context_len_list: `context_lens` once more.
        max_block_id: largest id in use, for bounds checks.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_rows: torch.Tensor
    query_start_list: list[int]
    context_len_list: list[int]
    max_block_id: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.query_start_list[-1]


def build_batch(slices: Sequence[SequenceSlice], *, block_size: int) -> ForwardBatch:
    """Lay slices end to end. Raises ValueError when a slice is empty or its blocks do not cover it."""
    if not slices:
        raise ValueError("a batch needs at least one slice")
    query_starts = [0]
    context_lens: list[int] = []
    needed: list[int] = []
    for part in slices:
        if part.start < 0 or not part.token_ids:
            raise ValueError("a slice needs at least one token and a start of 0 or more")
        context_len = part.start + len(part.token_ids)
        blocks = -(-context_len // block_size)
        if len(part.block_ids) < blocks:
            raise ValueError(f"{len(part.block_ids)} blocks of {block_size} do not cover {context_len} tokens")
        query_starts.append(query_starts[-1] + len(part.token_ids))
        context_lens.append(context_len)
        needed.append(blocks)

    token_ids = np.empty(query_starts[-1], dtype=np.int64)
    positions = np.empty_like(token_ids)
    slots = np.empty_like(token_ids)
    block_tables = np.zeros((len(slices), max(needed)), dtype=np.int64)
    logits_rows: list[int] = []
    for index, part in enumerate(slices):
        first, last = query_starts[index], query_starts[index + 1]
        token_ids[first:last] = part.token_ids
        row = block_tables[index]
        row[: needed[index]] = part.block_ids[: needed[index]]
        position = positions[first:last]
        position[:] = np.arange(part.start, context_lens[index])
        slots[first:last] = row[position // block_size] * block_size + position % block_size
        if part.logits == "last":
            logits_rows.append(last - 1)
        elif part.logits == "all":
            logits_rows.extend(range(first, last))
    if block_tables.min() < 0:
        raise ValueError("a block id is negative")

    def tensor(values: np.ndarray | list[int]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64))

    return ForwardBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        query_starts=tensor(query_starts),
        context_lens=tensor(context_lens),
        block_tables=tensor(block_tables),
        logits_rows=tensor(logits_rows),
        query_start_list=query_starts,
        context_len_list=context_lens,
        max_block_id=int(block_tables.max()),
    )
