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
"""By row, what was measured in each round; None where that failed. Shorter than the rounds where a run was cut."""


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
    """One line: a figure of ours beside one of theirs.

    Attributes:
        row: title of the work.
        figure: what was measured.
        our_layout: what computed of ours.
        their_engine: beside which engine; None where there is none to compare with.
        their_layout: what computed of theirs.
        ours: None where no round has it.
        theirs: the same of theirs.
        ratio: None when no round has both.
        our_failures: rounds in which our row failed.
        their_failures: the same of theirs.
    """

    row: str
    figure: Figure
    our_layout: Layout
    their_engine: str | None
    their_layout: Layout | None
    ours: Spread | None
    theirs: Spread | None
    ratio: Spread | None
    our_failures: int
    their_failures: int


def pairs(seats: Sequence[Seat]) -> Iterator[tuple[Seat, Seat | None]]:
    """Who is compared with whom: the same layout, and our PD pair also with one engine of two threads, ours too.

    A layout of ours that meets nobody is there alone.
    """
    has_pd = (OURS, Layout.PD) in seats
    for layout in dict.fromkeys(layout for _, layout in seats):
        ours: Seat = (OURS, layout)
        if ours not in seats:
            continue
        others = [seat for seat in seats if seat[1] is layout and seat[0] != OURS]
        if layout is Layout.PD:
            others += [seat for seat in seats if seat[1] is Layout.TWO]
        yield from ((ours, seat) for seat in others)
        if not others and not (has_pd and layout is Layout.TWO):
            yield ours, None


def compare(measured: Mapping[Seat, Values]) -> Iterator[Comparison]:
    """Every line, by row. Ratios pair the values of one round, which were measured closest in time."""
    for row_name in ROWS:
        for ours, theirs in pairs(list(measured)):
            our_rounds = measured[ours].get(row_name, [])
            their_rounds = [] if theirs is None else measured[theirs].get(row_name, [])
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
                    None if theirs is None else theirs[0],
                    None if theirs is None else theirs[1],
                    Spread.of([one[key] for one in our_rounds if one is not None]),
                    Spread.of([one[key] for one in their_rounds if one is not None]),
                    Spread.of(both),
                    our_rounds.count(None),
                    their_rounds.count(None),
                )


def layout_name(layout: Layout) -> str:
    """For people."""
    return {Layout.ONE: "1 thread", Layout.TWO: "2 threads", Layout.PD: "PD 1+1"}[layout]


def table_of(comparisons: Sequence[Comparison], rounds: int) -> Table:
    """For the terminal."""
    title, columns = f"Medians of {rounds} rounds (lowest to highest).", ["work", "figure", "pdserve", ""]
    has_peers = any(one.their_engine for one in comparisons)
    if has_peers:
        title, columns = f"{title} Ratios above 1: pdserve is better.", [*columns, "peer", "", "ratio"]
    table = Table(*columns, title=title)
    last = ""
    for one in comparisons:
        if last and one.row != last:
            table.add_section()
        cells = [
            one.row if one.row != last else "",
            f"{one.figure.title}, {one.figure.unit}",
            layout_name(one.our_layout),
            _shown(one.ours, one.our_failures),
        ]
        if one.their_engine is not None and one.their_layout is not None:
            their_name = f"{one.their_engine}, {layout_name(one.their_layout)}"
            cells += [their_name, _shown(one.theirs, one.their_failures), str(one.ratio or "-")]
        table.add_row(*cells)
        last = one.row
    return table


def _shown(spread: Spread | None, failures: int) -> str:
    """A dash where a run was cut before it came to this."""
    if spread is None:
        return "failed" if failures else "-"
    return f"{spread}, {failures} failed" if failures else str(spread)
