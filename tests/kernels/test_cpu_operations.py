"""Each operation of the compiled CPU kernels against float64; and the same bits in any company."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from kernels import reference
from kernels.cpu_library import CpuLibrary
from kernels.cpu_operations import paged_attention, product

torch.set_num_threads(1)
NAN = float("nan")


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "depth"), [(1, 1), (4, 8), (5, 7), (31, 64), (33, 18), (64, 96), (130, 72), (36, 577), (64, 1024)]
)
def test_product_equals_float64(library: CpuLibrary, dtype: torch.dtype, rows: int, depth: int) -> None:
    weights, bias = randn(rows, depth, seed=1, dtype=dtype), randn(rows, seed=2)
    for tokens in (1, 2, 3, 4, 7, 16, 50):
        inputs = randn(tokens, depth, seed=tokens)
        for given in (None, bias):
            expected = inputs.double() @ weights.double().T + (0 if given is None else given.double())
            computed = product(library, inputs, weights, given)
            torch.testing.assert_close(computed.double(), expected, atol=3e-7 * depth + 1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(library: CpuLibrary, dtype: torch.dtype) -> None:
    for rows, depth in ((70, 100), (64, 1536)):
        weights, inputs = randn(rows, depth, seed=3, dtype=dtype), randn(230, depth, seed=4)
        alone = torch.cat([product(library, inputs[i : i + 1], weights) for i in range(230)])
        for tokens in (2, 3, 5, 16, 64, 230):
            for threads in (1, 2, 3):
                together = product(library, inputs[:tokens], weights, num_threads=threads)
                assert torch.equal(together, alone[:tokens]), (tokens, threads)


def test_a_product_reads_nothing_behind_its_weights(library: CpuLibrary) -> None:
    for rows, depth in ((5, 7), (3, 20), (8, 9)):
        room = torch.full((rows * depth + 64,), NAN)
        room[: rows * depth] = randn(rows * depth, seed=5)
        weights = room[: rows * depth].view(rows, depth)
        for tokens in (1, 9):
            assert product(library, randn(tokens, depth, seed=6), weights).isfinite().all()


# ----------------------------------------------------------------------------------------------------------- attention


@dataclass
class Case:
    """A pool whose unused slots hold NaN, with K and V of ragged sequences in scattered blocks."""

    pool: torch.Tensor
    query: torch.Tensor
    query_starts: list[int]
    context_lens: list[int]
    tables: torch.Tensor

    @staticmethod
    def make(
        sequences: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> Case:
        """`sequences` are (new tokens, context) pairs."""
        starts, lengths = [0], []
        for new, context in sequences:
            starts.append(starts[-1] + new)
            lengths.append(context)
        needed = [-(-context // block_size) for context in lengths]
        order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(8)).tolist()
        pool = torch.full((len(order), 2, 2, kv_heads, block_size, head_dim), NAN, dtype=dtype)
        tables = torch.zeros(len(sequences), max(needed), dtype=torch.int64)
        for row, (count, context) in enumerate(zip(needed, lengths, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(blocks)
            slots = [blocks[place // block_size] * block_size + place % block_size for place in range(context)]
            key = randn(context, kv_heads, head_dim, seed=9 + row, dtype=dtype)
            value = randn(context, kv_heads, head_dim, seed=99 + row, dtype=dtype)
            reference.write_kv(pool, 1, key, value, slots)
        query = randn(starts[-1], heads, head_dim, seed=10)
        return Case(pool, query, starts, lengths, tables)

    def computed(self, library: CpuLibrary, threads: int = 1, **rules: object) -> torch.Tensor:
        return paged_attention(
            library,
            self.pool,
            1,
            self.query,
            query_starts=torch.tensor(self.query_starts),
            context_lens=torch.tensor(self.context_lens),
            block_tables=self.tables,
            scale=0.2,
            num_threads=threads,
            **rules,  # type: ignore[arg-type]
        )

    def check(self, library: CpuLibrary, *, tolerance: float = 5e-6, **rules: object) -> None:
        expected = reference.paged_attention(
            self.query,
            self.pool,
            1,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.tables.tolist(),
            scale=0.2,
            **rules,  # type: ignore[arg-type]
        )
        computed = self.computed(library, **rules)
        torch.testing.assert_close(computed, expected, atol=tolerance, rtol=10 * tolerance)
        assert torch.equal(self.computed(library, threads=2, **rules), computed)


RAGGED = [(1, 1), (1, 16), (1, 17), (5, 5), (3, 20), (1, 64), (1, 65), (40, 130), (2, 129)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (7, 1), (8, 2)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 4), (18, 3), (64, 16), (80, 1), (128, 32)])
def test_attention_equals_float64(
    library: CpuLibrary, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = Case.make(RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    case.check(library)


@pytest.mark.parametrize("window", [1, 7, 16, 64, 65, 1000])
def test_attention_in_a_window(library: CpuLibrary, window: int) -> None:
    case = Case.make(RAGGED, heads=6, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)
    case.check(library, window=window)
    case.check(library, window=window, sinks=randn(6, seed=11))


def test_attention_with_soft_cap_and_sinks(library: CpuLibrary) -> None:
    case = Case.make(RAGGED, heads=6, kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
    case.check(library, soft_cap=0.7)
    case.check(library, sinks=randn(6, seed=11) * 3)
    case.check(library, soft_cap=2.0, sinks=randn(6, seed=11), window=20)


LONG = [(1, 511), (1, 512), (1, 513), (1, 1100), (3, 514), (20, 1030), (1, 3)]


@pytest.mark.parametrize("window", [None, 30, 600])
def test_attention_over_several_spans(library: CpuLibrary, window: int | None) -> None:
    case = Case.make(LONG, heads=2, kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32)
    case.check(library, window=window, sinks=randn(2, seed=11))


@pytest.mark.parametrize("rules", [{}, {"window": 100}], ids=["all", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_alone_and_in_any_chunks(
    library: CpuLibrary, dtype: torch.dtype, rules: dict[str, object]
) -> None:
    context = 560
    case = Case.make([(context, context)], heads=6, kv_heads=2, head_dim=20, block_size=16, dtype=dtype)
    at_once = case.computed(library, **rules)
    for first in (0, 1, 63, 64, 100, 511, 512, 513, 559):
        for length in (1, 2, 30):
            last = min(first + length, context)
            part = Case(case.pool, case.query[first:last], [0, last - first], [last], case.tables)
            for threads in (1, 2):
                assert torch.equal(part.computed(library, threads, **rules), at_once[first:last]), (first, last)


def test_scores_too_large_for_a_plain_exponential(library: CpuLibrary) -> None:
    case = Case.make([(4, 200)], heads=2, kv_heads=2, head_dim=8, block_size=16, dtype=torch.float32)
    case.query *= 1000
    case.check(library)


def test_what_is_out_of_range_is_refused(library: CpuLibrary) -> None:
    case = Case.make([(1, 20)], heads=2, kv_heads=1, head_dim=8, block_size=16, dtype=torch.float32)
    for tables, lengths in (
        (case.tables + 1000, [20]),
        (case.tables - 1000, [20]),
        (case.tables, [33]),
        (case.tables, [0]),
    ):
        broken = Case(case.pool, case.query, case.query_starts, lengths, tables)
        with pytest.raises(ValueError, match="out of range"):
            broken.computed(library)
    with pytest.raises(ValueError, match="float16"):
        Case(case.pool.half(), case.query, case.query_starts, case.context_lens, case.tables).computed(library)
    assert math.isfinite(float(case.computed(library).sum()))
