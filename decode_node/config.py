"""Settings of a decode node."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import NodeConfig, check_positive


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """See NodeConfig for what both kinds of node share.

    Attributes:
        node: see NodeConfig.
        max_waiting: attempts that may wait for blocks or prefill before new ones are refused as busy.
        handoff_deadline_s: seconds from opening a hand-off until it must have committed.
        shared_memory: offer the pool to prefill nodes of the same host.
    """

    node: NodeConfig
    max_waiting: int = 512
    handoff_deadline_s: float = 300.0
    shared_memory: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "max_waiting", "handoff_deadline_s")
