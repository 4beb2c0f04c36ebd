"""Are the Triton kernels right on this card, and how near its limits: the GPU check's parts correctness and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as functional

from bench.gpu_table import Found, NotRun, Task
from engine.sampling import SampleRow, sample
from engine.sampling_params import SamplingParams
from engine.tokens import SampledToken
from kernels import (
    ops,
    reference,
    torch_sampling,
    triton_attention,
    triton_blocks,
    triton_elementwise,
    triton_sampling,
)

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

CHOICE_ROWS = 64
"""How many rows of mixed wishes choose tokens in one step."""

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


def correctness(device: str, *, shapes: Sequence[Shape], vocab_size: int, far_pool: bool) -> list[Task]:
    """Every kernel against its oracle."""
    tasks = [(f"attention {shape}", partial(_check_attention, shape, device, {})) for shape in shapes]
    for name in ("window", "soft cap", "sinks", "all three"):
        tasks.append((f"attention with {name}", partial(_check_attention, shapes[0], device, _options(name))))
    tasks.append(("attention: same bits alone, in a batch and in chunks", partial(_check_same_bits, shapes[0], device)))
    if device == "cuda":
        tasks.append(("decode under a CUDA graph", partial(_check_graph, shapes[0])))
    tasks += [
        ("gather, scatter and copy of blocks", partial(_check_blocks, device)),
        ("RMSNorm, rotary, SiLU times up", partial(_check_elementwise, device)),
        (f"one draw, vocabulary {vocab_size}", partial(_check_draw, device, vocab_size)),
        (f"top_k, top_p, min_p and draw, vocabulary {vocab_size}", partial(_check_choice, device, vocab_size)),
        ("penalties, bias and log probabilities", partial(_check_sample, device, vocab_size)),
    ]
    if far_pool:
        tasks.append(("a pool of more than 2^31 elements", partial(_check_far_pool, device)))
    return [Task("correctness", name, partial(_detail, check)) for name, check in tasks]


def _detail(check: Callable[[], str]) -> Found:
    return Found(detail=check())


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
        raise NotRun(f"needs {pool_bytes * 1.2 / 2**30:.0f} GiB of free memory, and {free / 2**30:.0f} are free")
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
    wide = summed.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    # Rounded before the weight and after it: half a place of bfloat16 each.
    torch.testing.assert_close(output.double(), expected, rtol=2.0**-7 * 1.01, atol=1e-6)
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


def _check_draw(device: str, vocab_size: int) -> str:
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


def _check_choice(device: str, vocab_size: int) -> str:
    """All that decides a token on a GPU, for rows that want different things in one step."""
    generator = torch.Generator().manual_seed(5)
    count = CHOICE_ROWS
    logits = torch.randn(count, vocab_size, generator=generator) * torch.linspace(0.05, 6.0, count)[:, None]
    logits[5::8] = (logits[5::8] * 2.0).round() / 2.0  # many equals, also where a filter cuts
    logits[6::8, ::3] = -torch.inf
    logits[7], logits[15, 9], logits[23, 11] = -torch.inf, math.nan, math.inf

    def one_of(values: Sequence[float]) -> float:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    choices = [
        ops.TokenChoice(
            temperature=one_of((0.0, 0.3, 0.7, 1.0, 2.0)),
            top_k=int(one_of((0, 0, 1, 40, 300, vocab_size + 1))),
            top_p=one_of((1.0, 1.0, 0.999, 0.9, 0.5, 1e-6)),
            min_p=one_of((0.0, 0.0, 0.01, 0.3, 1.0)),
            seed=index * 2**40 + 17,
            sequence_index=index % 4,
            position=index * 31,
        )
        for index in range(count)
    ]
    expected = [
        torch_sampling.choose(row[None], [choice], torch_sampling.draw_on_host)[0]
        for row, choice in zip(logits, choices, strict=True)
    ]
    rows = logits.to(device)
    if device == "cuda":
        chosen = ops.choose_tokens(list(rows), choices)
    else:
        chosen = torch_sampling.choose(rows, choices, triton_sampling.draw)
    _same_tokens(chosen, expected)
    on_host = ops.choose_tokens(list(logits), choices)
    _same_tokens(on_host, expected)
    return f"tokens of the host in {count} mixed rows"


def _same_tokens(actual: Sequence[int], expected: Sequence[int]) -> None:
    others = [index for index, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1]]
    if others:
        first = others[0]
        raise AssertionError(
            f"{len(others)} of {len(expected)} tokens differ, the first in row {first}: {actual[first]} where the host "
            f"chooses {expected[first]}"
        )


def _check_sample(device: str, vocab_size: int) -> str:
    """A step's sampling as nodes call it."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(6, vocab_size, generator=generator) * 4.0
    seen = torch.randint(vocab_size, (2, 40), generator=generator).tolist()
    likely = logits.topk(8).indices.tolist()
    wishes = [
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(repetition_penalty=1.7, logprobs=3, top_p=0.9, seed=3),
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, top_k=50, seed=4),
        SamplingParams(logit_bias={likely[3][0]: -100.0, likely[3][5]: 3.0}, temperature=0.0, logprobs=0),
        SamplingParams(min_tokens=30, stop_token_ids=tuple(likely[4][:3]), max_tokens=40, temperature=0.0),
        SamplingParams(temperature=1.3, min_p=0.02, repetition_penalty=0.8, seed=5, logprobs=20),
    ]
    rows = [
        SampleRow(params, index, seen[0], seen[1][:20] + likely[index][:2] * 3) for index, params in enumerate(wishes)
    ]
    expected, actual = sample(logits, rows), sample(logits.to(device), rows)
    worst = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        assert isinstance(ours, SampledToken) and isinstance(theirs, SampledToken), "a row was refused"
        assert ours.token_id == theirs.token_id, f"token {ours.token_id} where the host chooses {theirs.token_id}"
        for own, their in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert (own.token_id, own.rank) == (their.token_id, their.rank), f"{own} where the host says {their}"
            worst = max(worst, abs(own.logprob - their.logprob))
    assert worst <= 1e-5, f"log probabilities are off by {worst:.1e} where 1e-05 is allowed"
    return f"tokens of the host, log probabilities within {worst:.0e}"


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


@dataclass(frozen=True, slots=True)
class Race:
    """One operation, beside the same of torch, if it has one, and what it must move or compute at least."""

    ours: Callable[[], object]
    theirs: Callable[[], object] | None
    num_bytes: float = 0
    flop: float = 0


def speed(
    device: str,
    limits: Callable[[], Limits],
    seconds_of: Callable[[Callable[[], object]], float],
    *,
    scale: int,
) -> list[Task]:
    """Every kernel beside the limit that binds it and beside torch's own.

    Args:
        device: what to measure on.
        limits: of the device; called once, by the first check.
        seconds_of: measures one operation.
        scale: 1 for a real card; larger divides the work.
    """
    limits = cache(limits)

    def known_limits() -> Found:
        measured = limits()
        return Found(
            detail=f"copy {measured.copied_bytes_per_s / 1e9:.0f} GB/s read and written, bfloat16 product "
            f"{measured.flop_per_s / 1e12:.0f} TFLOP/s"
        )

    def measured(race_of: Callable[[], Race]) -> Found:
        race = race_of()
        taken = seconds_of(race.ours)
        beside = None if race.theirs is None else seconds_of(race.theirs) / taken
        memory, compute = race.num_bytes / limits().copied_bytes_per_s, race.flop / limits().flop_per_s
        bound = "copy bandwidth" if memory >= compute else "matrix rate"
        return Found(f"{taken * 1e6:.1f} us", max(memory, compute) / taken, beside, f"of the {bound}")

    llama, smol = Shape(32, 8, 128, 16, torch.bfloat16), Shape(9, 3, 64, 16, torch.bfloat16)
    rows, width = 8192 // scale, 4096
    races: list[tuple[str, Callable[[], Race]]] = []
    for shape, sequences, tokens, prefix in (
        (llama, 1, 8192 // scale, 0),
        (llama, 1, 1024 // scale, 0),
        (smol, 1, 4096 // scale, 0),
        (llama, 16, 512 // scale, 512 // scale),
    ):
        name = f"prefill {sequences} x {tokens} after {prefix}, {shape}"
        races.append((name, partial(_prefill, shape, sequences, tokens, prefix, device)))
    for shape, sequences, context in (
        (llama, 64, 4096 // scale),
        (llama, 1, 32768 // scale),
        (llama, 256, 512 // scale),
        (smol, 64, 1024 // scale),
    ):
        name = f"decode {sequences} x {context}, {shape}"
        races.append((name, partial(_decode, shape, sequences, context, device)))
    blocks = 4096 // scale
    races += [
        (f"RMSNorm with residual, {rows} x {width}", partial(_norm_race, rows, width, device)),
        (f"SiLU times up, {rows} x {width}", partial(_silu_race, rows, width, device)),
        (f"rotary, {rows} tokens of 32 + 8 heads", partial(_rotary_race, rows, device)),
        (f"write K/V, {rows} tokens of 8 x 128", partial(_write_race, llama, rows, device)),
        (f"gather {max(1, blocks // 4)} of {blocks} blocks", partial(_move_race, blocks, scale, device, False)),
        (f"scatter {max(1, blocks // 4)} of {blocks} blocks", partial(_move_race, blocks, scale, device, True)),
        (f"one draw, 64 x {151936 // scale}", partial(_draw_race, 64, 151936 // scale, device)),
    ]
    tasks = [Task("speed", "limits of this card", known_limits)]
    return tasks + [Task("speed", name, partial(measured, race_of)) for name, race_of in races]


def _norm_race(rows: int, width: int, device: str) -> Race:
    values, residual = (torch.randn(rows, width, device=device).to(torch.bfloat16) for _ in range(2))
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    return Race(
        lambda: triton_elementwise.rms_norm(values, weight, epsilon=1e-5, residual=residual),
        lambda: _torch_rms_norm(values, weight, residual),
        num_bytes=4 * values.numel() * 2,
    )


def _silu_race(rows: int, width: int, device: str) -> Race:
    gate, up = (torch.randn(rows, width, device=device).to(torch.bfloat16) for _ in range(2))
    return Race(
        lambda: triton_elementwise.silu_mul(gate, up),
        lambda: functional.silu(gate) * up,
        num_bytes=3 * gate.numel() * 2,
    )


def _rotary_race(rows: int, device: str) -> Race:
    query = torch.randn(rows, 32, 128, device=device).to(torch.bfloat16)
    key = torch.randn(rows, 8, 128, device=device).to(torch.bfloat16)
    angles = torch.randn(rows, 128, device=device).to(torch.bfloat16)
    return Race(
        lambda: triton_elementwise.rotary(query, key, angles, angles),
        lambda: (_torch_rotary(query, angles, angles), _torch_rotary(key, angles, angles)),
        num_bytes=2 * (query.numel() + key.numel()) * 2,
    )


def _write_race(shape: Shape, rows: int, device: str) -> Race:
    batch = Batch(shape, [(rows, rows)], device)
    plan = batch.plan()
    return Race(
        lambda: triton_attention.write_kv(plan, 1, batch.key, batch.value), None, num_bytes=4 * batch.key.numel() * 2
    )


def _move_race(blocks: int, scale: int, device: str, scatters: bool) -> Race:
    pool = torch.empty(blocks, 32 // min(scale, 32), 2, 8, 16, 128, dtype=torch.bfloat16, device=device)
    ids = torch.randperm(blocks, device=device)[: max(1, blocks // 4)]
    staging = torch.empty(len(ids), *pool.shape[1:], dtype=pool.dtype, device=device)
    moved = 2 * staging.numel() * 2
    if scatters:
        return Race(
            lambda: triton_blocks.scatter_blocks(staging, pool, ids),
            lambda: pool.index_copy_(0, ids, staging),
            num_bytes=moved,
        )
    return Race(
        lambda: triton_blocks.gather_blocks(pool, ids, staging),
        lambda: torch.index_select(pool, 0, ids, out=staging),
        num_bytes=moved,
    )


def _draw_race(rows: int, vocab_size: int, device: str) -> Race:
    scores = torch.randn(rows, vocab_size, device=device)
    keys = triton_sampling.noise_keys([(row, 0, 0) for row in range(rows)]).to(device)
    return Race(
        lambda: triton_sampling.sample_gumbel(scores, keys),
        lambda: torch.multinomial(scores.softmax(-1), 1),
        num_bytes=scores.numel() * 4,
    )


def _prefill(shape: Shape, sequences: int, tokens: int, prefix: int, device: str) -> Race:
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
    return Race(
        lambda: triton_attention.paged_attention(plan, 1, batch.query, scale=0.1),
        lambda: functional.scaled_dot_product_attention(
            query, kv[0], kv[1], attn_mask=mask, is_causal=mask is None, enable_gqa=shape.heads != shape.kv_heads
        ),
        flop=flop,
    )


def _decode(shape: Shape, sequences: int, context: int, device: str) -> Race:
    batch = Batch(shape, [(1, context)] * sequences, device)
    plan = batch.plan()
    triton_attention.write_kv(plan, 1, batch.key, batch.value)
    query = batch.query.transpose(0, 1)[:, :, None]
    kv = torch.randn(2, sequences, shape.kv_heads, context, shape.head_dim, device=device).to(shape.dtype)
    return Race(
        lambda: triton_attention.paged_attention(plan, 1, batch.query, scale=0.1),
        lambda: functional.scaled_dot_product_attention(query, kv[0], kv[1], enable_gqa=shape.heads != shape.kv_heads),
        num_bytes=kv.numel() * kv.element_size(),
    )
