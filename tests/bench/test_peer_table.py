"""Ratios of paired rounds, their spread, and who is compared with whom."""

from __future__ import annotations

import io
import re

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
    assert failed.theirs is None and failed.their_failures == 1


def test_our_pd_pair_meets_theirs_and_one_engine_of_two_threads_of_both() -> None:
    seats: list[Seat] = [(name, layout) for layout in Layout for name in (OURS, "vllm")]
    assert [
        (ours[1].value, theirs[0], theirs[1].value)
        for ours, theirs in pairs([*seats, ("llama.cpp", Layout.TWO)])
        if theirs is not None
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


def test_ours_meets_nobody_without_peers_unless_it_is_a_pd_pair() -> None:
    one, two, pd = ((OURS, layout) for layout in (Layout.ONE, Layout.TWO, Layout.PD))
    assert list(pairs([one, two])) == [(one, None), (two, None)]
    assert list(pairs([pd, one, two])) == [(pd, two), (one, None)]
    assert list(pairs([pd])) == [(pd, None)]


def shown(rounds: int, **ttfts_ms: list[float | None]) -> list[list[str]]:
    """Cells of each line of the table, its head first."""
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table_of(list(compare(measured(**ttfts_ms))), rounds))
    lines = [re.split("[│┃]", line) for line in console.export_text().splitlines()]
    return [[cell.strip() for cell in line[1:-1]] for line in lines if len(line) > 1]


def test_the_table_says_what_failed_and_what_was_not_reached() -> None:
    _, *lines = shown(2, pdserve__pd=[100.0, None], vllm__pd=[None, None], vllm__two=[150.0], pdserve__two=[])
    assert [line[3:] for line in lines] == [
        ["100, 1 failed", "vllm, PD 1+1", "failed", "-"],
        ["100, 1 failed", "vllm, 2 threads", "150", "1.5"],
        ["100, 1 failed", "pdserve, 2 threads", "-", "-"],
        ["-", "vllm, 2 threads", "150", "-"],
    ]


def test_the_table_of_ours_alone_has_its_figures_and_no_columns_of_peers() -> None:
    head, *lines = shown(3, pdserve__two=[100.0, 120.0, 90.0], pdserve__one=[200.0])
    assert head == ["work", "figure", "pdserve", ""]
    assert [line[2:] for line in lines] == [["2 threads", "100 (90 to 120)"], ["1 thread", "200"]]
