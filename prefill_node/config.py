"""Settings of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from engine.config import NodeConfig, check_positive
from prefill_node.scheduler import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """See NodeConfig for what both kinds of node share.

    Attributes:
        node: see NodeConfig.
        max_waiting: hand-offs that may queue before new ones are refused as busy.
        max_ungranted: started hand-offs of one decode node without its grant, at which no more of its are started.
        lease_s: seconds for which computed blocks stay pinned for a decode node that has not committed.
        max_sending_per_peer: hand-offs that may send to one decode node at once; each has one piece on its way.
        scheduling_policy: `priority` computes the most urgent prompts first and of these the shortest, without letting
            any starve; `fcfs` computes in order of arrival.
    """

    node: NodeConfig
    max_waiting: int = 256
    max_ungranted: int = 8
    lease_s: float = 30.0
    max_sending_per_peer: int = 8
    scheduling_policy: SchedulingPolicy = "priority"

    def __post_init__(self) -> None:
        check_positive(self, "max_waiting", "max_ungranted", "lease_s", "max_sending_per_peer")
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            known = ", ".join(get_args(SchedulingPolicy))
            raise ValueError(f"scheduling_policy must be one of {known}, not {self.scheduling_policy!r}")
