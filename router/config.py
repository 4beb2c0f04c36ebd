"""Settings of the router."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.config import check_token


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Read once at start; nothing edits it.

    Attributes:
        model: Hugging Face id, local folder or GGUF file; the router reads tokenizer and chat template only.
        host: address of the HTTP server.
        port: port of the HTTP server; 0 takes a free one.
        grpc_port: port of the public gRPC server; 0 takes a free one, None serves none.
        redis_url: where the directory lives.
        cluster: name of the cluster.
        served_model_names: names clients may use; the first is reported. Empty means `model`.
        api_keys: accepted keys; empty means that no key is asked for.
        max_model_len: a limit below the nodes' own, in tokens.
        max_waiting_requests: requests in flight beyond what the decode nodes can run at once, before 429.
        max_waiting_tokens: tokens of prompts that may wait to be computed, before 429; None is a multiple of what the
            decode nodes' KV blocks hold.
        max_priority_boost: how far below 0 the `priority` of a request may be; each step is worth a minute of waiting.
        max_body_bytes: largest request body.
        request_timeout_s: seconds a request may take in all.
        progress_deadline_s: silence after which a node is out of rotation and its requests move.
        failover_wait_s: seconds to wait for a node when none is ready, before a request fails.
        local_prefill_threshold: uncached prompt tokens up to which a decode node prefills by itself.
        slow_client_s: seconds a client may leave a full buffer unread before it is cancelled.
        drain_timeout_s: seconds to finish requests after SIGTERM.
        cluster_token: secret that nodes ask for; None where they listen on loopback without one.
        seed: makes the seeds of unseeded requests repeatable; None draws them from the system.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    redis_url: str = "redis://127.0.0.1:6379/0"
    cluster: str = "default"
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_model_len: int | None = None
    max_waiting_requests: int = 96
    max_waiting_tokens: int | None = None
    max_priority_boost: int = 0
    max_body_bytes: int = 8 * 1024 * 1024
    request_timeout_s: float = 600.0
    progress_deadline_s: float = 5.0
    failover_wait_s: float = 30.0
    local_prefill_threshold: int = 0
    slow_client_s: float = 30.0
    drain_timeout_s: float = 30.0
    cluster_token: str | None = field(default=None, repr=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty")
        for name in ("port", "grpc_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name} must be between 0 and 65535, not {port}")
        for name in (
            "max_model_len",
            "max_waiting_requests",
            "max_waiting_tokens",
            "max_body_bytes",
            "request_timeout_s",
            "progress_deadline_s",
            "failover_wait_s",
            "slow_client_s",
            "drain_timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be greater than 0, not {value}")
        if self.max_priority_boost < 0:
            raise ValueError(f"max_priority_boost must be at least 0, not {self.max_priority_boost}")
        check_token(self.cluster_token)
        if any(not key for key in self.api_keys):
            raise ValueError("api_keys must not hold an empty key")

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use, the reported one first."""
        return self.served_model_names or (self.model,)
