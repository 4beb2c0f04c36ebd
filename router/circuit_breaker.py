"""When to leave a node alone that keeps failing. Only faults count: broken transport and internal errors.

A refusal (busy, draining) and a wrong request (4xx) say nothing about the node and never open it.

    closed --- `threshold` faults without a success ---> open --- pause over ---> half-open: one probe at a time
      ^                                                   ^                            |
      +-------------- a first token (success) ------------+------- fault --------------+
"""

from __future__ import annotations


class CircuitBreaker:
    """Of one node. The caller brings the clock."""

    def __init__(self, *, threshold: int = 3, first_pause_s: float = 1.0, longest_pause_s: float = 30.0) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._pause_s = first_pause_s
        self._faults = 0
        self._open_until: float | None = None
        self._probing = False

    def is_open(self) -> bool:
        """Whether the node is suspended or on probation."""
        return self._open_until is not None

    def allows(self, now: float) -> bool:
        """Whether new work may go to the node."""
        if self._open_until is None:
            return True
        return now >= self._open_until and not self._probing

    def start(self, now: float) -> bool:
        """Work is about to go to the node. Returns whether it is the probe."""
        if self._open_until is None or now < self._open_until:
            return False
        self._probing = True
        return True

    def success(self) -> None:
        """The node proved itself."""
        self._faults = 0
        self._open_until = None
        self._probing = False
        self._pause_s = self._first_pause_s

    def fault(self, now: float) -> None:
        """Transport broke or the node reported an internal error."""
        self._faults += 1
        if self._open_until is not None and now >= self._open_until:
            self._pause_s = min(self._longest_pause_s, 2 * self._pause_s)
            self._open(now)
        elif self._open_until is None and self._faults >= self._threshold:
            self._open(now)

    def end_probe(self) -> None:
        """The probe ended without telling anything, for example because its client left."""
        self._probing = False

    def _open(self, now: float) -> None:
        self._open_until = now + self._pause_s
        self._probing = False
