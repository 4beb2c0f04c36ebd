"""Counters every node keeps, and the gRPC service that answers for them. Knows no requests and no scheduling."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from proto import worker_pb2 as pb
from proto import worker_pb2_grpc

_MAX_DRAIN_S = 24 * 3600.0


@dataclass(slots=True)
class NodeCounters:
    """Counted since the start of this incarnation."""

    transfers_started: int = 0
    transfers_committed: int = 0
    transfers_failed: int = 0
    transfers_aborted: int = 0
    prefill_tokens_computed: int = 0
    prefill_tokens_cached: int = 0
    tokens_generated: int = 0
    local_prefills: int = 0
    messages_ignored: int = 0
    kv_bytes: int = 0
    prefill_tokens_per_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def record_prefill_rate(self, tokens: int, seconds: float) -> None:
        """Learn the rate online; recent steps count most."""
        if seconds > 0:
            rate = tokens / seconds
            self.prefill_tokens_per_s += (rate - self.prefill_tokens_per_s) * (0.2 if self.prefill_tokens_per_s else 1)


class Node(Protocol):
    """What the service asks of a node."""

    description: pb.NodeDescription

    def status(self) -> pb.NodeStatus:
        """How the node is now; must not block."""
        ...

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Refuse new work, finish what is held; returns (finished, cut short). Idempotent."""
        ...


class NodeService(worker_pb2_grpc.NodeServiceServicer):
    """Serves NodeService for one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.NodeDescription:
        return self._node.description

    async def GetStatus(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.NodeStatus:
        return self._node.status()

    async def Watch(self, request: pb.WatchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.NodeStatus]:
        # NaN loses each of these comparisons when it comes second.
        interval_s = min(5.0, max(0.1, request.interval_s))
        while True:
            yield self._node.status()
            await asyncio.sleep(interval_s)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainReply:
        finished, cut_short = await self._node.drain(min(_MAX_DRAIN_S, max(0.0, request.timeout_s)))
        return pb.DrainReply(finished=finished, cut_short=cut_short)

    async def LoadAdapter(self, request: pb.AdapterRequest, context: grpc.aio.ServicerContext) -> pb.AdapterReply:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this node has no adapters")
        raise AssertionError("abort raises")

    async def UnloadAdapter(self, request: pb.AdapterRequest, context: grpc.aio.ServicerContext) -> pb.AdapterReply:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this node has no adapters")
        raise AssertionError("abort raises")
