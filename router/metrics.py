"""The API side's Prometheus metrics; vLLM's names where the meaning is the same. Knows no nodes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from router.generation import PhaseTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PHASES = ("queue", "prefill", "transfer", "first_decode", "decode")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class RouterMetrics:
    """Counts requests of both doors on a registry that the cluster side may share.

    Metrics of the cluster side (requests running and waiting, transfers, the directory) come from its own collector.
    """

    def __init__(self, registry: CollectorRegistry, *, model_name: str) -> None:
        self.registry = registry
        label = {"model_name": model_name}

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("model_name",), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, ("model_name",), registry=registry, buckets=buckets).labels(**label)

        self._model_name = model_name
        self.prompt_tokens = counter("vllm:prompt_tokens_total", "Prompt tokens of accepted requests.").labels(**label)
        self.generation_tokens = counter("vllm:generation_tokens_total", "Tokens generated.").labels(**label)
        self.prefix_cache_queries = counter(
            "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."
        ).labels(**label)
        self.prefix_cache_hits = counter(
            "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."
        ).labels(**label)
        self._success = Counter(
            "vllm:request_success_total",
            "Choices that ended as they should, by finish reason.",
            ("model_name", "finished_reason"),
            registry=registry,
        )
        self._ended = Counter(
            "pdserve:requests_ended_total",
            "Accepted requests by how they ended: finished, failed or cancelled.",
            ("model_name", "outcome"),
            registry=registry,
        )
        self._refused = Counter(
            "pdserve:requests_refused_total",
            "Requests that were answered with an error before anything ran, by reason.",
            ("model_name", "reason"),
            registry=registry,
        )
        self.requests_open = Gauge(
            "pdserve:api_requests_open",
            "Accepted requests that are not closed yet.",
            ("model_name",),
            registry=registry,
        ).labels(**label)
        self.time_to_first_token = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self.inter_token_latency = histogram("vllm:inter_token_latency_seconds", "Time between tokens of a choice.")
        self.time_per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after a choice's first."
        )
        self.e2e_latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to the end of the last choice.")
        self.request_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of each prompt.", buckets=_TOKENS
        )
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Generated tokens of each choice.", buckets=_TOKENS
        )
        phase = Histogram(
            "pdserve:request_phase_seconds",
            "Seconds that a request spent in each phase.",
            ("model_name", "phase"),
            registry=registry,
            buckets=_SECONDS,
        )
        self._phases = {name: phase.labels(model_name=model_name, phase=name) for name in PHASES}
        # Present from the start, so that a rate over them is right from the first request on.
        for reason in ("stop", "length"):
            self._success.labels(model_name=model_name, finished_reason=reason)
        for outcome in ("finished", "failed", "cancelled"):
            self._ended.labels(model_name=model_name, outcome=outcome)

    def choice_finished(self, reason: str) -> None:
        """One choice ended with `reason`."""
        self._success.labels(model_name=self._model_name, finished_reason=reason).inc()

    def request_ended(self, outcome: str) -> None:
        """An accepted request is over: finished, failed or cancelled."""
        self._ended.labels(model_name=self._model_name, outcome=outcome).inc()

    def request_refused(self, reason: str) -> None:
        """A request was answered with an error before anything ran."""
        self._refused.labels(model_name=self._model_name, reason=reason).inc()

    def phases(self, times: PhaseTimes) -> None:
        """Record the phases that are known."""
        for name, histogram in self._phases.items():
            seconds = getattr(times, f"{name}_s")
            if seconds is not None:
                histogram.observe(max(0.0, seconds))

    def exposition(self) -> bytes:
        """The text that /metrics answers with."""
        return generate_latest(self.registry)
