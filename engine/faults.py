"""Named places at which tests make a node fail. Off unless PDSERVE_FAULTS is set when the node starts.

`PDSERVE_FAULTS="before_commit=exit;before_send=sleep:2.5@3"`: a place, an action, and at which visit (default: the
first, `*` means every one). Actions: `exit` (the process ends at once, as if killed), `raise`, `sleep:SECONDS`.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import AttemptFailed, ConfigError

PLACES = (
    "before_start",
    "after_chunk",
    "before_first_token",
    "before_send",
    "before_complete",
    "before_commit",
    "after_commit_before_ack",
    "after_decode_step",
)


@dataclass(frozen=True, slots=True)
class _Fault:
    action: str
    seconds: float
    visit: int | None


class Faults:
    """The faults of one node."""

    def __init__(self, faults: Mapping[str, _Fault]) -> None:
        self._faults = dict(faults)
        self._visits: dict[str, int] = {}

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read the value of PDSERVE_FAULTS; raises ConfigError naming the part that is wrong."""
        faults: dict[str, _Fault] = {}
        for part in filter(None, (piece.strip() for piece in text.split(";"))):
            place, _, rest = part.partition("=")
            action, _, visit = rest.partition("@")
            name, _, seconds = action.partition(":")
            if place not in PLACES or name not in ("exit", "raise", "sleep"):
                raise ConfigError(f"PDSERVE_FAULTS: {part!r} names no known place and action")
            try:
                fault = _Fault(name, float(seconds or 0), None if visit == "*" else int(visit or 1))
            except ValueError:
                raise ConfigError(f"PDSERVE_FAULTS: {part!r} has a number that cannot be read") from None
            if not 0 <= fault.seconds < math.inf or (fault.visit is not None and fault.visit < 1):
                raise ConfigError(f"PDSERVE_FAULTS: {part!r} has a number that makes no sense")
            faults[place] = fault
        return cls(faults)

    @classmethod
    def from_env(cls) -> Faults:
        """The faults that the environment asks for; read once, at start."""
        return cls.parse(os.environ.get("PDSERVE_FAULTS", ""))

    def due(self, place: str) -> _Fault | None:
        """The fault to perform at this visit of `place`."""
        fault = self._faults.get(place)
        if fault is None:
            return None
        self._visits[place] = self._visits.get(place, 0) + 1
        return fault if fault.visit is None or fault.visit == self._visits[place] else None

    async def reach(self, place: str) -> None:
        """Perform what is due at `place`: nothing, as a rule."""
        fault = self.due(place)
        if fault is None:
            return
        if fault.action == "sleep":
            await asyncio.sleep(fault.seconds)
        else:
            _end(fault, place)

    def reach_now(self, place: str) -> None:
        """The same where nothing can be awaited: a sleep stops the whole process, as a hang would."""
        fault = self.due(place)
        if fault is None:
            return
        if fault.action == "sleep":
            time.sleep(fault.seconds)
        else:
            _end(fault, place)


def _end(fault: _Fault, place: str) -> None:
    if fault.action == "exit":
        os._exit(9)
    raise AttemptFailed(f"fault injected at {place}", reason="fault_injected")
