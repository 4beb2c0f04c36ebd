"""Learned output lengths, and the peak of what running sequences will need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_node.growth import Demand, OutputLengths, peak_growth


class TestOutputLengths:
    def test_the_prior_counts_until_something_is_known(self) -> None:
        lengths = OutputLengths(prior=100)
        assert lengths.remaining(0, 1000) == 100
        assert lengths.remaining(0, 30) == 30
        for _ in range(99):
            lengths.record(10)
        assert lengths.remaining(0, 1000) == 11

    def test_what_has_run_longer_than_the_short_ones_is_one_of_the_long_ones(self) -> None:
        lengths = OutputLengths(prior=10)
        for length in (10, 10, 200, 400):
            lengths.record(length)
        assert lengths.remaining(9, 1000) == 126 - 9
        assert lengths.remaining(10, 1000) == 300 - 10
        assert lengths.remaining(300, 1000) == 100

    def test_what_outlived_all_goes_on_for_as_long_again(self) -> None:
        lengths = OutputLengths(prior=10)
        assert lengths.remaining(50, 1000) == 50
        assert lengths.remaining(950, 1000) == 50

    def test_the_old_are_forgotten(self) -> None:
        lengths = OutputLengths(prior=500, window=4)
        for length in (9, 7, 8, 7, 7):
            lengths.record(length)
        assert lengths.mean == (7 + 8 + 7 + 7) / 4
        # All known are shorter than the prior was.
        assert lengths.remaining(8, 1000) == 8

    @given(st.lists(st.integers(1, 300), max_size=40), st.integers(0, 400), st.integers(1, 400))
    def test_always_at_least_one_token_and_never_beyond_max_tokens(
        self, known: list[int], generated: int, more: int
    ) -> None:
        lengths = OutputLengths(prior=20, window=16)
        for length in known:
            lengths.record(length)
        kept = [20, *known][-16:]
        longer = [length for length in kept if length > generated]
        remaining = lengths.remaining(generated, generated + more)
        assert 1 <= remaining <= more
        if longer:
            assert remaining == min(more, -(-sum(longer) // len(longer)) - generated)


def _by_playing_it_out(demands: list[Demand], block_size: int) -> int:
    """The most blocks beyond those held now, looked up step by step."""
    peak = None
    for now in range(1, max(each.remaining for each in demands) + 1):
        growth = 0
        for each in demands:
            if now > each.remaining:
                growth -= each.own
            else:
                growth += -(-(each.num_tokens + now) // block_size) - each.held
        peak = growth if peak is None else max(peak, growth)
    assert peak is not None
    return peak


class TestPeakGrowth:
    def test_nothing_needs_nothing(self) -> None:
        assert peak_growth([], 4) == 0

    def test_what_ends_before_makes_room_for_what_goes_on(self) -> None:
        # Each has 4 blocks of its own. The long one needs 10 more, but when it needs the last the other is gone.
        short, long = Demand(16, 4, 4, 4), Demand(16, 4, 4, 40)
        assert peak_growth([short], 4) == 1
        assert peak_growth([long], 4) == 10
        assert peak_growth([short, long], 4) == 10 - 4

    def test_shared_blocks_do_not_come_back(self) -> None:
        assert peak_growth([Demand(16, 4, 0, 4), Demand(16, 4, 4, 40)], 4) == 10

    @given(
        st.lists(
            st.tuples(st.integers(1, 60), st.integers(0, 20), st.integers(0, 20), st.integers(1, 50)),
            min_size=1,
            max_size=8,
        ),
        st.integers(1, 8),
    )
    def test_the_same_as_playing_it_out(self, rows: list[tuple[int, int, int, int]], block_size: int) -> None:
        demands = [
            Demand(tokens, min(held, -(-tokens // block_size)), min(own, held, -(-tokens // block_size)), remaining)
            for tokens, held, own, remaining in rows
        ]
        assert peak_growth(demands, block_size) == _by_playing_it_out(demands, block_size)
