"""Blocks move between pool and staging without a byte changed, under the interpreter."""

from __future__ import annotations

import math
from unittest.mock import MagicMock

import pytest
import torch

from tests.kernels.triton_interpreter import load, sparse

triton_blocks = load("triton_blocks")

pytestmark = pytest.mark.usefixtures("interpreter")


def pool_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 2) -> torch.Tensor:
    numbers = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(seed))
    # Any bits, NaN among them.
    return numbers.to(torch.int16).view(dtype) if dtype != torch.float32 else numbers.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 2, 2, 3, 4, 16), (9, 1, 2, 1, 1, 16), (5, 3, 2, 4, 16, 32)])
@pytest.mark.parametrize("ids", [[], [4], [3, 0, 4]])
def test_gathered_blocks_come_back_where_they_are_scattered(
    shape: tuple[int, ...], dtype: torch.dtype, ids: list[int]
) -> None:
    pool = pool_of(shape, dtype)
    block_ids = torch.tensor(ids, dtype=torch.int64)
    staging = torch.empty(len(ids), *shape[1:], dtype=dtype)
    triton_blocks.gather_blocks(pool, block_ids, staging)
    same_bits(staging, pool[block_ids])

    other = pool_of(shape, dtype, seed=3)
    expected = other.clone()
    expected[block_ids] = staging
    triton_blocks.scatter_blocks(staging, other, block_ids)
    same_bits(other, expected)


def test_a_range_of_layers_moves() -> None:
    pool = pool_of((6, 4, 2, 2, 3, 16), torch.bfloat16)
    ids = torch.tensor([5, 1])
    staging = torch.empty(2, 2, 2, 2, 3, 16, dtype=torch.bfloat16)
    triton_blocks.gather_blocks(pool[:, 1:3], ids, staging)
    same_bits(staging, pool[ids, 1:3])
    target = torch.zeros_like(pool)
    triton_blocks.scatter_blocks(staging, target[:, 1:3], ids)
    same_bits(target[ids, 1:3], staging)
    assert target[ids, 0].float().count_nonzero() == 0
    assert target[ids, 3].float().count_nonzero() == 0


def test_blocks_are_copied_within_the_pool() -> None:
    pool = pool_of((6, 2, 2, 1, 2, 16), torch.bfloat16)
    expected = pool.clone()
    expected[[3, 5]] = pool[[0, 2]]
    triton_blocks.copy_blocks(pool, torch.tensor([0, 2]), torch.tensor([3, 5]))
    same_bits(pool, expected)


def test_offsets_past_two_to_the_31() -> None:
    near = pool_of((3, 1, 2, 1, 4, 16), torch.bfloat16)
    pool, staging = (sparse(*near.shape, dtype=near.dtype, stride=(2**32, 128, 64, 64, 16, 1)) for _ in range(2))
    pool.copy_(near)
    ids = torch.tensor([2, 0, 1])
    triton_blocks.gather_blocks(pool, ids, staging)
    same_bits(staging, near[ids])
    pool.zero_()
    triton_blocks.scatter_blocks(staging, pool, ids)
    same_bits(pool, near)
    triton_blocks.copy_blocks(pool, torch.tensor([2]), torch.tensor([0]))
    triton_blocks.copy_blocks(pool, torch.tensor([1]), torch.tensor([2]))
    same_bits(pool, near[[2, 1, 1]])


def test_more_blocks_than_the_second_axis_of_a_grid_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = MagicMock()
    monkeypatch.setattr(triton_blocks, "_move_kernel", kernel)
    pool = torch.empty(70_000, 2, 2, 1, 16, 128, device="meta")  # blocks of two chunks
    ids = torch.empty(70_000, dtype=torch.int64, device="meta")
    triton_blocks.gather_blocks(pool, ids, pool)
    triton_blocks.scatter_blocks(pool, pool, ids)
    triton_blocks.copy_blocks(pool, ids, ids)
    grids = [call.args[0] for call in kernel.__getitem__.call_args_list]
    assert len(grids) == 3
    for grid in grids:
        assert math.prod(grid) == 2 * 70_000
        assert max(grid[1:], default=1) <= 65535


def test_refuses_what_does_not_fit() -> None:
    pool = pool_of((4, 2, 2, 1, 2, 16), torch.bfloat16)
    ids = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="staging holds 3"):
        triton_blocks.gather_blocks(pool, ids, torch.empty(3, *pool.shape[1:], dtype=pool.dtype))
    with pytest.raises(ValueError, match="do not fit"):
        triton_blocks.gather_blocks(pool, ids, torch.empty(2, *pool.shape[1:], dtype=torch.float16))
    with pytest.raises(ValueError, match="one contiguous run"):
        triton_blocks.gather_blocks(pool[:, :, :1], ids, torch.empty(2, 2, 1, 1, 2, 16, dtype=pool.dtype))
    with pytest.raises(ValueError, match="as many on both sides"):
        triton_blocks.copy_blocks(pool, ids, ids[:1])


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))
