"""Compiles every Triton kernel for named GPUs, without one, and says what each takes: registers, shared memory, spills.

`python -m kernels.triton_report` prints one table of the full grid of cases; `--quick` takes a few of each, `--json`
also writes rows for a program to read. The host functions themselves run, on tensors without data and under a driver
that only names a GPU, so what is compiled is what they would launch, specialisations included.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels import triton_attention, triton_blocks, triton_elementwise, triton_sampling

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program can have, by compute capability (CUDA C++ Programming Guide, table 30)."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What one compiled kernel takes.

    Attributes:
        kernel: its name.
        case: what it was compiled for.
        capability: 80, 90 or 100.
        registers: of a thread.
        shared_bytes: of a program.
        spill_bytes: stored to and loaded from local memory by a thread.
        fused_float64: whether float64 multiply-adds were fused, which would change drawn tokens.
    """

    kernel: str
    case: str
    capability: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    fused_float64: bool


class _NamedGpu:
    """A driver of Triton's for a GPU that is not there: enough to compile, not to launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    launch: Callable[[], object]


def report(capability: int, *, quick: bool = False) -> list[KernelReport]:
    """Compile every case for one GPU, which Triton then takes for the process's own: call it in one made for that."""
    rows = []
    compiled: list[tuple[str, Any, str]] = []
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> object:
        log = io.StringIO()
        with redirect_stdout(log):
            result = run(kernel, *arguments, grid=grid, warmup=True, **options)
        compiled.append((kernel.__name__, result, log.getvalue()))
        return result

    triton.JITFunction.run = compile_only
    triton.knobs.nvidia.dump_ptxas_log = True
    # The log is written while compiling; what is cached has none.
    triton.knobs.compilation.always_compile = True
    triton.runtime.driver.set_active(_NamedGpu(capability))
    try:
        for case in cases(quick=quick, capability=capability):
            compiled.clear()
            case.launch()
            # Without a log a case before took the very same code.
            rows += [_row(kernel, case.name, capability, result, log) for kernel, result, log in compiled if log]
    finally:
        triton.JITFunction.run = run
    return rows


def _row(kernel: str, case: str, capability: int, result: Any, log: str) -> KernelReport:
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if registers is None or len(spills) < 2:
        raise RuntimeError(f"ptxas says nothing about {kernel}: {log!r}")
    return KernelReport(
        kernel=kernel.strip("_"),
        case=case,
        capability=capability,
        registers=int(registers[1]),
        shared_bytes=result.metadata.shared,
        spill_bytes=sum(map(int, spills)),
        fused_float64="fma.rn.f64" in result.asm["ptx"],
    )


def cases(*, quick: bool, capability: int) -> list[_Case]:
    """Every kernel over the shapes that models have.

    With `quick` each width of tile, dtype and feature once, on the GPU with the least shared memory; fewer on others.
    """
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    if quick:
        every = _attention_cases(9, 3, 64, 16, bf16, window=4096, soft_cap=50.0, sinks=True)
        every += _attention_cases(64, 8, 96, 32, fp32)
        if SHARED_LIMITS[capability] == min(SHARED_LIMITS.values()):
            every += _attention_cases(32, 32, 80, 16, fp16)
            every += _attention_cases(16, 1, 256, 16, bf16)
            every += _attention_cases(8, 2, 512, 16, bf16)
    else:
        every = _attention_cases(9, 3, 64, 16, bf16)  # SmolLM2-135M
        every += _attention_cases(14, 2, 64, 16, bf16)  # Qwen2.5-0.5B
        every += _attention_cases(32, 32, 80, 16, fp16)  # Phi-2
        every += _attention_cases(32, 32, 96, 32, bf16)  # Phi-3 mini
        every += _attention_cases(32, 8, 128, 16, bf16)  # Llama 3 8B
        every += _attention_cases(28, 4, 128, 64, fp16)  # Qwen2.5-7B
        every += _attention_cases(32, 8, 128, 16, bf16, window=4096)  # Mistral
        every += _attention_cases(64, 8, 64, 16, bf16, window=128, sinks=True)  # gpt-oss
        every += _attention_cases(16, 1, 256, 16, bf16)  # Gemma
        every += _attention_cases(8, 4, 256, 16, bf16, window=4096, soft_cap=50.0)  # Gemma 2
        every += _attention_cases(8, 2, 512, 16, bf16)
        every += _attention_cases(9, 3, 64, 16, fp32)
        every += _attention_cases(64, 8, 128, 16, fp32)
        every += _attention_cases(8, 4, 256, 16, fp32, window=4096, soft_cap=50.0)
    every += [_Case("[32, 2, 2, 8, 16, 128] bfloat16", partial(_move_blocks, bf16))]
    for width, dtype in (
        [(4096, bf16), (2048, fp32)] if quick else [(576, bf16), (4096, bf16), (16384, fp16), (2048, fp32)]
    ):
        every.append(_Case(f"width {width} {_short(dtype)}", partial(_elementwise, width, dtype)))
    for heads, head_dim, rotated, dtype in [(32, 128, 128, bf16), (32, 80, 32, fp16), (9, 64, 64, fp32)]:
        name = f"{heads} heads of {head_dim}, {rotated} turned {_short(dtype)}"
        every.append(_Case(name, partial(_rotary, heads, head_dim, rotated, dtype)))
    every += [_Case("vocabulary 151936", partial(_sample, 151936))]
    return every


def _attention_cases(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> list[_Case]:
    features = [name for name, on in (("window", window), ("cap", soft_cap), ("sinks", sinks)) if on]
    name = " ".join([f"{heads}/{kv_heads} x {head_dim}, blocks of {block_size}, {_short(dtype)}", *features])

    def launch(kind: str) -> None:
        pool = torch.empty(64, 2, 2, kv_heads, block_size, head_dim, dtype=dtype, device="meta")
        tokens = 1 if kind == "decode" else 512
        plan = triton_attention.TritonPlan(
            pool,
            slots=torch.empty(tokens, dtype=torch.int64, device="meta"),
            query_starts=[0, tokens],
            context_lens=[1024],
            block_tables=torch.empty(1, 64, dtype=torch.int64, device="meta"),
        )
        query = torch.empty(tokens, heads, head_dim, dtype=dtype, device="meta").transpose(0, 1)
        new = torch.empty(tokens, kv_heads, head_dim, dtype=dtype, device="meta").transpose(0, 1)
        if kind == "write":
            triton_attention.write_kv(plan, 1, new, new)
            return
        triton_attention.paged_attention(
            plan,
            1,
            query,
            scale=0.1,
            window=window,
            soft_cap=soft_cap,
            sinks=torch.empty(heads, dtype=dtype, device="meta") if sinks else None,
        )

    return [_Case(name, partial(launch, kind)) for kind in ("write", "prefill", "decode")]


def _move_blocks(dtype: torch.dtype) -> None:
    pool = torch.empty(64, 32, 2, 8, 16, 128, dtype=dtype, device="meta")
    ids = torch.empty(8, dtype=torch.int64, device="meta")
    staging = torch.empty(8, *pool.shape[1:], dtype=dtype, device="meta")
    triton_blocks.gather_blocks(pool, ids, staging)
    triton_blocks.scatter_blocks(staging, pool, ids)
    triton_blocks.copy_blocks(pool, ids, ids)


def _elementwise(width: int, dtype: torch.dtype) -> None:
    rows = torch.empty(64, width, dtype=dtype, device="meta")
    weight = torch.empty(width, dtype=dtype, device="meta")
    triton_elementwise.rms_norm(rows, weight, epsilon=1e-6)
    triton_elementwise.rms_norm(rows, weight, epsilon=1e-6, residual=rows)
    triton_elementwise.rms_norm(rows, weight, epsilon=1e-6, weight_offset=1.0, rounds_first=False)
    triton_elementwise.silu_mul(rows, rows)


def _rotary(heads: int, head_dim: int, rotated: int, dtype: torch.dtype) -> None:
    query = torch.empty(64, heads, head_dim, dtype=dtype, device="meta")
    angles = torch.empty(64, rotated, dtype=dtype, device="meta")
    triton_elementwise.rotary(query, query[:, : max(1, heads // 4)], angles, angles)


def _sample(vocab_size: int) -> None:
    scores = torch.empty(64, vocab_size, dtype=torch.float32, device="meta")
    triton_sampling.sample_gumbel(scores, torch.empty(64, 2, dtype=torch.int64, device="meta"))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Print the table or its rows; fails when a kernel does not compile or wants more shared memory than there is."""
    parser = argparse.ArgumentParser(prog="python -m kernels.triton_report", description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, action="append", choices=sorted(SHARED_LIMITS))
    parser.add_argument("--quick", action="store_true", help="a few cases of each kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write there one JSON object a line")
    arguments = parser.parse_args()
    capabilities = arguments.capability or sorted(SHARED_LIMITS)
    print(f"{'kernel':16} {'GPU':6} {'registers':>9} {'shared':>9} {'spilled':>8}  case", flush=True)
    rows: list[KernelReport] = []
    with ProcessPoolExecutor(
        min(len(capabilities), os.cpu_count() or 1), mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        for own in processes.map(partial(report, quick=arguments.quick), capabilities):
            rows += own
            for row in own:
                numbers = f"{row.registers:9} {row.shared_bytes:9} {row.spill_bytes:8}"
                print(f"{row.kernel:16} sm_{row.capability:<3} {numbers}  {row.case}", flush=True)
    if arguments.json:
        arguments.json.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows))
    if any(row.shared_bytes > SHARED_LIMITS[row.capability] for row in rows):
        sys.exit("a kernel wants more shared memory than its GPU has")


if __name__ == "__main__":
    main()
