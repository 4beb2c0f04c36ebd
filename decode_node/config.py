"""Settings of a decode node."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config import NodeConfig, check_positive

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """See NodeConfig for what both kinds of node share.

    Attributes:
        node: see NodeConfig.
        max_waiting: attempts that may wait for blocks or prefill before new ones are refused as busy.
        handoff_deadline_s: seconds from opening a hand-off until it must have committed.
        shared_memory: offer the pool to prefill nodes of the same host.
        scheduling_policy: `priority` serves requests of a lower priority value first, and of these the one that came
            first; `fcfs` serves in order of arrival, and refuses requests with a priority.
        priority_ageing_s: seconds of waiting that outweigh one level of priority, so that nobody starves.
        itl_bound_ms: milliseconds that a step may take while prompts are computed beside running streams; these get
            less where it would take longer, but always something.
        swap_space_gib: GiB of host memory for the K/V of preempted sequences; 0 has it computed again.
    """

    node: NodeConfig
    max_waiting: int = 512
    handoff_deadline_s: float = 300.0
    shared_memory: bool = True
    scheduling_policy: str = "priority"
    priority_ageing_s: float = 60.0
    itl_bound_ms: float = 250.0
    swap_space_gib: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "max_waiting", "handoff_deadline_s", "priority_ageing_s", "itl_bound_ms")
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"scheduling_policy must be one of {', '.join(POLICIES)}, not {self.scheduling_policy!r}")
        if not 0 <= self.swap_space_gib < math.inf:
            raise ValueError(f"swap_space_gib must be at least 0, not {self.swap_space_gib}")

    @property
    def itl_bound_s(self) -> float:
        """In seconds."""
        return self.itl_bound_ms / 1000

    @property
    def swap_bytes(self) -> int:
        """In bytes."""
        return int(self.swap_space_gib * 1024**3)
