"""Sums and averages whose past fades: recent work of a node, completions per second, usual output length."""

from __future__ import annotations

import math


class DecayingSum:
    """Adds amounts; each loses half of its weight every `half_life_s`. The caller brings the clock."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._value = 0.0
        self._at: float | None = None

    def add(self, amount: float, now: float) -> None:
        """Count `amount` at `now`."""
        self._value = self.value(now) + amount
        self._at = now

    def value(self, now: float) -> float:
        """What is left at `now`."""
        if self._at is None:
            return 0.0
        return self._value * math.exp2(-max(0.0, now - self._at) / self._half_life_s)


class RateEstimate:
    """Events per second of late, right from the first event on (a plain decaying sum starts too low)."""

    def __init__(self, half_life_s: float, least_s: float = 0.0) -> None:
        self._half_life_s = half_life_s
        self._least_s = least_s
        self._events = DecayingSum(half_life_s)
        self._first_at: float | None = None

    def add(self, count: float, now: float) -> None:
        """Count events at `now`."""
        if self._first_at is None:
            self._first_at = now
        self._events.add(count, now)

    def per_second(self, now: float) -> float | None:
        """None until two moments with an event between them are known, more than `least_s` apart."""
        if self._first_at is None or now <= self._first_at + self._least_s:
            return None
        time_constant_s = self._half_life_s / math.log(2.0)
        weight = time_constant_s * -math.expm1(-(now - self._first_at) / time_constant_s)
        return self._events.value(now) / weight


class RunningMean:
    """Exponentially weighted mean of values; the first value is the first mean."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Count one value."""
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)
