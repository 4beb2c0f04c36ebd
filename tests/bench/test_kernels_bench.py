"""Operations of a tiny model: which are measured, what each must move and do, and what is made of a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.costs import ModelShape
from bench.kernels import KernelBench, KernelShapes, OperationReport
from kernels.cpu_library import load_library
from tests.bench.tiny_runner import LIMITS, tiny_runner

WANTED = KernelShapes(batches=(1, 3), contexts=(20,), prompts=(40,), seconds=0.0)
COMPUTES = "torch" if load_library() is None else "compiled"
HIDDEN, INTERMEDIATE, KEYS, QUERIES, VOCAB = 72, 144, 24, 72, 320


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], OperationReport]:
    folder = tmp_path_factory.mktemp("tiny")
    # A pool of just the size that is asked for is enough.
    runner = tiny_runner(folder, num_blocks=WANTED.blocks(16))
    run = runner.run
    bench = KernelBench(runner, ModelShape.read(folder), WANTED)
    found = {(report.path, report.name, report.shape): report for report in bench.reports()}
    assert runner.run == run
    return found


def test_parts_and_operations_are_all_there(reports: dict[tuple[str, str, str], OperationReport]) -> None:
    parts = {(name, shape) for path, name, shape in reports if path == "part"}
    assert parts == {
        ("layers without attention", "1 x 1"),
        ("layers without attention", "3 x 1"),
        ("layers without attention", "1 x 40"),
        ("output matrix", "1 x 1"),
        ("output matrix", "3 x 1"),
        ("attention, decode", "1 at 20"),
        ("attention, decode", "3 at 20"),
        ("attention, prefill", "1 x 40"),
    }
    operations = {name: set[str]() for path, name, _ in reports if path != "part"}
    for path, name, shape in reports:
        if path != "part":
            operations[name].add(shape)
    linears = ("query", "key or value", "attention output", "gate or up", "down")
    for name in (*(f"linear, {each}" for each in linears), "RMSNorm", "rotary", "SiLU and product", "K/V write"):
        assert operations.pop(name) == {"1", "3", "40"}
    assert operations == {
        "attention, decode": {"1 at 20", "3 at 20"},
        "attention, prefill": {"40 of 40"},
        "attention, prefill on a prefix": {"10 of 40"},
        "sampling, greedy": {"1", "3"},
        "sampling, top_p 0.9": {"1", "3"},
    }
    assert all(report.seconds > 0 for (path, *_), report in reports.items() if path != "part")
    assert all(reports["part", "layers without attention", shape].seconds > 0 for shape in ("1 x 1", "3 x 1", "1 x 40"))


@pytest.mark.parametrize(
    ("key", "num_bytes", "flops"),
    [
        (("torch", "linear, query", "3"), 4 * (HIDDEN * QUERIES + 3 * (HIDDEN + QUERIES)), 2 * 3 * HIDDEN * QUERIES),
        (("torch", "linear, key or value", "1"), 4 * (HIDDEN * KEYS + HIDDEN + KEYS), 2 * HIDDEN * KEYS),
        (("torch", "K/V write", "40"), 2 * 4 * 2 * 40 * KEYS, 0),
        (("torch", "RMSNorm", "3"), 2 * 4 * 3 * HIDDEN, 4 * 3 * HIDDEN),
        (("torch", "SiLU and product", "3"), 3 * 4 * 3 * INTERMEDIATE, 5 * 3 * INTERMEDIATE),
        (("torch", "rotary", "3"), 2 * 4 * 3 * (QUERIES + KEYS), 3 * 3 * (QUERIES + KEYS)),
        (("torch", "attention, decode", "3 at 20"), 4 * 3 * (2 * 20 * KEYS + 2 * QUERIES), 4 * 3 * 20 * QUERIES),
        ((COMPUTES, "sampling, greedy", "3"), 4 * 3 * VOCAB, 3 * VOCAB),
        (("part", "attention, decode", "3 at 20"), 2 * 4 * 3 * (2 * 20 * KEYS + 2 * QUERIES), 2 * 4 * 3 * 20 * QUERIES),
        (("part", "output matrix", "3 x 1"), 4 * (HIDDEN * VOCAB + 3 * (HIDDEN + VOCAB)), 2 * 3 * HIDDEN * VOCAB),
    ],
)
def test_what_an_operation_must_move_and_do(
    reports: dict[tuple[str, str, str], OperationReport], key: tuple[str, str, str], num_bytes: float, flops: float
) -> None:
    assert (reports[key].num_bytes, reports[key].flops) == (num_bytes, flops)


def test_compiled_kernels_do_the_same_work_where_there_are_any(
    reports: dict[tuple[str, str, str], OperationReport],
) -> None:
    compiled = {key[1:]: report for key, report in reports.items() if key[0] == "compiled"}
    expected = {key[1:] for key in reports if key[0] == "torch" and key[1].startswith(("linear", "attention"))}
    sampling = {key[1:] for key in reports if key[1].startswith("sampling")}
    assert compiled.keys() == (expected | sampling if load_library() is not None else set())
    assert all(("torch", *key) not in reports or load_library() is None for key in sampling)
    for key in expected & compiled.keys():
        report, same = compiled[key], reports["torch", *key]
        assert (report.num_bytes, report.flops) == (same.num_bytes, same.flops)


def test_layers_are_their_matrices(reports: dict[tuple[str, str, str], OperationReport]) -> None:
    weights = 2 * (HIDDEN * (2 * QUERIES + 2 * KEYS) + 3 * HIDDEN * INTERMEDIATE)
    report = reports["part", "layers without attention", "3 x 1"]
    assert (report.num_bytes, report.flops) == (4 * weights, 2 * 3 * weights)


def test_rates_and_shares_of_limits() -> None:
    rates = OperationReport("torch", "x", "1", seconds=0.5, num_bytes=1e9, flops=25e9).rates(LIMITS, "float32")
    assert rates is not None
    assert (rates.gb_per_s, rates.share_of_read, rates.gflop_per_s, rates.share_of_matmul) == (2, 0.2, 50, 0.5)
    assert rates.share_of_limit == 0.5  # arithmetic binds: 0.25 s at best
    assert OperationReport("part", "x", "1", 0.0, 1e9, 4e9).rates(LIMITS, "float32") is None


def test_values_do_not_matter_but_the_pool_is_written(tmp_path: Path) -> None:
    # Memory that was never written would be one page, read from a cache.
    runner = tiny_runner(tmp_path, num_blocks=WANTED.blocks(16))
    KernelBench(runner, ModelShape.read(tmp_path), WANTED)
    assert bool((runner.pool != 0).flatten(1).any(dim=1).all()) and bool(torch.isfinite(runner.pool).all())
