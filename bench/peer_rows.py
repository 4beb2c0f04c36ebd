"""The rows of `pdserve bench peers`: what work each sends, and which figures it gives. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.datasets import PromptMaker, RandomLengths, random_work, shared_prefix_work
from bench.load import run_load
from bench.request_record import RequestRecord, Work
from bench.stream_client import StreamClient

GUESSED_DECODE_S, GUESSED_PREFILL_S = 1 / 20, 1 / 300
"""Seconds per token of one stream and of a prompt, for the estimate before anything is measured."""

BACKGROUND_TOKENS = 1500
QUIET_S = 5.0
FIRST_TOKENS_S = 120.0


class RowFailed(Exception):
    """A server did not do the work of a row; says how."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `is_rate`: more is better; else less is."""

    title: str
    unit: str
    is_rate: bool = False

    def ratio(self, ours: float, theirs: float) -> float:
        """Above 1 where ours is better."""
        return ours / theirs if self.is_rate else theirs / ours


Measure = Callable[[StreamClient, PromptMaker, bool], Awaitable[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work.

    Attributes:
        figures: by key.
        measure: does the work once and returns a value for each figure; raises RowFailed. The last argument asks for
            less work.
        tokens: guessed (prompt tokens, decode steps) that it takes, and less work takes, for the estimate.
    """

    title: str
    figures: dict[str, Figure]
    measure: Measure
    tokens: tuple[tuple[int, int], tuple[int, int]]

    def guess_s(self, is_quick: bool) -> float:
        """About how long it takes."""
        prompt_tokens, steps = self.tokens[is_quick]
        return prompt_tokens * GUESSED_PREFILL_S + steps * GUESSED_DECODE_S


async def one_stream(client: StreamClient, maker: PromptMaker, is_quick: bool) -> dict[str, float]:
    """Requests one after another."""
    records = await _closed(client, random_work(maker, 1 if is_quick else 2, RandomLengths(128, 128)), 1)
    tpot_s = median(record.tpot_s or 0.0 for record in records)
    if not tpot_s:
        raise RowFailed("all tokens of an answer came together")
    return {"decode_tok_s": 1 / tpot_s, "ttft_ms": _ttft_ms(records)}


async def prefill(client: StreamClient, maker: PromptMaker, is_quick: bool) -> dict[str, float]:
    """Long prompts one after another, of whose answer only the first token counts."""
    records = await _closed(client, random_work(maker, 1 if is_quick else 3, RandomLengths(2048, 1)), 1)
    return {"ttft_ms": _ttft_ms(records)}


async def concurrent(client: StreamClient, maker: PromptMaker, is_quick: bool) -> dict[str, float]:
    """Sixteen at once, once each."""
    work = random_work(maker, 16, RandomLengths(256, 16 if is_quick else 64))
    run = await run_load(client, work, [0.0] * len(work))
    _check(run.records)
    output_tokens = sum(record.output_tokens for record in run.records)
    return {"output_tok_s": output_tokens / run.duration_s, "ttft_ms": _ttft_ms(run.records)}


async def shared_prefix(client: StreamClient, maker: PromptMaker, is_quick: bool) -> dict[str, float]:
    """One prompt, then others that share its first 1500 tokens."""
    count = 3 if is_quick else 5
    lengths = {"prefix_len": 1500, "suffix_len": 32, "output_len": 8}
    records = await _closed(client, shared_prefix_work(maker, count, prefixes=1, shuffle=False, **lengths), 1)
    return {"first_ttft_ms": _ttft_ms(records[:1]), "later_ttft_ms": _ttft_ms(records[1:])}


async def interference(client: StreamClient, maker: PromptMaker, is_quick: bool) -> dict[str, float]:
    """Four streams, first alone, then while a prompt of 2048 tokens arrives each second."""
    background = random_work(maker, 4, RandomLengths(128, BACKGROUND_TOKENS))
    streams = [RequestRecord(index, one.output_tokens) for index, one in enumerate(background)]
    tasks = [asyncio.create_task(client.send(one, record)) for one, record in zip(background, streams, strict=True)]
    try:
        async with asyncio.timeout(FIRST_TOKENS_S):
            while any(len(record.event_times_s) < 2 and not record.is_done for record in streams):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        quiet_s = client.clock()
        await asyncio.sleep(QUIET_S)
        busy_s = client.clock()
        prompts = random_work(maker, 2 if is_quick else 5, RandomLengths(2048, 1))
        run = await run_load(client, prompts, [float(second) for second in range(len(prompts))])
        end_s = client.clock()
    except TimeoutError:
        raise RowFailed(f"four streams had no tokens within {FIRST_TOKENS_S:g} s") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    _check(run.records)
    ended = [record for record in streams if record.error_kind != "cancelled"]
    if ended:
        raise RowFailed(f"{len(ended)} of the four streams ended early: {ended[0].error_kind or 'finished'}")
    quiet, busy = gaps_ms(streams, quiet_s, busy_s), gaps_ms(streams, busy_s, end_s)
    if not quiet or not busy:
        raise RowFailed("the four streams stood still")
    quiet_p99, busy_p99 = float(np.percentile(quiet, 99)), float(np.percentile(busy, 99))
    return {
        "quiet_itl_p50_ms": median(quiet),
        "quiet_itl_p99_ms": quiet_p99,
        "busy_itl_p99_ms": busy_p99,
        "busy_over_quiet": busy_p99 / quiet_p99,
        "ttft_ms": _ttft_ms(run.records),
    }


def gaps_ms(records: Sequence[RequestRecord], from_s: float, to_s: float) -> list[float]:
    """Inter-token latencies that ended in a window."""
    return [
        gap_s * 1000
        for record in records
        for time_s, gap_s in zip(record.event_times_s[1:], record.itls_s, strict=True)
        if from_s <= time_s < to_s
    ]


async def _closed(client: StreamClient, work: Sequence[Work], concurrency: int) -> list[RequestRecord]:
    run = await run_load(client, work, [0.0] * len(work), max_concurrency=concurrency)
    _check(run.records)
    return run.records


def _check(records: Sequence[RequestRecord]) -> None:
    failed = [record for record in records if not record.has_succeeded]
    if failed:
        raise RowFailed(f"{len(failed)} of {len(records)} requests: {failed[0].error_kind}: {failed[0].error}")
    short = [record for record in records if record.output_tokens < record.asked_tokens]
    if short:
        raise RowFailed(f"an answer has {short[0].output_tokens} of {short[0].asked_tokens} tokens")


def _ttft_ms(records: Sequence[RequestRecord]) -> float:
    return median(record.ttft_s * 1000 for record in records)


TTFT = Figure("TTFT", "ms")
ROWS = {
    "single": Row(
        "one stream (128 in, 128 out)",
        {"decode_tok_s": Figure("decode", "tok/s", is_rate=True), "ttft_ms": TTFT},
        one_stream,
        ((256, 256), (128, 128)),
    ),
    "prefill": Row("prompt of 2048", {"ttft_ms": TTFT}, prefill, ((6144, 3), (2048, 1))),
    "concurrent": Row(
        "16 at once (256 in, 64 out)",
        {"output_tok_s": Figure("output", "tok/s", is_rate=True), "ttft_ms": Figure("TTFT p50", "ms")},
        concurrent,
        ((4096, 200), (4096, 50)),
    ),
    "prefix": Row(
        "shared prefix of 1500",
        {"first_ttft_ms": Figure("TTFT first", "ms"), "later_ttft_ms": Figure("TTFT later", "ms")},
        shared_prefix,
        ((1660, 40), (1600, 24)),
    ),
    "interference": Row(
        "4 streams, a prompt of 2048 each second",
        {
            "quiet_itl_p50_ms": Figure("ITL p50 quiet", "ms"),
            "quiet_itl_p99_ms": Figure("ITL p99 quiet", "ms"),
            "busy_itl_p99_ms": Figure("ITL p99 busy", "ms"),
            "busy_over_quiet": Figure("ITL p99 busy/quiet", "times"),
            "ttft_ms": Figure("TTFT of the prompts", "ms"),
        },
        interference,
        ((10752, 120), (4608, 120)),
    ),
}
