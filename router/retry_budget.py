"""How many retries the router may make in all, so that a bad hour does not become a storm."""

from __future__ import annotations


class RetryBudget:
    """A bucket of retries, filled by a share of all requests and a trickle over time. The caller brings the clock.

    Retries after refusals and errors take from it. Moving a request off a lost node does not: that is the promise made
    to its client, happens once per loss, and is bounded per request.
    """

    def __init__(self, *, ratio: float = 0.2, least_per_s: float = 2.0, capacity: float = 50.0) -> None:
        self._ratio = ratio
        self._least_per_s = least_per_s
        self._capacity = capacity
        self._left = capacity / 2
        self._at: float | None = None

    def deposit(self) -> None:
        """A request was admitted."""
        self._left = min(self._capacity, self._left + self._ratio)

    def take(self, now: float) -> bool:
        """Take one retry if there is one."""
        if self._at is not None:
            self._left = min(self._capacity, self._left + max(0.0, now - self._at) * self._least_per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
