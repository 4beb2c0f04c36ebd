"""Time, bytes and FLOPs of each operation, beside what this machine can do at best.

Three kinds of rows:

    parts     of a forward pass by whichever path the model takes here. A compiled pass is one call, so its parts are
              told by differences: attention is what a pass takes beyond one with next to no context, the output matrix
              what it takes beyond one without logits
    torch     single operations of the path through torch, one after another over as many layers as the model has
              or more, so that weights and keys come from memory as they do in a step
    compiled  the same operations by the compiled CPU kernels, where there are any

Sampling is there once, by whichever of the two computes it here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from bench import costs
from bench.costs import Cost, ModelShape
from bench.local_nodes import fill_pool
from bench.machine import MachineLimits
from engine.forward_batch import ForwardBatch, SequenceSlice, WantedLogits, build_batch
from engine.ids import BlockId
from engine.kv_layout import DTYPE_BYTES
from engine.model_runner import ModelRunner
from engine.paged_cache import host_plan
from engine.sampling import SampleRow, sample
from engine.sampling_params import SamplingParams
from kernels import cpu_operations, ops, torch_attention
from kernels.cpu_library import load_library

_LOGITS_SPREAD = 4.0
"""Standard deviation of logits that are sampled from: a few tokens have most of the probability, as in real ones."""

_BEYOND_CACHE_BYTES = 128 * 1024 * 1024
"""Weights of one kind that are gone through, at least: in a step, those of other kinds drive them out of caches."""

_SHORT = 16
"""Tokens of the sequences by which a prompt's matrices are timed: attention among so few costs next to nothing."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What an operation achieves, and which share of the machine's limits that is; of both, and of the one that binds.

    More than 1 means that the operands came from a cache.
    """

    gb_per_s: float
    share_of_read: float
    gflop_per_s: float
    share_of_matmul: float
    share_of_limit: float


@dataclass(frozen=True, slots=True)
class OperationReport:
    """One operation at one shape.

    Attributes:
        path: `part`, `torch` or `compiled`, see the module.
        name: what it does.
        shape: for how many rows, tokens or sequences.
        seconds: of one call, the best seen; of a part, of all layers together. 0 where noise was larger.
        num_bytes: that must move at least.
        flops: that must be done at least.
    """

    path: str
    name: str
    shape: str
    seconds: float
    num_bytes: float
    flops: float

    def rates(self, limits: MachineLimits, dtype: str) -> Rates | None:
        """What it achieves beside what the machine can do; None where the time was lost in the noise."""
        if self.seconds == 0:
            return None
        gb_per_s, gflop_per_s = self.num_bytes / self.seconds / 1e9, self.flops / self.seconds / 1e9
        return Rates(
            gb_per_s=gb_per_s,
            share_of_read=gb_per_s / limits.read_gb_per_s,
            gflop_per_s=gflop_per_s,
            share_of_matmul=gflop_per_s / limits.matmul_gflop_per_s[dtype],
            share_of_limit=limits.seconds(self.num_bytes, self.flops, dtype) / self.seconds,
        )


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """What is measured.

    Attributes:
        batches: sequences of decode steps.
        contexts: tokens that each of them has.
        prompts: tokens of prompts.
        seconds: after which no further try of an operation starts.
    """

    batches: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (512, 2048)
    prompts: tuple[int, ...] = (512, 2048)
    seconds: float = 1.0

    def blocks(self, block_size: int) -> int:
        """The pool that this needs."""
        longest = max(self.batches) * (max(self.contexts) + 1), max(self.prompts)
        return max(self.batches) + max(-(-tokens // block_size) for tokens in longest)


class KernelBench:
    """Measures operations of one loaded model.

    Args:
        runner: the model; its pool must hold `KernelShapes.blocks`.
        shape: of the model.
        wanted: what to measure.
    """

    def __init__(self, runner: ModelRunner, shape: ModelShape, wanted: KernelShapes) -> None:
        self._runner = runner
        self._shape = shape
        self._wanted = wanted
        self._library = load_library() if runner.layout.dtype in ("float32", "bfloat16") else None
        self._dtype = runner.layout.dtype
        self._torch_dtype: torch.dtype = getattr(torch, self._dtype)
        fill_pool(runner)

    def reports(self) -> Iterator[OperationReport]:
        """Each as soon as it is measured."""
        with torch.inference_mode():
            for batch in self._wanted.batches:
                yield from self._decode_parts(batch)
            for prompt in self._wanted.prompts:
                yield from self._prompt_parts(prompt)
            for tokens in (*self._wanted.batches, *self._wanted.prompts):
                yield from self._linears(tokens)
                yield from self._elementwise(tokens)
                yield self._kv_write(tokens)
            for batch in self._wanted.batches:
                for context in self._wanted.contexts:
                    yield from self._attention("attention, decode", [(1, context)] * batch)
            for prompt in self._wanted.prompts:
                yield from self._attention("attention, prefill", [(prompt, prompt)])
                yield from self._attention("attention, prefill on a prefix", [(prompt // 4, prompt)])
            for batch in self._wanted.batches:
                yield from self._sampling(batch)

    # -- parts of a pass ------------------------------------------------------------------------------------

    def _decode_parts(self, batch: int) -> Iterator[OperationReport]:
        shape, dtype = self._shape, self._dtype
        bare = self._pass_seconds([(1, 1)] * batch)
        yield _report("part", "layers without attention", f"{batch} x 1", bare, self._layers(batch))
        head = self._pass_seconds([(1, 1)] * batch, logits="last") - bare
        cost = costs.linear(batch, shape.hidden, shape.vocab, dtype)
        yield _report("part", "output matrix", f"{batch} x 1", head, cost)
        for context in self._wanted.contexts:
            slices = [(1, context)] * batch
            seconds = self._pass_seconds(slices) - bare
            cost = costs.attention(shape, slices, dtype) * shape.num_layers
            yield _report("part", "attention, decode", f"{batch} at {context}", seconds, cost)

    def _prompt_parts(self, prompt: int) -> Iterator[OperationReport]:
        shape, dtype = self._shape, self._dtype
        pieces, rest = divmod(prompt, _SHORT)
        bare = self._pass_seconds([(_SHORT, _SHORT)] * pieces + [(rest, rest)] * bool(rest))
        yield _report("part", "layers without attention", f"1 x {prompt}", bare, self._layers(prompt))
        seconds = self._pass_seconds([(prompt, prompt)]) - bare
        cost = costs.attention(shape, [(prompt, prompt)], dtype) * shape.num_layers
        yield _report("part", "attention, prefill", f"1 x {prompt}", seconds, cost)

    def _layers(self, tokens: int) -> Cost:
        weights = self._shape.layer_weights
        return Cost(float(weights * DTYPE_BYTES[self._dtype]), 2.0 * weights * tokens)

    def _pass_seconds(self, slices: Sequence[tuple[int, int]], logits: WantedLogits = "none") -> float:
        batch = self._batch(slices, logits)
        return self._seconds(lambda _: self._runner.run(batch), 1)

    def _batch(self, slices: Sequence[tuple[int, int]], logits: WantedLogits = "none") -> ForwardBatch:
        """Slices as (new tokens, context), each in blocks of its own."""
        layout, parts, first = self._runner.layout, [], 0
        for new, context in slices:
            last = first + layout.blocks_for(context)
            token_ids = [number % self._runner.vocab_size for number in range(new)]
            parts.append(SequenceSlice(token_ids, context - new, [BlockId(i) for i in range(first, last)], logits))
            first = last
        return build_batch(parts, block_size=layout.block_size)

    # -- single operations ----------------------------------------------------------------------------------

    def _linears(self, tokens: int) -> Iterator[OperationReport]:
        shape = self._shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for name, inputs, outputs in (
            ("linear, query", shape.hidden, queries),
            ("linear, key or value", shape.hidden, keys),
            ("linear, attention output", queries, shape.hidden),
            ("linear, gate or up", shape.hidden, shape.intermediate),
            ("linear, down", shape.intermediate, shape.hidden),
        ):
            one = self._random(1, outputs, inputs)
            weights = one.repeat(max(shape.num_layers, -(-_BEYOND_CACHE_BYTES // one.nbytes)), 1, 1)
            states = self._random(tokens, inputs)
            cost = costs.linear(tokens, inputs, outputs, self._dtype)
            seconds = self._seconds(lambda i: functional.linear(states, weights[i]), len(weights))  # noqa: B023
            yield _report("torch", name, f"{tokens}", seconds, cost)
            if (library := self._library) is not None:
                wide, threads = states.float(), torch.get_num_threads()
                seconds = self._seconds(
                    lambda i: cpu_operations.product(library, wide, weights[i], num_threads=threads),  # noqa: B023
                    len(weights),
                )
                yield _report("compiled", name, f"{tokens}", seconds, cost)

    def _elementwise(self, tokens: int) -> Iterator[OperationReport]:
        shape, dtype = self._shape, self._dtype
        norm = LlamaRMSNorm(shape.hidden).to(self._torch_dtype)
        states = self._random(tokens, shape.hidden)
        cost = costs.elementwise(states.numel(), reads=1, flops=4, dtype=dtype)
        yield _report("torch", "RMSNorm", f"{tokens}", self._seconds(lambda _: norm(states), 1), cost)
        queries = self._random(1, shape.heads, tokens, shape.head_dim)
        keys = self._random(1, shape.kv_heads, tokens, shape.head_dim)
        angles = self._random(1, tokens, shape.head_dim)
        cost = costs.elementwise(queries.numel() + keys.numel(), reads=1, flops=3, dtype=dtype)
        seconds = self._seconds(lambda _: apply_rotary_pos_emb(queries, keys, angles, angles), 1)
        yield _report("torch", "rotary", f"{tokens}", seconds, cost)
        gate, up = self._random(tokens, shape.intermediate), self._random(tokens, shape.intermediate)
        cost = costs.elementwise(gate.numel(), reads=2, flops=5, dtype=dtype)
        seconds = self._seconds(lambda _: functional.silu(gate) * up, 1)
        yield _report("torch", "SiLU and product", f"{tokens}", seconds, cost)

    def _kv_write(self, tokens: int) -> OperationReport:
        shape = self._shape
        plan = host_plan(self._runner.pool, self._batch([(tokens, tokens)]))
        states = self._random(shape.kv_heads, tokens, shape.head_dim)
        seconds = self._seconds(lambda layer: ops.write_kv(plan, layer, states, states), shape.num_layers)
        return _report("torch", "K/V write", f"{tokens}", seconds, costs.write_kv(shape, tokens, self._dtype))

    def _attention(self, name: str, slices: list[tuple[int, int]]) -> Iterator[OperationReport]:
        shape, pool, batch = self._shape, self._runner.pool, self._batch(slices)
        plan = host_plan(pool, batch)
        queries = self._random(shape.heads, batch.num_tokens, shape.head_dim)
        states = self._random(shape.kv_heads, batch.num_tokens, shape.head_dim)
        scale = shape.head_dim**-0.5
        scoring = torch_attention.Scoring(scale, None, None)
        new, context = slices[0]
        text = f"{len(slices)} at {context}" if new == 1 else f"{new} of {context}"
        cost = costs.attention(shape, slices, self._dtype)
        seconds = self._seconds(
            lambda layer: torch_attention.paged_attention(
                plan, layer, queries, states, states, window=None, scoring=scoring
            ),
            shape.num_layers,
        )
        yield _report("torch", name, text, seconds, cost)
        if (library := self._library) is not None:
            by_token, threads = queries.transpose(0, 1).contiguous(), torch.get_num_threads()
            seconds = self._seconds(
                lambda layer: cpu_operations.paged_attention(
                    library,
                    pool,
                    layer,
                    by_token,
                    query_starts=batch.query_starts,
                    context_lens=batch.context_lens,
                    block_tables=batch.block_tables,
                    scale=scale,
                    num_threads=threads,
                ),
                shape.num_layers,
            )
            yield _report("compiled", name, text, seconds, cost)

    def _sampling(self, batch: int) -> Iterator[OperationReport]:
        logits = torch.randn(batch, self._runner.vocab_size).mul_(_LOGITS_SPREAD)
        cost = Cost(float(logits.nbytes), float(logits.numel()))
        path = "torch" if load_library() is None else "compiled"
        for name, params in (
            ("sampling, greedy", SamplingParams(temperature=0.0)),
            ("sampling, top_p 0.9", SamplingParams(temperature=0.8, top_p=0.9)),
        ):
            rows = [SampleRow(params, index, [1], []) for index in range(batch)]
            seconds = self._seconds(lambda _: sample(logits, rows), 1)  # noqa: B023
            yield _report(path, name, f"{batch}", seconds, cost)

    # -- inside ---------------------------------------------------------------------------------------------

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self._torch_dtype)

    def _seconds(self, call: Callable[[int], object], rotations: int) -> float:
        """Of one call: the best round of calls with 0 to `rotations` - 1. Slow calls are too few for a whole round."""
        best, spent, rounds = float("inf"), 0.0, 0
        while not rounds or (spent < self._wanted.seconds and rounds < 1000):
            started_s = time.perf_counter()
            for rotation in range(rotations):
                call(rotation)
                if (elapsed_s := time.perf_counter() - started_s) > self._wanted.seconds:
                    break
            best, spent, rounds = min(best, elapsed_s / (rotation + 1)), spent + elapsed_s, rounds + 1
        return best


def _report(path: str, name: str, shape: str, seconds: float, cost: Cost) -> OperationReport:
    return OperationReport(path, name, shape, max(0.0, seconds), cost.num_bytes, cost.flops)
