"""The claims that paged, disaggregated serving rests on, each checked by a run on this machine, in one table.

Every row comes from real steps of real nodes (local_nodes.py), except that memory over a trace is replayed under a
virtual clock (kv_waste.py). A row says what was measured, and whether that bears the claim out: it may come out false.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.costs import ModelShape
from bench.engine import EngineBench
from bench.kv_waste import PAGED_LIMIT, Replay, replay
from bench.local_nodes import LocalDecode, LocalPrefill, engine_config, replaced
from bench.machine import MachineLimits
from bench.traces import TraceRow
from engine.forward_batch import ForwardBatch, SequenceSlice, build_batch
from engine.ids import BlockId
from engine.model_runner import Runner
from engine.sampling_params import SamplingParams

TOLERANCE = 1e-4
STATIC_BUSY, CONTINUOUS_BUSY = 0.6, 0.9
CONTIGUOUS_WASTE = 0.6
SAMPLES_SAVED = 0.06
COMPUTED_ONCE = 1.1
"""A prompt that several share may be computed this often, since a block at its end is shared with what follows."""


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """One claim.

    Attributes:
        number: its place in the list.
        claim: in words.
        measured: in words.
        holds: whether the measurement bears it out.
        source: what ran.
        figures: the numbers behind it.
    """

    number: int
    claim: str
    measured: str
    holds: bool
    source: str
    figures: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------- 1: prefixes


def prefix_states(folder: Path, runner: Runner, *, tokens: int, prefix: int) -> ClaimRow:
    """What a model computes for a prefix does not depend on what follows: in transformers, and in our pool.

    Args:
        folder: checkpoint of the runner's model.
        runner: in float32.
        tokens: of the whole text.
        prefix: of its beginning.
    """
    text = random.Random(1).choices(range(runner.vocab_size), k=tokens)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        long, short = (
            model(torch.tensor([text[:length]]), output_hidden_states=True, use_cache=True)
            for length in (tokens, prefix)
        )
    hidden = [_distance(a[0, :prefix], b[0]) for a, b in zip(long.hidden_states, short.hidden_states, strict=True)]
    # [layers, 2, kv_heads, tokens, head_dim]
    theirs = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in long.past_key_values.layers])
    blocks = runner.layout.blocks_for(tokens)
    ours, logits = _states(runner, text, first_block=0)
    ours_short, logits_short = _states(runner, text[:prefix], first_block=blocks)
    own = [_distance(a[:, :, :prefix], b) for a, b in zip(ours, ours_short, strict=True)]
    between = [_distance(a, b) for a, b in zip(ours, theirs, strict=True)]
    figures = {
        "hidden_states": max(hidden),
        "pool": max(own),
        "logits": _distance(logits[:prefix], logits_short),
        "pool_against_transformers": max(between),
        "logits_against_transformers": _distance(logits, long.logits[0]),
    }
    return ClaimRow(
        1,
        f"Hidden states of a prefix equal those of the longer text to {TOLERANCE:g}, layer by layer; ours too, by what "
        "each layer and the last one make of them: K/V and logits",
        f"largest difference, relative for values beyond 1: transformers {max(hidden):.1e}; our K/V {max(own):.1e}, "
        f"logits {figures['logits']:.1e}; ours against transformers' K/V {max(between):.1e}, logits "
        f"{figures['logits_against_transformers']:.1e}",
        all(value <= TOLERANCE for value in figures.values()),
        f"{prefix} of {tokens} tokens, {len(own)} layers, float32",
        figures,
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of two elements, relative to the second where that is beyond 1; NaN counts as infinite."""
    difference = float(((one - other).abs() / other.abs().clamp(min=1.0)).max())
    return difference if difference == difference else float("inf")


def _states(runner: Runner, token_ids: Sequence[int], *, first_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a pass over the tokens leaves in the pool and returns.

    Returns:
        K and V [layers, 2, kv_heads, tokens, head_dim], and the logits of every token [tokens, vocab].
    """
    layout = runner.layout
    blocks = [BlockId(first_block + index) for index in range(layout.blocks_for(len(token_ids)))]
    logits = runner.run(build_batch([SequenceSlice(token_ids, 0, blocks, "all")], block_size=layout.block_size))
    shape = (layout.num_layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
    content = [
        torch.frombuffer(runner.block_bytes(block), dtype=getattr(torch, layout.dtype)).view(shape) for block in blocks
    ]
    return torch.cat(content, dim=3)[:, :, :, : len(token_ids)].float(), logits.float()


# --------------------------------------------------------------------------------------------------- 2: memory


def kv_memory(name: str, rows: Sequence[TraceRow], settings: Replay) -> ClaimRow:
    """Contiguous reservation wastes most of the KV memory, paging hardly any.

    Decided by means over memory and time, and for paging by every step as a share of the pool: as a share of what
    sequences hold, the end of a single short one would be much.
    """
    waste = replay(rows, settings)
    over = f"{waste.paged_over:.2%} of the steps are above {PAGED_LIMIT:.0%}"
    if waste.over_sequences:
        over += (
            f", with at most {waste.over_sequences} sequences at once and {waste.over_pool:.1%} of the pool allocated"
        )
    return ClaimRow(
        2,
        f"Contiguous reservation wastes 60 to 80% of KV memory or more, paging under {PAGED_LIMIT:.0%} of what "
        f"sequences hold on average, and under {PAGED_LIMIT:.0%} of the pool at every step",
        f"contiguous to {settings.max_model_len} tokens wastes {waste.contiguous_mean:.1%}, at its best step "
        f"{waste.contiguous_min:.1%}; paged {waste.paged_mean:.2%}, at its worst step {waste.paged_max:.2%} of what "
        f"sequences hold and never more than {waste.pool_max:.2%} of the pool; {over}. Promised to hand-offs on their "
        f"way: {waste.promised_mean:.1%} of all blocks in use; these counted, {waste.empty_mean:.1%} of all slots in "
        f"use hold no token yet, at most {waste.empty_pool_max:.1%} of the pool",
        waste.contiguous_mean >= CONTIGUOUS_WASTE and waste.paged_mean < PAGED_LIMIT and waste.pool_max < PAGED_LIMIT,
        f"{name}: {waste.requests} requests, {waste.steps} steps, {waste.mean_sequences:.0f} at once; decode scheduler "
        f"and pool of {settings.num_blocks} blocks of {settings.block_size}, virtual clock, each prompt computed at "
        f"{settings.prefill_tokens_per_s:.0f} tokens/s",
        asdict(waste),
    )


def prefill_tokens_per_s(runner: Runner, shape: ModelShape, *, prompt: int) -> float:
    """What a prefill node computes of one prompt on this machine, after one for nothing."""
    bench = EngineBench(runner, shape)
    bench.prefill(1, min(prompt, 64), prompt)
    report = bench.prefill(1, prompt, prompt)
    return report.tokens / report.step_s


# ------------------------------------------------------------------------------------------------- 3: batching


@dataclass(slots=True)
class _Places:
    """Places of a batch, and how many of them computed something, over steps."""

    offered: int = 0
    taken: int = 0

    @property
    def busy(self) -> float:
        """Share that was taken."""
        return self.taken / self.offered if self.offered else 0.0


@dataclass(frozen=True, slots=True)
class _Served:
    """What serving some requests came to: over all of it, while requests waited, and in seconds."""

    whole: _Places
    under_load: _Places
    seconds: float


def batching(
    runner: Runner, lengths: Sequence[int], places: int, *, prompt_tokens: int = 16, repeats: int = 1
) -> ClaimRow:
    """Static batching against continuous batching of the same requests on the same node.

    Static: `places` requests start together, and the next ones when all of these have ended.

    Args:
        runner: the model.
        lengths: output tokens of each request.
        places: sequences at once.
        prompt_tokens: of each request.
        repeats: of both, in turns. Steps are the same each time; only seconds differ.
    """
    pairs = []
    for _ in range(repeats):
        static = asyncio.run(_serve(runner, lengths, places, prompt_tokens, batch=places))
        continuous = asyncio.run(_serve(runner, lengths, places, prompt_tokens, batch=len(lengths)))
        pairs.append((static.seconds, continuous.seconds))
    ratios = [seconds / other_seconds for seconds, other_seconds in pairs]
    figures = {
        "static_busy": static.whole.busy,
        "continuous_busy": continuous.whole.busy,
        "continuous_busy_under_load": continuous.under_load.busy,
        "throughput_ratios": ratios,
        "tokens_per_s": [(sum(lengths) / seconds, sum(lengths) / other_seconds) for seconds, other_seconds in pairs],
    }
    return ClaimRow(
        3,
        f"Static batching leaves the engine half idle, continuous batching keeps it over {CONTINUOUS_BUSY:.0%} busy",
        f"places busy: static {static.whole.busy:.0%}, continuous {continuous.under_load.busy:.0%} while requests wait "
        f"({continuous.whole.busy:.0%} with the end of the run); {statistics.median(ratios):.2f} times the throughput "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        static.whole.busy <= STATIC_BUSY and continuous.under_load.busy >= CONTINUOUS_BUSY,
        f"{len(lengths)} requests of {min(lengths)} to {max(lengths)} output tokens (mean "
        f"{statistics.fmean(lengths):.0f}), {places} places, decode node",
        figures,
    )


async def _serve(runner: Runner, lengths: Sequence[int], places: int, prompt_tokens: int, *, batch: int) -> _Served:
    """Send `batch` requests, and the next ones when all of these have ended."""
    local = LocalDecode(runner, engine_config(runner, max_num_seqs=places, max_num_batched_tokens=512))
    whole, under_load = _Places(), _Places()

    def note(step: ForwardBatch) -> None:
        for count in (whole, under_load) if local.node.scheduler.num_waiting else (whole,):
            count.offered += places
            count.taken += len(step.context_len_list)

    with _noting(runner, note):
        async with local.running():
            started_s = time.perf_counter()
            for first in range(0, len(lengths), batch):
                streams = []
                for number, length in enumerate(lengths[first : first + batch], start=first):
                    prompt = random.Random(number).choices(range(runner.vocab_size), k=prompt_tokens)
                    streams += local.start(prompt, SamplingParams(temperature=0.0, max_tokens=length))
                await local.finish(streams)
            return _Served(whole, under_load, time.perf_counter() - started_s)


@contextlib.contextmanager
def _noting(runner: Runner, note: Callable[[ForwardBatch], None]) -> Iterator[None]:
    """Look at every batch that a runner computes."""
    run = runner.run

    def noted(batch: ForwardBatch, **words: Any) -> torch.Tensor:
        note(batch)
        return run(batch, **words)

    with replaced(runner, "run", noted):
        yield


# -------------------------------------------------------------------------------------------- 4: shared prompts


def shared_prompt(runner: Runner, *, shared: int, own: int, requests: int = 3) -> ClaimRow:
    """A system prompt that several requests share is computed once, one after another and all at once.

    Args:
        runner: the model.
        shared: tokens of the system prompt.
        own: tokens that each request adds.
        requests: how many.
    """
    make = random.Random(4)
    system = make.choices(range(runner.vocab_size), k=shared)
    prompts = [[*system, *make.choices(range(runner.vocab_size), k=own)] for _ in range(requests)]
    alone = [asyncio.run(_prefill(runner, [prompt], at_once=False))[1][0] for prompt in prompts]
    times: dict[bool, float] = {}
    is_same = True
    for at_once in (False, True):
        computed, tokens = asyncio.run(_prefill(runner, prompts, at_once=at_once))
        times[at_once] = (computed - requests * own) / shared
        is_same = is_same and tokens == alone
    return ClaimRow(
        4,
        f"A system prompt that {requests} requests share is computed once, not {requests} times",
        f"computed {times[False]:.2f} times when they come one after another, {times[True]:.2f} times at once; first "
        f"tokens {'are' if is_same else 'are NOT'} those of each alone",
        is_same and max(times.values()) <= COMPUTED_ONCE,
        f"system prompt of {shared} tokens, {own} of each one's own, prefill node",
        {"one_after_another": times[False], "at_once": times[True], "same_tokens": is_same},
    )


async def _prefill(runner: Runner, prompts: Sequence[Sequence[int]], *, at_once: bool) -> tuple[int, list[int]]:
    """Tokens that a fresh prefill node computed for the prompts, and what it says follows each."""
    local = LocalPrefill(runner, engine_config(runner, max_num_seqs=32, max_num_batched_tokens=512))
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    computed = 0

    def note(batch: ForwardBatch) -> None:
        nonlocal computed
        computed += batch.num_tokens

    with _noting(runner, note):
        async with local.running():
            if at_once:
                return_tokens = list(await asyncio.gather(*(local.compute(prompt, sampling) for prompt in prompts)))
            else:
                return_tokens = [await local.compute(prompt, sampling) for prompt in prompts]
    return computed, return_tokens


# ------------------------------------------------------------------------------------- 5: sharing within a request


def sharing(runner: Runner, *, prompt_tokens: int, output_tokens: int, width: int) -> ClaimRow:
    """Memory that sharing saves in parallel sampling and in beam search, over the steps of a request.

    Args:
        runner: the model.
        prompt_tokens: of the request.
        output_tokens: of each sequence.
        width: samples, and beams.
    """
    prompt = random.Random(5).choices(range(runner.vocab_size), k=prompt_tokens)
    samples = asyncio.run(_saved(runner, prompt, output_tokens, width, is_beam_search=False))
    beams = asyncio.run(_saved(runner, prompt, output_tokens, width, is_beam_search=True))
    return ClaimRow(
        5,
        "Sharing blocks saves memory in parallel sampling, and more in beam search",
        f"{samples:.1%} of the blocks with {width} samples, {beams:.1%} with {width} beams",
        SAMPLES_SAVED <= samples < beams,
        f"prompt of {prompt_tokens}, {output_tokens} tokens each; decode node",
        {"parallel_samples": samples, "beams": beams},
    )


async def _saved(
    runner: Runner, prompt: Sequence[int], output_tokens: int, width: int, *, is_beam_search: bool
) -> float:
    """Share of the blocks that sequences would need, each with its own, which sharing saves; over the steps of all."""
    local = LocalDecode(runner, engine_config(runner, max_num_seqs=width, max_num_batched_tokens=512))
    with_sharing, without = 0, 0

    def note(batch: ForwardBatch) -> None:
        nonlocal with_sharing, without
        if len(batch.context_len_list) == width:
            with_sharing += local.node.pool.counts.in_use
            without += sum(map(runner.layout.blocks_for, batch.context_len_list))

    with _noting(runner, note):
        async with local.running():
            temperature = 0.0 if is_beam_search else 1.0
            sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=output_tokens)
            await local.finish(local.start(prompt, sampling, n=width, is_beam_search=is_beam_search))
    return 1 - with_sharing / without


# ---------------------------------------------------------------------------------------------- 6: what binds


def bounds(
    runner: Runner,
    shape: ModelShape,
    measure: Callable[[], MachineLimits],
    *,
    prompt: int,
    context: int,
    steps: int,
) -> ClaimRow:
    """Prefill is bound by arithmetic, decode by reading memory: what each must do, and what each achieves.

    Args:
        runner: the model.
        shape: of the model.
        measure: gives this machine's limits with as many threads; called before and after.
        prompt: tokens of the prompt that is computed.
        context: tokens before the decode step.
        steps: decode steps to measure.
    """
    bench = EngineBench(runner, shape)
    dtype = runner.layout.dtype
    limits = measure()
    reports = (bench.prefill(1, prompt, prompt), bench.decode(1, context, steps))
    limits = limits.best(measure())
    balance = limits.balance(dtype)
    figures: dict[str, Any] = {"balance": balance}
    words = []
    for report in reports:
        intensity = report.flops / report.num_bytes
        gflop_per_s, gb_per_s = report.flops / report.step_s / 1e9, report.num_bytes / report.step_s / 1e9
        compute, read = gflop_per_s / limits.matmul_gflop_per_s[dtype], gb_per_s / limits.read_gb_per_s
        figures[report.phase] = {
            "intensity": intensity,
            "gflop_per_s": gflop_per_s,
            "share_of_matmul": compute,
            "gb_per_s": gb_per_s,
            "share_of_read": read,
        }
        words.append(
            f"{report.phase} {intensity:.3g} FLOP/byte, {gflop_per_s:.3g} GFLOP/s ({compute:.0%} of the limit), "
            f"{gb_per_s:.3g} GB/s ({read:.0%})"
        )
    prefill, decode = figures["prefill"], figures["decode"]
    return ClaimRow(
        6,
        "Prefill is compute-bound and decode memory-bound",
        f"{'; '.join(words)}; the machine's balance is {balance:.3g} FLOP/byte",
        decode["intensity"] < balance < prefill["intensity"],
        f"prompt of {prompt} tokens; one sequence at {context} tokens; whole steps of both nodes, {dtype}",
        figures,
    )
