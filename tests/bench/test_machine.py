"""What a machine can do at best: measured at small sizes, and how limits are used."""

from __future__ import annotations

import math
import time

import pytest
import torch

from bench import machine
from bench.machine import MachineLimits, best_seconds, describe_machine, measure_limits, torch_threads
from tests.bench.tiny_runner import LIMITS


def test_every_limit_is_measured() -> None:
    limits = measure_limits(1, weights_bytes=1 << 20, matmul_size=64, repeats=1)
    rates = [limits.read_gb_per_s, *limits.matvec_gb_per_s.values(), *limits.matmul_gflop_per_s.values()]
    assert limits.matvec_gb_per_s.keys() == limits.matmul_gflop_per_s.keys() == {"float32", "bfloat16"}
    assert all(rate > 0 and math.isfinite(rate) for rate in rates)
    assert limits.read_gb_per_s >= max(limits.matvec_gb_per_s.values())


def test_a_type_without_instructions_is_as_fast_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the hardware can do is the limit, and nobody waits for slow products of large matrices.
    slow_sides: list[int] = []

    def slow(tokens: torch.Tensor, weights: torch.Tensor) -> None:
        slow_sides.append(len(weights))
        time.sleep(0.1)

    monkeypatch.setattr(machine, "_ways", lambda dtype: [slow] if dtype == "bfloat16" else [lambda *_: None])
    limits = measure_limits(1, dtypes=("bfloat16",), weights_bytes=1 << 14, matmul_size=64, repeats=1)
    assert limits.matmul_gflop_per_s["bfloat16"] > 2 * 64**3 / 0.1 / 1e9
    assert set(slow_sides) == {1 << 14 >> 12, 16}  # the matrix-vector product's, and the smallest square


def test_the_limit_that_binds_decides_the_time() -> None:
    assert LIMITS.balance("float32") == 10
    assert LIMITS.seconds(20e9, 100e9, "float32") == 2  # 2 s to read, 1 s to compute
    assert LIMITS.seconds(20e9, 500e9, "float32") == 5


def test_the_better_figure_of_two_measurements_counts() -> None:
    other = MachineLimits(1, 12.0, {"float32": 7.0}, {"float32": 90.0})
    assert LIMITS.best(other) == MachineLimits(1, 12.0, {"float32": 8.0}, {"float32": 100.0})


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_calls_are_repeated_until_they_took_enough() -> None:
    calls: list[int] = []
    assert best_seconds(lambda: calls.append(1), 3, enough_s=60.0) >= 0
    assert len(calls) == 4
    best_seconds(lambda: calls.append(1), 3, enough_s=0.0)
    assert len(calls) == 5


def test_the_machine_is_named() -> None:
    found = describe_machine()
    assert found.kind and found.cores >= 1
    assert f"{found.cores} cores" in str(found) and torch.__version__ in str(found)
