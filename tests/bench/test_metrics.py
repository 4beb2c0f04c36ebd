"""Latency, throughput and goodput from records whose times are known."""

from __future__ import annotations

import pytest

from bench.metrics import Statistics, details, is_good, summarise, timeline
from bench.request_record import CountedBy, RequestRecord


def record(
    index: int = 0,
    *,
    sent_s: float = 10.0,
    times_s: tuple[float, ...] = (10.5, 10.6, 10.8),
    tokens: int = 3,
    **fields: object,
) -> RequestRecord:
    """An answer that came whole, sent when it arrived."""
    made = RequestRecord(index, tokens, scheduled_s=sent_s, arrived_s=sent_s, sent_s=sent_s)
    made.prompt_tokens, made.output_tokens, made.counted_by = 7, tokens, CountedBy.USAGE
    made.event_times_s, made.is_done = list(times_s), True
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_latencies_of_one_request() -> None:
    one = record()
    assert one.ttft_s == pytest.approx(0.5)
    assert one.itls_s == pytest.approx([0.1, 0.2])
    assert one.latency_s == pytest.approx(0.8)
    assert one.tpot_s == pytest.approx(0.15)


def test_tokens_that_share_an_event_count_for_tpot_but_make_one_gap() -> None:
    one = record(times_s=(10.5, 10.8), tokens=4)
    assert one.itls_s == pytest.approx([0.3])
    assert one.tpot_s == pytest.approx(0.1)


def test_a_single_token_has_no_tpot() -> None:
    single = record(times_s=(10.5,), tokens=1)
    assert single.tpot_s is None
    result = summarise([single], 1.0)
    assert result["mean_tpot_ms"] is None
    assert result["mean_itl_ms"] is None
    assert is_good(single, {"tpot": 1.0})


def test_percentiles_are_interpolated_and_the_deviation_is_of_the_population() -> None:
    statistics = Statistics.of([0.001, 0.002, 0.003, 0.004], [50, 90])
    assert statistics.mean == pytest.approx(2.5)
    assert statistics.median == pytest.approx(2.5)
    assert statistics.std == pytest.approx(1.25**0.5)
    assert statistics.percentiles == {50: pytest.approx(2.5), 90: pytest.approx(3.7)}
    assert statistics.entries("ttft")["p90_ttft_ms"] == pytest.approx(3.7)
    assert set(Statistics.of([], [99.9]).entries("itl")) == {
        "mean_itl_ms",
        "median_itl_ms",
        "std_itl_ms",
        "p99.9_itl_ms",
    }


def test_throughput_counts_whole_answers_over_the_whole_duration() -> None:
    failed = record(2, error_kind="cut", error="gone")
    result = summarise([record(0), record(1, cached_tokens=4), failed], 2.0)
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (14, 6)
    assert result["request_throughput"] == pytest.approx(1.0)
    assert result["output_throughput"] == pytest.approx(3.0)
    assert result["total_token_throughput"] == pytest.approx(10.0)
    assert result["error_counts"] == {"cut": 1}
    assert result["total_cached_tokens"] == 4
    assert result["request_goodput"] is None


def test_goodput_needs_every_objective_and_a_whole_answer() -> None:
    fast, slow_first = record(0), record(1, times_s=(11.0, 11.1, 11.2))
    slow_next = record(2, times_s=(10.5, 10.9, 11.3))
    failed = record(3, error_kind="timeout")
    slos_ms = {"ttft": 500.1, "tpot": 150.1, "e2el": 2000.0}
    result = summarise([fast, slow_first, slow_next, failed], 4.0, slos_ms=slos_ms)
    assert result["request_goodput"] == pytest.approx(0.25)


def test_when_all_fail_there_are_no_statistics_and_no_zeros() -> None:
    result = summarise([record(0, error_kind="connect")], 1.0, slos_ms={"ttft": 1.0})
    assert result["mean_ttft_ms"] is None
    assert result["p99_e2el_ms"] is None
    assert result["request_goodput"] == 0.0
    assert result["max_output_tokens_per_s"] == 0.0


def test_answers_shorter_than_asked_are_counted() -> None:
    assert summarise([record(0, asked_tokens=4), record(1)], 1.0)["short_answers"] == 1


def test_queueing_and_lateness_are_apart() -> None:
    waited = record(0, scheduled_s=9.0, arrived_s=9.25)
    result = summarise([waited], 1.0, has_queue=True)
    assert result["mean_client_queue_time_ms"] == pytest.approx(750.0)
    assert result["mean_lateness_ms"] == pytest.approx(250.0)
    assert "mean_client_queue_time_ms" not in summarise([waited], 1.0)


def test_timeline_counts_tokens_in_the_second_they_came() -> None:
    first = record(0, sent_s=10.0, times_s=(10.5, 11.5, 11.6), event_tokens=[1, 2, 3], tokens=6)
    second = record(1, sent_s=11.9, times_s=(12.0, 12.1), tokens=4)  # of unknown spread: two in each event
    tokens, requests = timeline([first, second])
    assert tokens[:3] == pytest.approx([1, 5, 4])
    assert requests[:3] == [1, 2, 1]
    result = summarise([first, second], 3.0)
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (5, 2)


def test_details_have_one_entry_for_each_request() -> None:
    entries = details([record(0, text=["a", "b"]), record(1, error_kind="cut", error="gone", sent_s=12.0)], 10.0)
    assert {len(values) for values in entries.values()} == {2}
    assert entries["output_lens"] == [3, 0]
    assert entries["start_times"] == [0.0, 2.0]
    assert entries["errors"] == ["", "cut: gone"]
    assert entries["generated_texts"] == ["ab", ""]
