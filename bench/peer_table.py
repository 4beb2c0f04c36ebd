"""Compares what engines measured in the same rounds: paired ratios, their medians and spread, one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from bench.peer_engines import OURS, Layout
from bench.peer_rows import ROWS, Figure

Seat = tuple[str, Layout]
"""An engine in a layout."""

Values = dict[str, list[dict[str, float] | None]]
"""By row, what was measured in each round; None where that failed."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of several rounds."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None without values."""
        return Spread(median(values), min(values), max(values)) if values else None

    def __str__(self) -> str:
        if self.low == self.high:
            return _short(self.middle)
        return f"{_short(self.middle)} ({_short(self.low)} to {_short(self.high)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line: a figure of ours beside one of theirs. `ratio` is None when no round has both."""

    row: str
    figure: Figure
    our_layout: Layout
    their_engine: str
    their_layout: Layout
    ours: Spread | None
    theirs: Spread | None
    ratio: Spread | None


def pairs(seats: Sequence[Seat]) -> Iterator[tuple[Seat, Seat]]:
    """Who is compared with whom: the same layout, and our PD pair also with one engine of two threads, ours too."""
    for layout in dict.fromkeys(layout for _, layout in seats):
        ours: Seat = (OURS, layout)
        if ours not in seats:
            continue
        yield from ((ours, seat) for seat in seats if seat[1] is layout and seat[0] != OURS)
        if layout is Layout.PD:
            yield from ((ours, seat) for seat in seats if seat[1] is Layout.TWO)


def compare(measured: Mapping[Seat, Values]) -> Iterator[Comparison]:
    """Every line, by row. Ratios pair the values of one round, which were measured closest in time."""
    for row_name in ROWS:
        for ours, theirs in pairs(list(measured)):
            our_rounds, their_rounds = measured[ours].get(row_name, []), measured[theirs].get(row_name, [])
            if not our_rounds and not their_rounds:
                continue
            for key, figure in ROWS[row_name].figures.items():
                both = [
                    figure.ratio(mine[key], other[key])
                    for mine, other in zip(our_rounds, their_rounds, strict=False)
                    if mine is not None and other is not None
                ]
                yield Comparison(
                    ROWS[row_name].title,
                    figure,
                    ours[1],
                    theirs[0],
                    theirs[1],
                    Spread.of([one[key] for one in our_rounds if one is not None]),
                    Spread.of([one[key] for one in their_rounds if one is not None]),
                    Spread.of(both),
                )


def layout_name(layout: Layout) -> str:
    """For people."""
    return {Layout.ONE: "1 thread", Layout.TWO: "2 threads", Layout.PD: "PD 1+1"}[layout]


def table_of(comparisons: Sequence[Comparison], rounds: int) -> Table:
    """For the terminal."""
    title = f"Medians of {rounds} rounds (lowest to highest). Ratios above 1: pdserve is better."
    table = Table("work", "figure", "pdserve", "", "peer", "", "ratio", title=title)
    last = ""
    for one in comparisons:
        if last and one.row != last:
            table.add_section()
        table.add_row(
            one.row if one.row != last else "",
            f"{one.figure.title}, {one.figure.unit}",
            layout_name(one.our_layout),
            str(one.ours or "failed"),
            f"{one.their_engine}, {layout_name(one.their_layout)}",
            str(one.theirs or "failed"),
            str(one.ratio or "-"),
        )
        last = one.row
    return table
