"""How fast something goes, learned from what it took. Knows no clock."""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.8
"""Weight of what is known against what a new measurement says."""


@dataclass(slots=True)
class Rate:
    """Units per second, from decaying sums: recent measurements count more than old, large ones more than small."""

    units: float = 0.0
    seconds: float = 0.0

    def record(self, units: float, seconds: float) -> None:
        """So many units took so many seconds. What took no time says nothing."""
        if units > 0 and seconds > 0:
            self.units = self.units * KEPT + units
            self.seconds = self.seconds * KEPT + seconds

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self.seconds > 0

    def time_s(self, units: float) -> float:
        """Seconds for so many units; 0 while nothing is known."""
        return units * self.seconds / self.units if self.is_known else 0.0

    @property
    def per_s(self) -> float:
        """Units per second; 0 while nothing is known."""
        return self.units / self.seconds if self.is_known else 0.0
