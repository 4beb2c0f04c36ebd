"""Draws a run as one HTML page with plots that needs no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.metrics import METRIC_NAMES, samples_of, timeline
from bench.report import text_of
from bench.request_record import RequestRecord
from engine.errors import ConfigError

ItemT = TypeVar("ItemT")

MOST_POINTS = 20_000
STYLE = "body{font-family:sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}pre{background:#f4f4f4;padding:1em}"


def write_page(
    path: Path,
    result: Mapping[str, Any],
    records: Sequence[RequestRecord],
    started_s: float,
    percentiles: Sequence[float],
) -> None:
    """Write the page. Raises ConfigError when plotly is not installed."""
    try:
        from plotly.graph_objects import Figure
    except ImportError as error:
        raise ConfigError("--html needs plotly: pip install 'pdserve[bench]'.") from error

    figures: list[Figure] = [
        _distributions(Figure(), records),
        _over_time(Figure(), records, started_s),
        _tokens_per_second(Figure(), records),
        _requests(Figure(), records, started_s),
    ]
    title = html.escape(f"{result['label'] or 'bench serve'}: {result['model_id']}")
    plots = [
        figure.to_html(full_html=False, include_plotlyjs=index == 0, config={"displaylogo": False})
        for index, figure in enumerate(figures)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<!doctype html><html><head><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style></head><body>"
        f"<h1>{title}</h1><p>{html.escape(str(result['date']))}</p>"
        f"<pre>{html.escape(text_of(result, percentiles))}</pre>"
        f"{''.join(plots)}</body></html>",
        encoding="utf-8",
    )


def _distributions(figure: Any, records: Sequence[RequestRecord]) -> Any:
    """Share of requests (for ITL, of gaps) that took at most so long."""
    for name, values_s in samples_of(records).items():
        ordered = _thinned(sorted(values_s))
        shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
        figure.add_scatter(x=[value * 1000 for value in ordered], y=shares, name=METRIC_NAMES[name], mode="lines")
    figure.update_layout(title="Latency", xaxis={"title": "ms", "type": "log"}, yaxis_title="% at most so long")
    return figure


def _over_time(figure: Any, records: Sequence[RequestRecord], started_s: float) -> Any:
    """When requests were sent, and how long they waited; failures at 0."""
    whole = _thinned([record for record in records if record.has_succeeded])
    gaps = _thinned([pair for record in whole for pair in zip(record.event_times_s[1:], record.itls_s, strict=True)])
    failed = [record for record in records if not record.has_succeeded]
    figure.add_scatter(
        x=[record.sent_s - started_s for record in whole],
        y=[record.ttft_s * 1000 for record in whole],
        name="TTFT by time of sending",
        mode="markers",
    )
    figure.add_scattergl(
        x=[time_s - started_s for time_s, _ in gaps],
        y=[gap_s * 1000 for _, gap_s in gaps],
        name="ITL by time of the token",
        mode="markers",
        marker={"size": 3},
    )
    figure.add_scatter(
        x=[max(record.sent_s, record.scheduled_s) - started_s for record in failed],
        y=[0] * len(failed),
        text=[html.escape(f"{record.error_kind}: {record.error}") for record in failed],
        name="failed",
        mode="markers",
        marker={"symbol": "x", "color": "red"},
    )
    figure.update_layout(title="Latency over time", xaxis_title="s since the start", yaxis_title="ms")
    return figure


def _tokens_per_second(figure: Any, records: Sequence[RequestRecord]) -> Any:
    tokens, requests = timeline(records)
    figure.add_scatter(y=tokens, name="output tokens/s", line={"shape": "hv"})
    figure.add_scatter(y=requests, name="requests under way", line={"shape": "hv"}, yaxis="y2")
    figure.update_layout(
        title="Throughput", xaxis_title="s since the first request", yaxis2={"overlaying": "y", "side": "right"}
    )
    return figure


def _requests(figure: Any, records: Sequence[RequestRecord], started_s: float) -> Any:
    """One bar for each request: waiting for its first token, then receiving tokens."""
    whole = [record for record in records if record.has_succeeded][:1000]
    rows = [record.index for record in whole]
    for name, starts_s, lengths_s in (
        ("to the first token", [record.sent_s for record in whole], [record.ttft_s for record in whole]),
        (
            "to the last token",
            [record.sent_s + record.ttft_s for record in whole],
            [record.latency_s - record.ttft_s for record in whole],
        ),
    ):
        bases = [start_s - started_s for start_s in starts_s]
        figure.add_bar(x=lengths_s, y=rows, base=bases, orientation="h", name=name)
    figure.update_layout(
        title="Requests (the first 1000)",
        barmode="overlay",
        xaxis_title="s since the start",
        yaxis={"autorange": "reversed"},
    )
    return figure


def _thinned(values: list[ItemT]) -> list[ItemT]:
    """At most MOST_POINTS of them, evenly chosen."""
    step = -(-len(values) // MOST_POINTS) or 1
    return values[::step]
