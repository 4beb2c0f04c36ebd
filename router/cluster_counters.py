"""What the cluster side of one router has counted since its start. Shown by `describe()` and the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ClusterCounters:
    """Plain sums; requests in flight and their outcomes are counted by `router/admission.py`.

    Attributes:
        attempts: started on a decode node.
        retries: attempts that replace one which a node refused or failed.
        failovers: attempts that replace one whose node was lost.
        retries_denied: retries the cluster-wide budget did not allow.
        late_updates: from nodes about attempts or sequences that have ended here.
        nodes_lost: connections to nodes that broke or fell silent.
        nodes_stalled: nodes that were heard but made no progress.
        directory_lookups: prefix lookups asked of the directory.
        directory_hits: those that found anything.
        directory_errors: lookups and polls that failed or came too late.
        prefix_tokens_queried: prompt tokens of attempts whose cache hits became known.
        prefix_tokens_hit: those of them found in a prefix cache.
    """

    attempts: int = 0
    retries: int = 0
    failovers: int = 0
    retries_denied: int = 0
    late_updates: int = 0
    nodes_lost: int = 0
    nodes_stalled: int = 0
    directory_lookups: int = 0
    directory_hits: int = 0
    directory_errors: int = 0
    prefix_tokens_queried: int = 0
    prefix_tokens_hit: int = 0
