"""The operations equal their oracle: paged attention in every shape and form, KV writes, counter-based noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels import ops, reference


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["torch", "best"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes: torch, or the compiled kernels where they are."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)
    return str(request.param)


either = pytest.mark.usefixtures("implementation")


class Case:
    """A pool with random content and a ragged batch over scattered blocks; slots nobody owns hold NaN."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        num_layers: int = 3,
    ) -> None:
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        needed = [-(-context // block_size) for _, context in lens]
        num_blocks = sum(needed) + 3
        self.pool = torch.full((num_blocks, num_layers, 2, kv_heads, block_size, head_dim), math.nan, dtype=dtype)
        ids = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        self.query_starts = [0]
        self.context_lens = [context for _, context in lens]
        slots: list[int] = []
        for (query_len, context), table in zip(lens, self.tables, strict=True):
            self.query_starts.append(self.query_starts[-1] + query_len)
            places = [table[p // block_size] * block_size + p % block_size for p in range(context)]
            for slot in places[: context - query_len]:
                self.pool[slot // block_size, :, :, :, slot % block_size] = random(num_layers, 2, kv_heads, head_dim)
            slots += places[context - query_len :]
        self.slots = slots
        total = self.query_starts[-1]
        self.query = random(heads, total, head_dim)
        self.key = random(kv_heads, total, head_dim)
        self.value = random(kv_heads, total, head_dim)

    def plan(self, pool: torch.Tensor) -> ops.PagedPlan:
        width = max(map(len, self.tables))
        return ops.PagedPlan(
            pool,
            slots=torch.tensor(self.slots),
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in self.tables]),
        )

    def run(self, layer: int = 1, **options: Any) -> torch.Tensor:
        plan = self.plan(self.pool)
        ops.write_kv(plan, layer, self.key, self.value)
        return ops.paged_attention(plan, layer, self.query, self.key, self.value, scale=0.3, **options)

    def expected(self, layer: int = 1, **options: Any) -> torch.Tensor:
        pool = self.pool.clone()
        reference.write_kv(pool, layer, self.key.transpose(0, 1), self.value.transpose(0, 1), self.slots)
        return reference.paged_attention(
            self.query.transpose(0, 1),
            pool,
            layer,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.tables,
            scale=0.3,
            **options,
        )


MIXED = [(1, 1), (1, 9), (5, 5), (3, 8), (1, 4), (4, 4), (2, 13)]


@either
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 8), (5, 1, 7), (6, 2, 20), (7, 7, 33), (1, 1, 1)]
)
@pytest.mark.parametrize("layer", [0, 2])
def test_attention_of_mixed_batches(heads: int, kv_heads: int, head_dim: int, layer: int) -> None:
    case = Case(MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    torch.testing.assert_close(case.run(layer), case.expected(layer), atol=2e-5, rtol=2e-5)


@either
@pytest.mark.parametrize("query_len", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("history", [0, 1, 150])
def test_attention_of_long_chunks(query_len: int, history: int) -> None:
    case = Case([(query_len, history + query_len)], heads=2, kv_heads=1, head_dim=8, block_size=16, num_layers=2)
    torch.testing.assert_close(case.run(), case.expected(), atol=2e-5, rtol=2e-5)


SINKS = torch.tensor([1.5, -2.0, 0.0, 6.0, -30.0, 0.3])
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {"soft_cap": 0.7},
    "sinks": {"sinks": SINKS},
    "both": {"soft_cap": 3.0, "sinks": SINKS},
}


@either
@pytest.mark.parametrize("scoring", list(SCORINGS))
@pytest.mark.parametrize("window", [None, 1, 7, 8, 9, 100])
def test_windows_soft_caps_and_sinks(window: int | None, scoring: str) -> None:
    """A window counts the query itself; contexts lie below, at and above it, new and old tokens on both sides."""
    case = Case([(1, 8), (8, 8), (3, 8), (1, 9), (1, 3), (9, 9), (2, 30), (12, 25), (1, 40)])
    options = {"window": window, **SCORINGS[scoring]}
    result, expected = case.run(**options), case.expected(**options)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=2e-5)
    for name in SCORINGS[scoring] if window != 1 else ():  # a lost option would be seen
        assert (case.expected(**{**options, name: None}) - expected).abs().max() > 1e-2


@either
@pytest.mark.parametrize("scoring", list(SCORINGS))
@pytest.mark.parametrize("window", [5, 127, 128, 129, 130])
def test_windows_across_tiles(window: int, scoring: str) -> None:
    case = Case([(300, 300), (259, 330)], heads=6, kv_heads=3, head_dim=8, block_size=16, num_layers=2)
    options = {"window": window, **SCORINGS[scoring]}
    torch.testing.assert_close(case.run(**options), case.expected(**options), atol=2e-5, rtol=2e-5)


@either
@pytest.mark.parametrize("scoring", list(SCORINGS))
def test_layers_of_one_batch_may_differ_in_their_windows(scoring: str) -> None:
    case = Case(MIXED)
    plan = case.plan(case.pool)
    for layer, window in enumerate([3, None, 3]):
        expected = case.expected(layer, window=window, **SCORINGS[scoring])
        ops.write_kv(plan, layer, case.key, case.value)
        result = ops.paged_attention(
            plan, layer, case.query, case.key, case.value, scale=0.3, window=window, **SCORINGS[scoring]
        )
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=2e-5)


@either
def test_soft_caps_and_sinks_of_huge_scores_stay_finite() -> None:
    case = Case(MIXED)
    case.query *= 1e4
    options = {"soft_cap": 50.0, "sinks": SINKS * 1e3}
    torch.testing.assert_close(case.run(**options), case.expected(**options), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.run(sinks=SINKS), case.expected(sinks=SINKS), atol=2e-3, rtol=2e-3)


@either
@pytest.mark.parametrize("scoring", list(SCORINGS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, scoring: str) -> None:
    case = Case(MIXED, dtype=dtype)
    options = SCORINGS[scoring]
    torch.testing.assert_close(case.run(**options).float(), case.expected(**options).float(), atol=2e-2, rtol=2e-2)


@either
@pytest.mark.parametrize("scoring", list(SCORINGS))
@pytest.mark.parametrize("window", [None, 16, 50])
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(window: int | None, scoring: str) -> None:
    lens = [(1, 300), (40, 40), (30, 90), (1, 17), (1, 300), (70, 280)]
    options = {"window": window, **SCORINGS[scoring]}
    batch = Case(lens, heads=6, kv_heads=3, head_dim=64, block_size=16)
    together = batch.run(**options)
    width = max(map(len, batch.tables))
    for index, (query_len, context) in enumerate(lens):
        first = batch.query_starts[index]
        rows = slice(first, first + query_len)
        plan = ops.PagedPlan(
            batch.pool,
            slots=torch.tensor(batch.slots[rows]),
            query_starts=[0, query_len],
            context_lens=[context],
            block_tables=torch.tensor([batch.tables[index] + [0] * (width - len(batch.tables[index]))]),
        )
        parts = [tensor[:, rows].contiguous() for tensor in (batch.query, batch.key, batch.value)]
        alone = ops.paged_attention(plan, 1, *parts, scale=0.3, **options)
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_write_touches_its_slots_and_nothing_else(layer: int) -> None:
    case = Case([(3, 8), (1, 1)], head_dim=5)
    expected = case.pool.clone()
    reference.write_kv(expected, layer, case.key.transpose(0, 1), case.value.transpose(0, 1), case.slots)
    ops.write_kv(case.plan(case.pool), layer, case.key, case.value)
    assert torch.equal(case.pool.nan_to_num(123.0), expected.nan_to_num(123.0))


@either
def test_a_pool_may_be_narrower_than_what_is_computed_with() -> None:
    case = Case(MIXED, dtype=torch.bfloat16)
    wide = [tensor.float() for tensor in (case.query, case.key, case.value)]
    plan = case.plan(case.pool)
    ops.write_kv(plan, 1, *wide[1:])
    attended = ops.paged_attention(plan, 1, *wide, scale=0.3)
    assert attended.dtype == torch.float32
    torch.testing.assert_close(attended, case.expected().float(), atol=2e-2, rtol=2e-2)


@either
def test_offsets_beyond_32_bits() -> None:
    """A pool of more than 2^31 elements, of which only the touched pages exist."""
    num_blocks, high = 40_000, 39_999
    pool = torch.empty(num_blocks, 2, 2, 4, 64, 64, dtype=torch.float32)
    assert pool[:high].numel() > 2**31
    key, value, query = torch.randn(4, 2, 64), torch.randn(4, 2, 64), torch.randn(4, 2, 64)
    plan = ops.PagedPlan(
        pool,
        slots=torch.tensor([high * 64, high * 64 + 1]),
        query_starts=[0, 2],
        context_lens=[2],
        block_tables=torch.tensor([[high]]),
    )
    ops.write_kv(plan, 1, key, value)
    assert torch.equal(pool[high, 1, 0, :, :2], key) and torch.equal(pool[high, 1, 1, :, :2], value)
    last = ops.PagedPlan(
        pool,
        slots=torch.tensor([high * 64 + 1]),
        query_starts=[0, 1],
        context_lens=[2],
        block_tables=torch.tensor([[high]]),
    )
    both = ops.paged_attention(plan, 1, query, key, value, scale=0.1)
    one = ops.paged_attention(last, 1, query[:, 1:], key[:, 1:], value[:, 1:], scale=0.1)
    torch.testing.assert_close(one, both[1:])
