"""How often the router looks, and how long it waits, inside the cluster. Tests shorten it; nobody else needs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterTiming:
    """Seconds throughout.

    Attributes:
        poll_s: between readings of the directory's node records.
        poll_timeout_s: a reading that takes longer counts as an error.
        watch_interval_s: asked of nodes between two statuses.
        monitor_s: between checks for silence.
        describe_timeout_s: for a node to describe itself.
        status_timeout_s: for a fresh status in `describe()`.
        lookup_timeout_s: for the directory to find prefixes; later answers are not waited for.
        lookup_pause_s: after a failed lookup, during which none is tried; the one after that is not waited for.
        reconnect_first_s: pause before the first reconnect; doubles with each.
        reconnect_longest_s: longest pause between reconnects.
        forget_after_s: a node without record and without connection is forgotten after this.
        ready_check_s: longest pause between two looks for a ready node while a request waits for one.
        retry_first_s: upper end of the random pause before the first retry after a refusal; doubles with each.
        retry_longest_s: upper end of that pause at most.
        deadline_grace_s: after a request's deadline, for the node's own message to arrive first.
        flush_s: for the last cancels to leave on close.
    """

    poll_s: float = 0.5
    poll_timeout_s: float = 2.5
    watch_interval_s: float = 0.25
    monitor_s: float = 0.25
    describe_timeout_s: float = 2.0
    status_timeout_s: float = 0.8
    lookup_timeout_s: float = 0.2
    lookup_pause_s: float = 0.5
    reconnect_first_s: float = 0.05
    reconnect_longest_s: float = 1.0
    forget_after_s: float = 10.0
    ready_check_s: float = 0.25
    retry_first_s: float = 0.05
    retry_longest_s: float = 1.0
    deadline_grace_s: float = 0.5
    flush_s: float = 0.5
