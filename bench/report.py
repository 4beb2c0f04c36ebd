"""Shows a result as text in the lines of `vllm bench serve`, and keeps it as JSON under the same keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.metrics import METRIC_NAMES

WIDTH = 50
HEADLINES = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_cached_tokens": "Input tokens found cached:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
SECTIONS = METRIC_NAMES | {
    "client_queue_time": "Client-side Queueing",
    "lateness": "Lateness of this client",
}
SHORT_NAMES = {"client_queue_time": "Client Queue Time", "lateness": "Lateness"}


def text_of(result: Mapping[str, Any], percentiles: Sequence[float]) -> str:
    """The whole report."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    for key, label in HEADLINES.items():
        value = result.get(key)
        if value is not None and value != "inf":
            lines.append(_line(label, value))
    for kind, count in result["error_counts"].items():
        lines.append(_line(f"Failed with {kind}:", count))
    for name, title in SECTIONS.items():
        if f"mean_{name}_ms" in result:
            lines += _section(result, name, title, percentiles)
    lines.append(" This client ".center(WIDTH, "-"))
    lines.append(_line("CPU of one core (%):", result["client_cpu_percent"]))
    lines.append(_line("P99 event loop lag (ms):", result["p99_client_loop_lag_ms"]))
    lines.append("=" * WIDTH)
    return "\n".join([*lines, *_warnings(result)])


def _section(result: Mapping[str, Any], name: str, title: str, percentiles: Sequence[float]) -> Iterator[str]:
    short = SHORT_NAMES.get(name, name.upper())
    yield title.center(WIDTH, "-")
    yield _line(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
    yield _line(f"Median {short} (ms):", result[f"median_{name}_ms"])
    for cut in percentiles:
        if cut == 50:
            continue  # is the median
        yield _line(f"P{cut:g} {short} (ms):", result[f"p{cut:g}_{name}_ms"])


def _line(label: str, value: float | None) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}".rstrip()


def _warnings(result: Mapping[str, Any]) -> Iterator[str]:
    """What makes a reader doubt the figures."""
    if result["short_answers"]:
        yield f"Note: {result['short_answers']} answers are shorter than asked for (use --ignore-eos for full length)."
    if result["tokens_counted_by"].get("events"):
        yield "Note: the server tells no usage, so each event was counted as one token."
    if result["client_cpu_percent"] > 80:
        yield "Note: this client needed most of a core; latencies may be its own."


def default_name(result: Mapping[str, Any]) -> str:
    """As `vllm bench serve` names its files."""
    label = result["label"] or result["backend"]
    limit = "" if result["max_concurrency"] is None else f"-concurrency{result['max_concurrency']}"
    rate = f"{result['request_rate']}qps"
    if "ramp_up_strategy" in result:
        rate = f"ramp-up-{result['ramp_up_strategy']}-{result['ramp_up_start_rps']}qps-{result['ramp_up_end_rps']}qps"
    return f"{label}-{rate}{limit}-{str(result['model_id']).split('/')[-1]}-{result['date']}.json"


def save(result: Mapping[str, Any], path: Path, *, append: bool) -> None:
    """Write one JSON object, as a further line when appending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(("\n" if file.tell() else "") + json.dumps(result))
