"""Slices become ragged tensors: positions, slots, tables and the rows whose logits are wanted."""

from __future__ import annotations

import pytest
import torch

from engine.forward_batch import SequenceSlice, build_batch
from engine.ids import BlockId


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def test_a_mixed_batch() -> None:
    batch = build_batch(
        [
            SequenceSlice([11, 12, 13], 3, blocks(7, 2, 9), "last"),
            SequenceSlice((21,), 0, blocks(4), "none"),
            SequenceSlice(range(31, 33), 2, blocks(0), "all"),
        ],
        block_size=4,
    )
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
    assert batch.positions.tolist() == [3, 4, 5, 0, 2, 3]
    assert batch.slots.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 4 * 4, 2, 3]
    assert batch.query_starts.tolist() == batch.query_start_list == [0, 3, 4, 6]
    assert batch.context_lens.tolist() == batch.context_len_list == [6, 1, 4]
    assert batch.block_tables.tolist() == [[7, 2], [4, 0], [0, 0]]
    assert batch.logits_rows.tolist() == [2, 4, 5]
    assert batch.num_tokens == 6
    assert batch.max_block_id == 7
    for tensor in (batch.token_ids, batch.positions, batch.slots, batch.block_tables, batch.logits_rows):
        assert tensor.dtype == torch.int64


def test_slots_do_not_overflow_32_bits() -> None:
    batch = build_batch([SequenceSlice([1], 0, blocks(2**31), "none")], block_size=16)
    assert batch.slots.tolist() == [2**35]


@pytest.mark.parametrize(
    "bad",
    [
        SequenceSlice([], 0, blocks(1), "last"),
        SequenceSlice([1], -1, blocks(1), "last"),
        SequenceSlice([1], 4, blocks(1), "last"),
        SequenceSlice([1, 2, 3, 4, 5], 0, blocks(1), "last"),
        SequenceSlice([1], 0, blocks(-1), "last"),
    ],
)
def test_slices_that_cannot_be_are_refused(bad: SequenceSlice) -> None:
    with pytest.raises(ValueError):
        build_batch([bad], block_size=4)
    with pytest.raises(ValueError):
        build_batch([], block_size=4)
