"""The kernels for AMX, on a processor without it: its instructions in plain C++ show that the rest is right."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels import cpu_library
from kernels.cpu_library import CpuLibrary
from kernels.cpu_operations import product
from kernels.cpu_variants import COMPILER_FLAGS
from tests.kernels.test_cpu_operations import LONG, RAGGED, Case, randn

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
torch.set_num_threads(1)

SOURCES = Path(cpu_library.__file__).parent / "cpu"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    file = tmp_path_factory.mktemp("emulated") / "library.so"
    emulated = ["-DPDSERVE_TILES", "-DPDSERVE_EMULATED_TILES", "-DPDSERVE_LANES=16"]
    flags = [flag for flag in COMPILER_FLAGS if flag != "-O3"]
    header = Path(__file__).parent / "tile_emulation.h"
    command = ["c++", *flags, "-O0", *emulated, "-include", str(header), "-fPIC", "-shared", "-o", str(file)]
    subprocess.run([*command, str(SOURCES / "library.cpp")], check=True, timeout=110)
    return CpuLibrary("emulated", file)


@pytest.mark.parametrize(("rows", "depth"), [(16, 32), (32, 64), (48, 96), (112, 128)])
def test_products(library: CpuLibrary, rows: int, depth: int) -> None:
    weights, inputs = randn(rows, depth, seed=1, dtype=torch.bfloat16), randn(70, depth, seed=2)
    alone = torch.cat([product(library, inputs[i : i + 1], weights) for i in range(70)])
    expected = inputs.bfloat16().double() @ weights.double().T
    torch.testing.assert_close(alone.double(), expected, atol=1e-4, rtol=1e-5)
    for tokens in (2, 15, 16, 17, 32, 33, 70):
        for threads in (1, 2):
            assert torch.equal(product(library, inputs[:tokens], weights, num_threads=threads), alone[:tokens])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 32), (9, 3, 64), (7, 1, 32), (17, 1, 32)])
def test_attention(library: CpuLibrary, heads: int, kv_heads: int, head_dim: int) -> None:
    case = Case.make(RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=torch.bfloat16)
    case.query = case.query.bfloat16().float()  # then only the weights are rounded
    case.check(library, tolerance=2e-2)


@pytest.mark.parametrize("window", [None, 1, 30, 600])
def test_attention_over_several_spans(library: CpuLibrary, window: int | None) -> None:
    case = Case.make(LONG, heads=2, kv_heads=1, head_dim=32, block_size=32, dtype=torch.bfloat16)
    case.query = case.query.bfloat16().float()
    case.check(library, tolerance=2e-2, window=window, sinks=randn(2, seed=11), soft_cap=3.0)


def test_attention_has_the_same_bits_alone_and_in_any_chunks(library: CpuLibrary) -> None:
    context = 560
    case = Case.make([(context, context)], heads=6, kv_heads=2, head_dim=32, block_size=16, dtype=torch.bfloat16)
    for rules in ({}, {"window": 100}):
        at_once = case.computed(library, **rules)
        for first in (0, 1, 63, 64, 100, 511, 512, 513, 559):
            for length in (1, 2, 30):
                last = min(first + length, context)
                part = Case(case.pool, case.query[first:last], [0, last - first], [last], case.tables)
                for threads in (1, 2):
                    assert torch.equal(part.computed(library, threads, **rules), at_once[first:last]), (first, last)


def test_wide_vectors_without_tiles(library: CpuLibrary) -> None:
    """What AVX-512 does with float32, and with sizes that are no whole tiles: 16 lanes, here in halves."""
    for dtype, rows, depth in ((torch.float32, 40, 100), (torch.bfloat16, 30, 70), (torch.bfloat16, 5, 7)):
        weights, inputs = randn(rows, depth, seed=1, dtype=dtype), randn(40, depth, seed=2)
        computed = product(library, inputs, weights)
        torch.testing.assert_close(computed.double(), inputs.double() @ weights.double().T, atol=1e-4, rtol=1e-5)
        assert torch.equal(product(library, inputs[:1], weights), computed[:1])
    for head_dim, dtype in ((20, torch.bfloat16), (64, torch.float32)):
        Case.make(RAGGED, heads=6, kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype).check(library)
