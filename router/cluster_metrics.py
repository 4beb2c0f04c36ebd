"""The cluster side's Prometheus metrics, read from the live books whenever somebody scrapes.

vLLM's names where the meaning is the same; prefix-cache tokens and requests are on the API side's own metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from router.node import NodeHealth

if TYPE_CHECKING:
    from router.dispatch import RouterCluster

COUNTER_HELP = {
    "attempts": "Attempts started on decode nodes.",
    "retries": "Attempts that replace one which a node refused or failed.",
    "failovers": "Attempts that replace one whose node was lost.",
    "retries_denied": "Retries the cluster-wide budget did not allow.",
    "late_updates": "Updates from nodes about work that had ended here, ignored.",
    "nodes_lost": "Connections to nodes that broke or fell silent.",
    "nodes_stalled": "Times a node was heard but made no progress.",
    "directory_lookups": "Prefix lookups asked of the directory.",
    "directory_hits": "Prefix lookups that found anything.",
    "directory_errors": "Directory lookups and polls that failed or came too late.",
    "prefix_tokens_queried": "Prompt tokens whose cache hits became known, by the nodes' word.",
    "prefix_tokens_hit": "Those of them that were found in a prefix cache.",
}


class ClusterCollector(Collector):
    """Register on a CollectorRegistry; `collect` must run on the loop's thread."""

    def __init__(self, cluster: RouterCluster, *, model_name: str, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._model_name = model_name
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """One family at a time."""
        yield from self._node_families()
        yield from self._router_families()

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not collect."""
        return []

    def _node_families(self) -> Iterator[Metric]:
        labels = ("model_name", "node_id", "role")
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences in the node's steps.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences waiting on the node.", labels=labels)
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the node's blocks in use; 1 is all.", labels=labels
        )
        transfers = CounterMetricFamily(
            "pdserve:transfers", "Transfers of KV blocks, by what became of them.", labels=(*labels, "outcome")
        )
        failures = CounterMetricFamily(
            "pdserve:handoff_failures", "Hand-offs that failed, by reason.", labels=(*labels, "reason")
        )
        kv_bytes = CounterMetricFamily(
            "pdserve:kv_transfer_bytes",
            "Bytes of KV sent (prefill) or received (decode).",
            labels=(*labels, "transport"),
        )
        kv_seconds = SummaryMetricFamily(
            "pdserve:kv_transfer_seconds",
            "Hand-offs that moved KV; seconds writing it (prefill), or from grant to commit (decode).",
            labels=(*labels, "transport"),
        )
        local = CounterMetricFamily("pdserve:local_prefills", "Prompts computed by a decode node.", labels=labels)
        preemptions = CounterMetricFamily("vllm:num_preemptions", "Preemptions.", labels=labels)
        swaps = CounterMetricFamily(
            "pdserve:preemptions_swapped", "Preemptions that kept a copy of the KV in host memory.", labels=labels
        )
        allocated = GaugeMetricFamily(
            "pdserve:kv_slots_allocated", "Slots of the blocks of running sequences.", labels=labels
        )
        unused = GaugeMetricFamily("pdserve:kv_slots_unused", "Those without a token in them.", labels=labels)
        reserved = GaugeMetricFamily(
            "pdserve:kv_blocks_reserved", "Blocks promised to hand-offs that have not committed.", labels=labels
        )
        expected = GaugeMetricFamily(
            "pdserve:expected_output_tokens", "Tokens that a node expects of a new sequence.", labels=labels
        )
        prompt_tokens = CounterMetricFamily(
            "pdserve:node_prompt_tokens", "Prompt tokens by where they came from.", labels=(*labels, "source")
        )
        in_flight = GaugeMetricFamily("pdserve:node_in_flight", "Work of this router on the node.", labels=labels)
        state = GaugeMetricFamily("pdserve:node_state", "1 for the state a node is in.", labels=(*labels, "state"))
        now = self._clock()
        for node in self._cluster.registry.nodes():
            values = (self._model_name, node.node_id, node.role)
            health = node.health(now)
            for each in NodeHealth:
                state.add_metric((*values, each.value), float(each is health))
            in_flight.add_metric(values, node.own.attempts + node.own.prefills)
            status = node.status
            if status is None:
                continue
            running.add_metric(values, status.running_sequences)
            waiting.add_metric(values, status.waiting_sequences)
            usage.add_metric(values, status.blocks.in_use / max(1, status.blocks.total))
            for outcome in ("started", "committed", "failed", "aborted"):
                transfers.add_metric((*values, outcome), getattr(status.transfers, outcome))
            for reason, count in status.failures.items():
                failures.add_metric((*values, reason), count)
            for transport, use in status.transports.items():
                kv_bytes.add_metric((*values, transport), use.bytes)
                kv_seconds.add_metric((*values, transport), use.transfers, use.seconds)
            local.add_metric(values, status.local_prefills)
            preemptions.add_metric(values, status.preemptions)
            swaps.add_metric(values, status.swaps)
            if status.HasField("allocated_slots"):  # A decode node's, unless it is of an older version.
                allocated.add_metric(values, status.allocated_slots)
            unused.add_metric(values, status.unused_slots)
            reserved.add_metric(values, status.reserved_blocks)
            expected.add_metric(values, status.expected_output_tokens)
            prompt_tokens.add_metric((*values, "computed"), status.prefill_tokens_computed)
            prompt_tokens.add_metric((*values, "cached"), status.prefill_tokens_cached)
        yield from (running, waiting, usage, transfers, failures, kv_bytes, kv_seconds, local, preemptions, in_flight)
        yield from (state, swaps, allocated, unused, reserved, expected, prompt_tokens)

    def _router_families(self) -> Iterator[Metric]:
        cluster, labels, values = self._cluster, ("model_name",), (self._model_name,)
        for field in fields(cluster.counters):
            counter = CounterMetricFamily(f"pdserve:{field.name}", COUNTER_HELP[field.name], labels=labels)
            counter.add_metric(values, getattr(cluster.counters, field.name))
            yield counter
        outcomes = CounterMetricFamily(
            "pdserve:requests", "Admitted requests by how they ended.", labels=(*labels, "outcome")
        )
        for outcome, count in cluster.admission.outcomes.items():
            outcomes.add_metric((*values, outcome.value), count)
        yield outcomes
        for name, text, value in (
            ("pdserve:in_flight_requests", "Admitted requests that have not ended.", cluster.admission.requests),
            ("pdserve:in_flight_sequences", "Their sequences.", cluster.admission.sequences),
            (
                "pdserve:waiting_tokens",
                "Prompt tokens to be computed before a first token.",
                cluster.admission.waiting_tokens,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
