"""Ratios of paired rounds, their spread, and who is compared with whom."""

from __future__ import annotations

import pytest
from rich.console import Console

from bench.peer_engines import OURS, Layout
from bench.peer_rows import Figure
from bench.peer_table import Seat, Spread, Values, compare, pairs, table_of


def measured(**ttfts_ms: list[float | None]) -> dict[Seat, Values]:
    """TTFTs of the prefill row, by `engine__layout`."""
    seats: dict[Seat, Values] = {}
    for name, values in ttfts_ms.items():
        engine, _, layout = name.partition("__")
        rounds = [None if value is None else {"ttft_ms": value} for value in values]
        seats[engine, Layout({"one": "1", "two": "2", "pd": "pd"}[layout])] = {"prefill": rounds}
    return seats


def test_a_ratio_above_one_means_that_ours_is_better() -> None:
    assert Figure("TTFT", "ms").ratio(ours=100, theirs=250) == 2.5
    assert Figure("decode", "tok/s", is_rate=True).ratio(ours=30, theirs=20) == 1.5


def test_ratios_pair_the_values_of_one_round() -> None:
    """A machine that was slow in the second round was slow for both."""
    [line] = compare(measured(pdserve__two=[100, 1000, 100], vllm__two=[200, 2100, 150]))
    assert line.ratio == Spread(2.0, 1.5, 2.1)
    assert line.ours == Spread(100, 100, 1000)
    assert line.theirs == Spread(200, 150, 2100)


def test_a_failed_round_makes_no_ratio_but_keeps_the_other_value() -> None:
    [line] = compare(measured(pdserve__two=[100, None], vllm__two=[None, 300]))
    assert line.ratio is None
    assert (line.ours, line.theirs) == (Spread(100, 100, 100), Spread(300, 300, 300))
    [failed] = compare(measured(pdserve__one=[100], vllm__one=[None]))
    assert failed.theirs is None


def test_our_pd_pair_meets_theirs_and_one_engine_of_two_threads_of_both() -> None:
    seats: list[Seat] = [(name, layout) for layout in Layout for name in (OURS, "vllm")]
    assert [
        (ours[1].value, theirs[0], theirs[1].value) for ours, theirs in pairs([*seats, ("llama.cpp", Layout.TWO)])
    ] == [
        ("1", "vllm", "1"),
        ("2", "vllm", "2"),
        ("2", "llama.cpp", "2"),
        ("pd", "vllm", "pd"),
        ("pd", "pdserve", "2"),
        ("pd", "vllm", "2"),
        ("pd", "llama.cpp", "2"),
    ]


@pytest.mark.parametrize(
    ("spread", "text"),
    [(Spread(1234.5, 999.4, 2000), "1234 (999 to 2000)"), (Spread(1.234, 1.234, 1.234), "1.23")],
)
def test_spreads_are_short(spread: Spread, text: str) -> None:
    assert str(spread) == text


def test_the_table_says_what_failed() -> None:
    lines = list(compare(measured(pdserve__pd=[100.0], vllm__pd=[None], vllm__two=[150.0])))
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(table_of(lines, 1))
    text = console.export_text()
    assert "failed" in text
    assert "vllm, 2 threads" in text
    assert "1.5" in text
