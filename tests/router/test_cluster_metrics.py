"""The cluster side's metrics in Prometheus' text form."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from router.metrics import RouterMetrics
from tests.router.cluster_harness import make_request, running_cluster, until


async def test_metrics_read_the_live_books() -> None:
    async with running_cluster(decode=1, prefill=1) as harness:
        registry = CollectorRegistry()
        RouterMetrics(registry, model_name="fake")
        harness.cluster.register_metrics(registry)
        node = harness.nodes["decode-0"]
        node.does.hold_after_tokens = 1
        node.allocated_slots = 96
        generation = await harness.cluster.generate(make_request(n=2))
        of_node = '{model_name="fake",node_id="decode-0",role="decode"}'
        by_shared_memory = of_node.replace("}", ',transport="shared_memory"}')
        running = f"vllm:num_requests_running{of_node} 2.0"
        await until(lambda: running in generate_latest(registry).decode())
        text = generate_latest(registry).decode()
        for line in (
            f"vllm:num_requests_waiting{of_node} 0.0",
            f"vllm:kv_cache_usage_perc{of_node} 0.002",
            'pdserve:node_state{model_name="fake",node_id="decode-0",role="decode",state="ready"} 1.0',
            'pdserve:node_state{model_name="fake",node_id="decode-0",role="decode",state="stalled"} 0.0',
            'pdserve:transfers_total{model_name="fake",node_id="decode-0",outcome="committed",role="decode"} 2.0',
            f"pdserve:kv_transfer_bytes_total{by_shared_memory} 4096.0",
            f"pdserve:kv_transfer_seconds_count{by_shared_memory} 2.0",
            f"pdserve:kv_transfer_seconds_sum{by_shared_memory} 0.25",
            f"pdserve:kv_slots_unused{of_node} 0.0",
            f"pdserve:kv_slots_allocated{of_node} 96.0",
            f"pdserve:kv_blocks_reserved{of_node} 0.0",
            f"pdserve:preemptions_swapped_total{of_node} 0.0",
            'pdserve:node_prompt_tokens_total{model_name="fake",node_id="decode-0",role="decode",source="cached"} 0.0',
            'pdserve:attempts_total{model_name="fake"} 1.0',
            'pdserve:failovers_total{model_name="fake"} 0.0',
            'pdserve:in_flight_sequences{model_name="fake"} 2.0',
        ):
            assert line in text, line
        # Nothing is said for a node that does not say it, so that no share of it comes out.
        assert text.count("pdserve:kv_slots_allocated{") == 1
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names)), "a metric is declared twice"
        await generation.aclose()
        assert 'pdserve:requests_total{model_name="fake",outcome="cancelled"} 1.0' in generate_latest(registry).decode()
