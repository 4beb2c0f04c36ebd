"""When requests arrive in an open loop: at once, at a fixed rate, as a Poisson or gamma process, in bursts, in a ramp.

Rates, burstiness and ramps mean what they mean in `vllm bench serve`; bursts of several requests are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests arrive.

    Attributes:
        rate: requests per second; infinite sends all at once.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, less is burstier, infinite is
            a fixed rate.
        burst_size: so many requests arrive together; the mean rate stays.
        ramp: None, `linear` or `exponential`, from `ramp_start` to `ramp_end` requests per second; `rate` is not used.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    burst_size: int = 1
    ramp: str | None = None
    ramp_start: float = 0.0
    ramp_end: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError("request_rate must be above 0")
        if not self.burstiness > 0:
            raise ValueError("burstiness must be above 0")
        if self.burst_size < 1:
            raise ValueError("burst_size must be at least 1")
        if self.ramp is None:
            return
        if self.ramp not in ("linear", "exponential"):
            raise ValueError("ramp_up_strategy must be linear or exponential")
        if not 0 < self.ramp_start <= self.ramp_end:
            raise ValueError("ramp_up_start_rps must be above 0 and at most --ramp-up-end-rps")
        if not math.isinf(self.rate):
            raise ValueError("request_rate does not go with a ramp")

    def times(self, count: int, rng: np.random.Generator) -> list[float]:
        """Seconds from the start of each of `count` requests, ascending.

        Without a ramp the last burst arrives exactly when the mean rate says, as in `vllm bench serve`, so that runs of
        different seeds are equally long.
        """
        bursts = math.ceil(count / self.burst_size)
        rates = self._rates(bursts) / self.burst_size
        if np.isinf(rates).any():
            return [0.0] * count
        gaps = 1 / rates if math.isinf(self.burstiness) else rng.gamma(self.burstiness, 1 / (rates * self.burstiness))
        times = np.cumsum(gaps)
        if self.ramp is None:
            times *= bursts * self.burst_size / self.rate / times[-1]
        return [float(time) for time in np.repeat(times, self.burst_size)[:count]]

    def _rates(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Requests per second at each burst."""
        progress = np.arange(count) / max(count - 1, 1)
        if self.ramp == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * progress
        if self.ramp == "exponential":
            return np.asarray(self.ramp_start * (self.ramp_end / self.ramp_start) ** progress)
        return np.full(count, self.rate)
