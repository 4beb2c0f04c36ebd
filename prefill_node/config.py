"""Settings of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import NodeConfig, check_positive


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """See NodeConfig for what both kinds of node share.

    Attributes:
        node: see NodeConfig.
        max_waiting: hand-offs that may queue before new ones are refused as busy.
        max_ungranted: started hand-offs of one decode node without its grant, at which no more of its are started.
        lease_s: seconds for which computed blocks stay pinned for a decode node that has not committed.
        max_sending_per_peer: hand-offs that may send to one decode node at once; each has one piece on its way.
    """

    node: NodeConfig
    max_waiting: int = 256
    max_ungranted: int = 8
    lease_s: float = 30.0
    max_sending_per_peer: int = 8

    def __post_init__(self) -> None:
        check_positive(self, "max_waiting", "max_ungranted", "lease_s", "max_sending_per_peer")
