"""Arrival times: rates, distributions, bursts and ramps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.arrivals import Arrivals


def times(arrivals: Arrivals, count: int, seed: int = 0) -> list[float]:
    return arrivals.times(count, np.random.default_rng(seed))


def gaps(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.diff([0.0, *values])


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert times(Arrivals(), 3) == [0.0, 0.0, 0.0]


def test_infinite_burstiness_is_a_fixed_rate() -> None:
    assert times(Arrivals(rate=4, burstiness=math.inf), 4) == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_are_gamma_distributed(burstiness: float, variation: float) -> None:
    """The coefficient of variation of a gamma distribution is one over the root of its shape."""
    found = gaps(times(Arrivals(rate=10, burstiness=burstiness), 20_000))
    assert found.mean() == pytest.approx(0.1)
    assert found.std() / found.mean() == pytest.approx(variation, rel=0.05)


def test_runs_of_other_seeds_are_equally_long_and_the_same_seed_repeats() -> None:
    arrivals = Arrivals(rate=5)
    assert times(arrivals, 50, seed=1)[-1] == pytest.approx(10.0)
    assert times(arrivals, 50, seed=2)[-1] == pytest.approx(10.0)
    assert times(arrivals, 50, seed=1) == times(arrivals, 50, seed=1) != times(arrivals, 50, seed=2)


def test_bursts_arrive_together_at_the_same_mean_rate() -> None:
    found = times(Arrivals(rate=4, burstiness=math.inf, burst_size=2), 5)
    assert found == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.5])


def test_a_linear_ramp_shortens_gaps_from_start_to_end() -> None:
    found = gaps(times(Arrivals(burstiness=math.inf, ramp="linear", ramp_start=1, ramp_end=4), 4))
    assert found == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_an_exponential_ramp_multiplies_the_rate() -> None:
    found = gaps(times(Arrivals(burstiness=math.inf, ramp="exponential", ramp_start=1, ramp_end=8), 4))
    assert found == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8])


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0},
        {"burstiness": 0},
        {"burst_size": 0},
        {"ramp": "steep", "ramp_start": 1, "ramp_end": 2},
        {"ramp": "linear", "ramp_start": 0, "ramp_end": 2},
        {"ramp": "linear", "ramp_start": 3, "ramp_end": 2},
        {"ramp": "linear", "ramp_start": 1, "ramp_end": 2, "rate": 4},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rate|burst|ramp"):
        Arrivals(**wrong)  # type: ignore[arg-type]
