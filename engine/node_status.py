"""Counters every node keeps, and the gRPC service that answers for them. Knows no requests and no scheduling."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from engine.block_pool import BlockCounts
from engine.rate import Rate
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc

_MAX_DRAIN_S = 24 * 3600.0


_MAX_REASONS = 64


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
    prefill: Rate = field(default_factory=Rate)
    failures: Counter[str] = field(default_factory=Counter)
    transports: dict[str, pb.TransportUse] = field(default_factory=dict)

    def record_transfer(self, kind: pb.TransportKind, num_bytes: int, seconds: float) -> None:
        """Count the KV that a hand-off moved, if any."""
        if not num_bytes:
            return
        name = pb.TransportKind.Name(kind).removeprefix("TRANSPORT_KIND_").lower()
        use = self.transports.setdefault(name, pb.TransportUse())
        use.transfers += 1
        use.bytes += num_bytes
        use.seconds += seconds

    def record_failure(self, reason: str) -> None:
        """Count a hand-off that failed. Reasons may come from peers, so there is a limit to how many are told apart."""
        known = reason in self.failures or len(self.failures) < _MAX_REASONS
        self.failures[reason if known else "other"] += 1


def status_message(
    identity: pb.NodeIdentity,
    blocks: BlockCounts,
    counters: NodeCounters,
    *,
    steps: int,
    last_step_age_s: float,
    progress_deadline_s: float,
    is_draining: bool,
) -> pb.NodeStatus:
    """What both kinds of node say of themselves; each adds what only it has."""
    state = pb.NODE_STATE_DRAINING if is_draining else pb.NODE_STATE_READY
    return pb.NodeStatus(
        identity=identity,
        state=pb.NODE_STATE_STALLED if last_step_age_s > progress_deadline_s else state,
        blocks=pb.BlockCounts(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            in_use=blocks.in_use,
            quarantined=blocks.quarantined,
        ),
        transfers=pb.TransferCounts(
            started=counters.transfers_started,
            committed=counters.transfers_committed,
            failed=counters.transfers_failed,
            aborted=counters.transfers_aborted,
        ),
        last_step_age_s=last_step_age_s,
        steps=steps,
        prefill_tokens_computed=counters.prefill_tokens_computed,
        prefill_tokens_cached=counters.prefill_tokens_cached,
        tokens_generated=counters.tokens_generated,
        local_prefills=counters.local_prefills,
        messages_ignored=counters.messages_ignored,
        kv_bytes=sum(use.bytes for use in counters.transports.values()),
        transports=counters.transports,
        prefill_tokens_per_s=counters.prefill.per_s,
        failures=counters.failures,
    )


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
