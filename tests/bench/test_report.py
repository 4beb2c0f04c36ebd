"""The report as text, as a page and as a live line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import html_report, report
from bench.load import LoadRun
from bench.metrics import Statistics, summarise
from bench.progress import showing, status_of
from bench.request_record import RequestRecord
from tests.bench.test_metrics import record

CONFIGURATION: dict[str, Any] = {
    "date": "20260102-030405",
    "label": None,
    "backend": "openai",
    "model_id": "org/<model>",
    "request_rate": 2.5,
    "max_concurrency": 8,
}


def result_of(records: list[RequestRecord], **fields: Any) -> dict[str, Any]:
    client = {"client_cpu_percent": 12.5, **Statistics.of([0.001], [99.0]).entries("client_loop_lag")}
    return {**CONFIGURATION, **summarise(records, 2.0), **client, **fields}


def test_lines_are_those_of_vllm() -> None:
    lines = report.text_of(result_of([record(0), record(1)]), [50, 90, 99]).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    for line in (
        "Successful requests:                     2",
        "Request rate configured (RPS):           2.50",
        "Output token throughput (tok/s):         3.00",
        "Mean TTFT (ms):                          500.00",
        "Median TPOT (ms):                        150.00",
        "P99 E2EL (ms):                           800.00",
    ):
        assert line in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert not any(line.startswith("Note:") for line in lines)


def test_what_makes_figures_doubtful_is_said() -> None:
    doubtful = result_of([record(0, asked_tokens=9), record(1, error_kind="cut")], client_cpu_percent=95.0)
    text = report.text_of(doubtful | {"tokens_counted_by": {"events": 1}}, [50])
    assert "Failed with cut:                         1" in text
    assert "Note: 1 answers are shorter" in text
    assert "each event was counted as one token" in text
    assert "needed most of a core" in text


def test_files_are_named_as_vllm_names_them() -> None:
    assert report.default_name(CONFIGURATION) == "openai-2.5qps-concurrency8-<model>-20260102-030405.json"
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 4.0, "max_concurrency": None}
    name = report.default_name(CONFIGURATION | ramp | {"label": "mine"})
    assert name == "mine-ramp-up-linear-1.0qps-4.0qps-<model>-20260102-030405.json"


def test_the_page_holds_plots_failures_and_nothing_unescaped(tmp_path: Path) -> None:
    failed = record(2, error_kind="http_400", error="<b>bad</b>")
    records = [record(0), record(1, times_s=(10.9,), tokens=1), failed]
    html_report.write_page(tmp_path / "p.html", result_of(records), records, 10.0, [50, 99])
    page = (tmp_path / "p.html").read_text()
    assert page.count('class="plotly-graph-div"') == 4
    assert "org/&lt;model&gt;" in page
    assert "org/<model>" not in page
    assert "<b>bad" not in page
    html_report.write_page(tmp_path / "none.html", result_of([failed]), [failed], 10.0, [50, 99])


def test_the_live_line_counts(capsys: Any) -> None:
    waiting, running = RequestRecord(0, 1), RequestRecord(1, 4, sent_s=10.0, event_times_s=[10.25, 10.5])
    failed = record(2, error_kind="timeout", times_s=())
    run = LoadRun([waiting, running, failed, record(3)])
    assert status_of(run) == "2/4 done, 1 running, 1 failed, 5 events, TTFT 375 ms"
    with showing(4, enabled=True) as on_tick:
        on_tick(run)
        assert capsys.readouterr().err == ""  # too early for a line
        run.duration_s = 1.0
        on_tick(run)
        assert capsys.readouterr().err.startswith("2/4 done")
    with showing(4, enabled=False) as on_tick:
        on_tick(run)
    assert capsys.readouterr().err == ""
