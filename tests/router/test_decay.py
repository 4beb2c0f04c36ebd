"""Sums and averages whose past fades."""

from __future__ import annotations

import pytest

from router.decay import DecayingSum, RateEstimate, RunningMean


def test_a_sum_halves_with_each_half_life() -> None:
    total = DecayingSum(2.0)
    assert total.value(5.0) == 0.0
    total.add(8.0, 0.0)
    assert total.value(2.0) == pytest.approx(4.0)
    total.add(1.0, 4.0)
    assert total.value(4.0) == pytest.approx(3.0)


@pytest.mark.parametrize("seconds", [1, 10, 100])
def test_a_steady_rate_is_right_from_the_start(seconds: int) -> None:
    rate = RateEstimate(10.0)
    assert rate.per_second(0.0) is None
    for tick in range(1, seconds * 10 + 1):
        rate.add(1, tick * 0.1)
    assert rate.per_second(seconds * 1.0) == pytest.approx(10.0, rel=0.15)


def test_a_mean_starts_with_its_first_value() -> None:
    mean = RunningMean(0.5)
    assert mean.value is None
    mean.add(10.0)
    assert mean.value == 10.0
    mean.add(20.0)
    assert mean.value == 15.0
