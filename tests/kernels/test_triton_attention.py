"""The Triton attention equals the float64 oracle under the interpreter; a sequence's bits depend on nothing else."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from kernels import reference
from tests.kernels.triton_interpreter import dot_row_by_row, load, only_last_programs_run, results_are_sparse, sparse

triton_attention = load("triton_attention")

pytestmark = pytest.mark.usefixtures("interpreter")


class Batch:
    """Random sequences over scattered blocks of a pool whose other slots hold NaN."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        num_layers: int = 2,
    ) -> None:
        self.lens = lens
        self.generator = torch.Generator().manual_seed(5)
        self.dtype = dtype
        needed = [-(-context // block_size) for _, context in lens]
        self.pool = torch.full((sum(needed) + 2, num_layers, 2, kv_heads, block_size, head_dim), math.nan, dtype=dtype)
        ids = torch.randperm(sum(needed) + 2, generator=self.generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        self.query_starts = [0]
        slots: list[int] = []
        for (query_len, context), table in zip(lens, self.tables, strict=True):
            self.query_starts.append(self.query_starts[-1] + query_len)
            places = [table[p // block_size] * block_size + p % block_size for p in range(context)]
            for slot in places[: context - query_len]:
                self.pool[slot // block_size, :, :, :, slot % block_size] = self.random(
                    num_layers, 2, kv_heads, head_dim
                )
            slots += places[context - query_len :]
        self.slots = torch.tensor(slots, dtype=torch.int64)
        total = self.query_starts[-1]
        # Two layouts that transformers' models hand over.
        self.query = self.random(total, heads, head_dim).transpose(0, 1)
        self.key = self.random(total, kv_heads, head_dim).transpose(0, 1)
        self.value = self.random(kv_heads, total, head_dim)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    @property
    def block_tables(self) -> torch.Tensor:
        width = max(1, *map(len, self.tables))
        return torch.tensor([table + [0] * (width - len(table)) for table in self.tables])

    def plan(self, pool: torch.Tensor | None = None, **changed: Any) -> Any:
        given = {
            "slots": self.slots,
            "query_starts": self.query_starts,
            "context_lens": [context for _, context in self.lens],
            "block_tables": self.block_tables,
        }
        return triton_attention.TritonPlan(self.pool if pool is None else pool, **(given | changed))

    def run(self, layer: int = 1, **options: Any) -> torch.Tensor:
        plan = self.plan()
        triton_attention.write_kv(plan, layer, self.key, self.value)
        attended: torch.Tensor = triton_attention.paged_attention(plan, layer, self.query, scale=0.3, **options)
        return attended

    def check(self, layer: int = 1, **options: Any) -> None:
        pool = self.pool.double()
        slots = self.slots.tolist()
        reference.write_kv(pool, layer, self.key.transpose(0, 1).double(), self.value.transpose(0, 1).double(), slots)
        expected = reference.paged_attention(
            self.query.transpose(0, 1).double(),
            pool,
            layer,
            query_starts=self.query_starts,
            context_lens=[context for _, context in self.lens],
            block_tables=self.tables,
            scale=0.3,
            **options,
        )
        actual = self.run(layer, **options)
        torch.testing.assert_close(self.pool.double(), pool, equal_nan=True, rtol=0, atol=0)
        assert actual.dtype == self.dtype
        # Weights are rounded to the dtype before they meet the values, as on tensor cores everywhere.
        bound = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[self.dtype]
        torch.testing.assert_close(actual.double(), expected, atol=bound, rtol=bound)


MIXED = [(1, 1), (1, 9), (5, 5), (0, 6), (3, 8), (1, 34), (2, 2), (0, 0), (20, 47)]
SPLIT = [*MIXED, (1, 600), (4, 320)]

EVERY_PAIR = [
    (3, 3, 16, 16, torch.float16, 9, None, False),
    (3, 3, 64, 16, torch.float32, 300, 2.0, True),
    (3, 3, 64, 32, torch.float16, 300, None, True),
    (3, 3, 64, 32, torch.bfloat16, 9, 2.0, False),
    (3, 3, 80, 16, torch.bfloat16, None, 2.0, False),
    (6, 2, 16, 32, torch.bfloat16, 300, 2.0, True),
    (6, 2, 64, 16, torch.float32, 9, None, False),
    (6, 2, 80, 16, torch.float16, None, None, True),
    (8, 1, 16, 16, torch.float32, None, 2.0, False),
    (8, 1, 64, 32, torch.bfloat16, None, None, False),
    (8, 1, 80, 32, torch.float32, 300, None, False),
    (8, 1, 80, 16, torch.float16, 9, 2.0, True),
]
"""Heads, KV heads, head dimension, block size, dtype, window, soft cap, sinks: every two values meet in some case."""

ODD_SHAPES = [
    (3, 3, 16, 1, torch.float32, None, None, False),
    (14, 2, 32, 16, torch.float16, 33, None, True),
    (8, 1, 48, 7, torch.float32, None, 2.0, False),
    (5, 1, 128, 16, torch.float16, None, None, False),
    (2, 1, 256, 8, torch.bfloat16, 40, None, False),
    (33, 1, 16, 4, torch.float32, None, None, True),
]

Case = tuple[int, int, int, int, torch.dtype, int | None, float | None, bool]


@pytest.mark.parametrize("case", EVERY_PAIR + ODD_SHAPES, ids=str)
def test_equals_the_oracle_on_ragged_batches(case: Case) -> None:
    heads, kv_heads, head_dim, block_size, dtype, window, soft_cap, sinks = case
    lens = SPLIT if case in EVERY_PAIR else MIXED
    batch = Batch(lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    batch.check(window=window, soft_cap=soft_cap, sinks=2.0 * batch.random(heads) if sinks else None)


def test_every_two_values_meet() -> None:
    settings = [(heads // kv_heads, *rest) for heads, kv_heads, *rest in EVERY_PAIR]
    columns = list(zip(*settings, strict=True))
    for first, second in itertools.combinations(columns, 2):
        assert set(zip(first, second, strict=True)) == set(itertools.product(first, second))
    assert {len(set(column)) for column in columns} == {2, 3}


@pytest.mark.parametrize("context", [256, 257, 700])
def test_decode_joins_splits(context: int) -> None:
    Batch([(1, context), (1, 3)], heads=3, kv_heads=1).check()


def test_decode_takes_longer_splits_past_the_most() -> None:
    Batch([(1, 8200)], heads=2, kv_heads=1).check()


@pytest.mark.parametrize("window", [1, 31, 32, 33, 300])
def test_windows(window: int) -> None:
    batch = Batch([(1, 32), (40, 71), (1, 300), (1, 301), (1, 1)], heads=2, kv_heads=1)
    batch.check(window=window)


def test_a_window_longer_than_a_split() -> None:
    Batch([(1, 900), (1, 511)], heads=2, kv_heads=1).check(window=512)


def test_large_scores_do_not_overflow() -> None:
    batch = Batch([(1, 300), (40, 40)], dtype=torch.float16)
    batch.query = batch.query * 100
    batch.key = batch.key * 50
    batch.check()
    batch.check(soft_cap=30.0)


@pytest.mark.parametrize("options", [{}, {"window": 50, "soft_cap": 2.0}])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(options: dict[str, Any]) -> None:
    lens = [(1, 300), (20, 50), (1, 20)]
    batch = Batch(lens, heads=2, kv_heads=1)
    together = batch.run(**options)
    for index in range(len(lens)):
        first, last = batch.query_starts[index], batch.query_starts[index + 1]
        plan = triton_attention.TritonPlan(
            batch.pool,
            slots=batch.slots[first:last],
            query_starts=[0, last - first],
            context_lens=[lens[index][1]],
            block_tables=batch.block_tables[index : index + 1],
        )
        alone = triton_attention.paged_attention(plan, 1, batch.query[:, first:last], scale=0.3, **options)
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("options", [{}, {"window": 50}])
def test_a_prompt_has_the_same_bits_in_chunks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_row_by_row)
    batch = Batch([(110, 110)], heads=2, kv_heads=1)
    whole = batch.run(**options)
    parts = []
    for first, last in [(0, 31), (31, 70), (70, 110)]:
        plan = triton_attention.TritonPlan(
            batch.pool,
            slots=batch.slots[first:last],
            query_starts=[0, last - first],
            context_lens=[last],
            block_tables=batch.block_tables,
        )
        parts.append(triton_attention.paged_attention(plan, 1, batch.query[:, first:last], scale=0.3, **options))
    assert torch.equal(torch.cat(parts), whole)


def test_a_batch_for_graphs_pads_with_empty_sequences_and_any_bound() -> None:
    batch = Batch([(1, 300), (1, 40)])
    expected = batch.run()
    before = batch.pool.clone()

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.full_like(tensor, math.nan)], dim=1)

    for longest in (300, 5000):
        plan = triton_attention.TritonPlan.for_decode(
            batch.pool,
            slots=torch.cat([batch.slots, torch.tensor([-1, -1])]),
            query_starts=torch.arange(5),
            context_lens=torch.tensor([300, 40, 0, 0]),
            block_tables=torch.cat([batch.block_tables, torch.full_like(batch.block_tables, 1 << 40)]),
            longest=longest,
        )
        triton_attention.write_kv(plan, 1, padded(batch.key), padded(batch.value))
        attended = triton_attention.paged_attention(plan, 1, padded(batch.query), scale=0.3)
        assert torch.equal(attended[:2], expected)
        assert attended[2:].count_nonzero() == 0
    torch.testing.assert_close(batch.pool, before, equal_nan=True, rtol=0, atol=0)


FAR = [(5, 20), (1, 300), (1, 40)]


@pytest.mark.parametrize(("num_blocks", "num_layers"), [(2**19 + 7, 1), (7, 2**19 + 1)])
def test_offsets_in_the_pool_past_two_to_the_31(num_blocks: int, num_layers: int) -> None:
    small = Batch(FAR, heads=2, kv_heads=1, block_size=128, dtype=torch.float16, num_layers=1)
    pool = sparse(num_blocks, num_layers, *small.pool.shape[2:], dtype=torch.float16)
    first, layer = num_blocks - 7, num_layers - 1
    pool[first:, layer] = small.pool[:, 0]
    plan = small.plan(pool, slots=small.slots + first * 128, block_tables=small.block_tables + first)
    triton_attention.write_kv(plan, layer, small.key, small.value)
    expected = small.run(0)
    torch.testing.assert_close(pool[first:, layer], small.pool[:, 0], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(triton_attention.paged_attention(plan, layer, small.query, scale=0.3), expected)


def test_new_tokens_more_than_two_to_the_31_apart() -> None:
    batch = Batch(FAR, heads=2, kv_heads=1, dtype=torch.float16)
    for name in ("query", "key", "value"):
        near = getattr(batch, name)
        setattr(batch, name, sparse(*near.shape, dtype=near.dtype, stride=(16, 2**30, 1)).copy_(near))
    batch.check()


def test_results_past_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Batch(FAR, heads=2, kv_heads=1, dtype=torch.float16)
    expected = small.run()
    results_are_sparse(monkeypatch)
    first = 2**26  # tokens of nobody
    plan = small.plan(
        slots=sparse(first + 7, dtype=torch.int64), query_starts=[first + start for start in small.query_starts]
    )
    query = sparse(2, first + 7, 16, dtype=torch.float16, stride=(16, 32, 1))
    query[:, first:] = small.query
    assert torch.equal(triton_attention.paged_attention(plan, 1, query, scale=0.3)[first:], expected)


def test_sums_of_splits_past_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Batch([(1, 300), (1, 600)], heads=64, kv_heads=1, head_dim=512, dtype=torch.float16)
    only_last_programs_run(monkeypatch, 3)  # as many heads and sequences, and all splits
    expected = small.run()
    results_are_sparse(monkeypatch)
    first = 2**15  # sequences without tokens

    def after_others(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_tensor(0).expand(first, *tensor.shape[1:]), tensor])

    plan = triton_attention.TritonPlan.for_decode(
        small.pool,
        slots=after_others(small.slots),
        query_starts=torch.arange(first + 3),
        context_lens=after_others(torch.tensor([300, 600])),
        block_tables=after_others(small.block_tables),
        longest=600,
    )
    query = sparse(64, first + 2, 512, dtype=torch.float16)
    query[:, first:] = small.query
    attended = triton_attention.paged_attention(plan, 1, query, scale=0.3)
    assert torch.equal(attended[first:, -3:], expected[:, -3:])


def test_refuses_what_the_kernels_cannot_do() -> None:
    batch = Batch([(1, 4)])
    plan = batch.plan()
    with pytest.raises(ValueError, match=r"must be torch\.float32"):
        triton_attention.write_kv(plan, 0, batch.key.half(), batch.value.half())
    with pytest.raises(ValueError, match="does not fit"):
        triton_attention.paged_attention(plan, 0, batch.query[:3], scale=1.0)
    with pytest.raises(ValueError, match="does not fit 1 tokens"):
        triton_attention.paged_attention(plan, 0, batch.query.repeat(1, 2, 1), scale=1.0)
    with pytest.raises(ValueError, match="above 0"):
        triton_attention.paged_attention(plan, 0, batch.query, scale=1.0, window=0)
    with pytest.raises(ValueError, match="multiples of 16"):
        Batch([(1, 4)], head_dim=24).plan()
