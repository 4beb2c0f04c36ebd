"""Settings of a node, read once at start, checked here and passed down. Nobody reads the environment later."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field

DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_positive(config: object, *names: str) -> None:
    """Raise ValueError naming the first of `names` that is set and not a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be greater than 0, not {value}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to compute with, and how much at once.

    Attributes:
        model: Hugging Face id, local folder or GGUF file.
        dtype: of weights and KV; `auto` is the checkpoint's, or float32 where this CPU is slow in it.
        device: torch device.
        max_model_len: longest prompt plus output in tokens; None is what model and pool allow.
        block_size: tokens of one KV block.
        num_blocks: blocks of the pool; None derives them from `kv_memory_bytes`.
        kv_memory_bytes: bytes of the pool when `num_blocks` is None.
        max_num_batched_tokens: tokens one step may compute.
        max_num_seqs: sequences one step may hold.
        num_threads: torch threads; None leaves torch's choice.
        seed: seeds torch; requests bring their own.
    """

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int = 512 * 1024 * 1024
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        check_positive(
            self,
            "max_model_len",
            "block_size",
            "num_blocks",
            "kv_memory_bytes",
            "max_num_batched_tokens",
            "max_num_seqs",
            "num_threads",
        )
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, not {self.num_blocks}")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What both kinds of node need besides the engine.

    Attributes:
        engine: see EngineConfig.
        host: address to listen on.
        port: TCP port to listen on; 0 takes a free one.
        advertise_host: host name under which others reach this node; None is `host`, or the
            host's name when that is a wildcard.
        node_id: name across restarts; None derives it from role and address.
        redis_url: where the directory lives.
        cluster: name of the cluster, so that several may share one Redis.
        heartbeat_s: seconds between renewals of the node record.
        progress_deadline_s: seconds without progress, with work at hand, after which the node calls itself stalled;
            also the silence after which a peer is given up.
        drain_timeout_s: seconds to finish work after SIGTERM.
        cluster_token: secret that every process of the cluster shows; needed to listen beyond loopback.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    node_id: str | None = None
    redis_url: str = "redis://127.0.0.1:6379/0"
    cluster: str = "default"
    heartbeat_s: float = 1.0
    progress_deadline_s: float = 5.0
    drain_timeout_s: float = 30.0
    cluster_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_positive(self, "heartbeat_s", "progress_deadline_s", "drain_timeout_s")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}")
        if not self.cluster.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"cluster may hold letters, digits, - and _, not {self.cluster!r}")
        check_token(self.cluster_token)
        if self.cluster_token is None and not _is_loopback(self.host):
            raise ValueError(f"cluster_token must be set to listen on {self.host}, which others can reach")


def check_token(token: str | None) -> None:
    """Raise ValueError when a cluster token could not travel in a header."""
    if token is not None and not (token.isascii() and token.isprintable() and token.split() == [token]):
        raise ValueError("cluster_token must be printable ASCII without white space")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
