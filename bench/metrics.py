"""Turns records of requests into latency, throughput and goodput. Pure; names and meanings as in `vllm bench serve`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.request_record import RequestRecord

METRIC_NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
SLO_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one metric, in milliseconds; None where there was nothing to measure."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: dict[float, float | None]

    @staticmethod
    def of(values_s: Sequence[float], percentiles: Sequence[float]) -> Statistics:
        """From seconds. Percentiles are interpolated between neighbours."""
        if not values_s:
            return Statistics(None, None, None, dict.fromkeys(percentiles))
        values_ms = np.asarray(values_s) * 1000
        cuts = np.percentile(values_ms, percentiles)
        return Statistics(
            float(values_ms.mean()),
            float(np.median(values_ms)),
            float(values_ms.std()),
            {cut: float(value) for cut, value in zip(percentiles, cuts, strict=True)},
        )

    def entries(self, name: str) -> dict[str, float | None]:
        """As keys of the result: mean_ttft_ms, median_ttft_ms, std_ttft_ms, p99_ttft_ms."""
        entries = {f"mean_{name}_ms": self.mean, f"median_{name}_ms": self.median, f"std_{name}_ms": self.std}
        return entries | {f"p{cut:g}_{name}_ms": value for cut, value in self.percentiles.items()}


def is_good(record: RequestRecord, slos_ms: Mapping[str, float]) -> bool:
    """Whether an answer came whole and kept every objective; a single token has a TPOT of 0."""
    measured_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.latency_s}
    return record.has_succeeded and all(measured_s[name] * 1000 <= limit for name, limit in slos_ms.items())


def samples_of(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """All values of each metric in seconds, of answers that came whole."""
    whole = [record for record in records if record.has_succeeded]
    return {
        "ttft": [record.ttft_s for record in whole],
        "tpot": [tpot_s for record in whole if (tpot_s := record.tpot_s) is not None],
        "itl": [itl_s for record in whole for itl_s in record.itls_s],
        "e2el": [record.latency_s for record in whole],
    }


def timeline(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """Output tokens, and requests under way, of each second since the first request was sent.

    Only answers that came whole. A request counts in every second that it touches, so that this is an upper bound.
    Where the server does not tell how many tokens an event holds, each event holds the mean.
    """
    whole = [record for record in records if record.has_succeeded]
    if not whole:
        return [], []
    first_s = min(record.sent_s for record in whole)
    seconds = math.ceil(max(record.sent_s + record.latency_s for record in whole) - first_s) + 1
    tokens, requests = [0.0] * seconds, [0] * seconds
    for record in whole:
        events = len(record.event_times_s)
        counts: Sequence[float] = record.event_tokens or [record.output_tokens / events] * events
        for time_s, count in zip(record.event_times_s, counts, strict=True):
            tokens[int(time_s - first_s)] += count
        for second in range(int(record.sent_s - first_s), int(record.sent_s + record.latency_s - first_s) + 1):
            requests[second] += 1
    return tokens, requests


def summarise(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    metrics: Sequence[str] = tuple(METRIC_NAMES),
    percentiles: Sequence[float] = (50, 90, 99),
    slos_ms: Mapping[str, float] | None = None,
    has_queue: bool = False,
) -> dict[str, Any]:
    """The result as `vllm bench serve --save-result` names its parts, and what it does not report.

    Args:
        records: every request, whatever became of it.
        duration_s: from the first request to the end of the last one.
        metrics: which of METRIC_NAMES get statistics.
        percentiles: 0 to 100.
        slos_ms: objectives by SLO_NAMES; goodput is None without.
        has_queue: whether a highest concurrency made requests wait, so that waiting is reported.
    """
    whole = [record for record in records if record.has_succeeded]
    good = sum(is_good(record, slos_ms) for record in records) if slos_ms else None
    input_tokens = sum(record.prompt_tokens for record in whole)
    output_tokens = sum(record.output_tokens for record in whole)
    tokens, requests = timeline(records)
    samples = samples_of(records)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(whole),
        "failed": len(records) - len(whole),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(whole) / duration_s,
        "request_goodput": None if good is None else good / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "max_output_tokens_per_s": max(tokens, default=0.0),
        "max_concurrent_requests": max(requests, default=0),
        "error_counts": dict(Counter(record.error_kind for record in records if record.error_kind)),
        "short_answers": sum(record.output_tokens < record.asked_tokens for record in whole),
        "total_cached_tokens": sum(record.cached_tokens for record in whole),
        "tokens_counted_by": dict(Counter(record.counted_by.value for record in whole)),
    }
    for name in metrics:
        result |= Statistics.of(samples[name], percentiles).entries(name)
    if has_queue:
        result |= Statistics.of([record.queue_s for record in whole], percentiles).entries("client_queue_time")
    lateness_s = [record.arrived_s - record.scheduled_s for record in records]
    return result | Statistics.of(lateness_s, percentiles).entries("lateness")


def details(records: Sequence[RequestRecord], started_s: float) -> dict[str, Any]:
    """One entry for each request, as `--save-detailed` of `vllm bench serve` has it; times in seconds.

    `start_times` count from the start of the run. What an answer that failed has not is 0 or empty.
    """
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens if record.has_succeeded else 0 for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "latencies": [record.latency_s for record in records],
        "start_times": [record.sent_s - started_s for record in records],
        "queue_times": [record.queue_s for record in records],
        "generated_texts": ["".join(record.text) for record in records],
        "errors": [f"{record.error_kind}: {record.error}" if record.error_kind else "" for record in records],
    }
