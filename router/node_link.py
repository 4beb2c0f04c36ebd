"""Keeps the connection to one incarnation of a node: describe, watch, and for decode nodes the session.

    Describe (is it still that incarnation?) -> Watch and Session until either ends -> lost -> pause -> Describe

A connection is lost when a stream breaks or falls silent; then everything under way there moves at once, before any
clean-up here. Knows no requests and no directory.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from kv_transfer.channels import open_channel
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc as rpc
from router.cluster_counters import ClusterCounters
from router.cluster_timing import ClusterTiming
from router.decode_session import DecodeSession, LinkLost, was_cancelled_here
from router.node import Node

logger = logging.getLogger(__name__)


class LinkListener(Protocol):
    """Who is told about a node's connection; `router/node_registry.py`. All calls come on the loop."""

    def on_described(self, node: Node, description: pb.NodeDescription) -> str | None:
        """Why the link must not go on to use what answered (it is another incarnation, say), or None."""
        ...

    def on_changed(self, node: Node) -> None:
        """The node may have become routable, or no longer is."""
        ...

    def on_lost(self, node: Node, reason: str) -> None:
        """What is under way there must move."""
        ...


class NodeLink:
    """One task for as long as the node is known."""

    def __init__(
        self,
        node: Node,
        listener: LinkListener,
        *,
        router_id: str,
        progress_deadline_s: float,
        timing: ClusterTiming,
        counters: ClusterCounters,
        clock: Callable[[], float],
        cluster_token: str | None = None,
    ) -> None:
        self.node = node
        self._listener = listener
        self._router_id = router_id
        self._progress_deadline_s = progress_deadline_s
        self._timing = timing
        self._counters = counters
        self._clock = clock
        self._channel: Any = open_channel(node.address, cluster_token)
        self._stub: Any = rpc.NodeServiceStub(self._channel)
        self._watch: Any = None
        self._session: DecodeSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._pause_s = timing.reconnect_first_s

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._run(), name=f"link-{self.node.node_id}")

    async def close(self) -> None:
        """End the connection; the node frees what it still had of us."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def flush(self) -> None:
        """Let queued commands leave."""
        if self._session is not None:
            await self._session.flush()

    async def fresh_status(self) -> pb.NodeStatus | None:
        """Ask the node now; None when it does not answer in time."""
        try:
            status = await self._stub.GetStatus(pb.DescribeRequest(), timeout=self._timing.status_timeout_s)
        except grpc.aio.AioRpcError:
            return None
        return status if status.identity.epoch == self.node.epoch else None

    def check_silence(self, now: float) -> None:
        """Called often; breaks a connection that has said nothing for too long."""
        if not self.node.is_connected:
            return
        session = self._session
        if now - self.node.heard_at > self._progress_deadline_s:
            self._break("watch silent")
        elif session is not None and now - session.heard_at > self._progress_deadline_s:
            self._break("session silent")

    def forgive(self, seconds: float) -> None:
        """This process itself stood still for that long, so silence during it proves nothing."""
        self.node.heard_at += seconds
        if self._session is not None:
            self._session.heard_at += seconds

    async def _run(self) -> None:
        while True:
            reason = await self._follow()
            if self.node.is_replaced:
                return
            self.node.last_trouble = reason
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
            self._pause_s = min(self._timing.reconnect_longest_s, 2 * self._pause_s)

    async def _follow(self) -> str:
        """One connection, from describing to its end; returns why it ended."""
        parts: list[asyncio.Task[None]] = []
        try:
            description = await self._stub.Describe(
                pb.DescribeRequest(), timeout=self._timing.describe_timeout_s, wait_for_ready=True
            )
            objection = self._listener.on_described(self.node, description)
            if objection is not None:
                return objection
            now = self._clock()
            self.node.heard_at = now
            self.node.status = None
            self.node.stalled = None
            if self.node.role == "decode":
                self._session = DecodeSession(
                    rpc.DecodeServiceStub(self._channel),
                    self.node,
                    router_id=self._router_id,
                    counters=self._counters,
                    clock=self._clock,
                    on_up=self._session_is_up,
                )
                parts.append(asyncio.create_task(self._session.run()))
            parts.append(asyncio.create_task(self._follow_watch()))
            self.node.is_connected = True
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            reason = _reason_of(done.pop())
            self._lose(reason)
            return reason
        except grpc.aio.AioRpcError as error:
            return f"describe: {error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            if was_cancelled_here():
                raise
            return "describe: cancelled"
        except Exception as error:
            # A bug of ours on one message must not leave the node without a link for ever.
            logger.exception("link_failed node_id=%s epoch=%d", self.node.node_id, self.node.epoch)
            return f"unexpected {type(error).__name__}"
        finally:
            self._lose("closed")
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            self._session = None

    async def _follow_watch(self) -> None:
        self._watch = self._stub.Watch(pb.WatchRequest(interval_s=self._timing.watch_interval_s))
        try:
            while True:
                status = await self._watch.read()
                if status is grpc.aio.EOF:
                    raise LinkLost("watch: the node ended it")
                if status.identity.epoch != self.node.epoch:
                    raise LinkLost(f"watch: epoch is {self.node.epoch} here and {status.identity.epoch} there")
                self._take_status(status)
        except grpc.aio.AioRpcError as error:
            raise LinkLost(f"watch: {error.code().name}: {error.details()}") from error
        except asyncio.CancelledError:
            if was_cancelled_here():
                raise
            raise LinkLost("watch: broken from here") from None
        finally:
            self._watch.cancel()

    def _take_status(self, status: pb.NodeStatus) -> None:
        node = self.node
        before = (node.status.state if node.status is not None else None, node.stalled is None)
        node.take_status(status, self._clock())
        node.stalled = _why_stalled(status, self._progress_deadline_s, was_stalled=node.stalled is not None)
        if (status.state, node.stalled is None) != before:
            if node.stalled is not None:
                logger.warning("node_stalled node_id=%s epoch=%d reason=%r", node.node_id, node.epoch, node.stalled)
                self._counters.nodes_stalled += 1
            self._settle()

    def _session_is_up(self) -> None:
        self.node.commands = self._session
        self._settle()

    def _settle(self) -> None:
        if self.node.is_up():
            self.node.last_trouble = ""
            self._pause_s = self._timing.reconnect_first_s
        self._listener.on_changed(self.node)

    def _break(self, reason: str) -> None:
        self._lose(reason)
        if self._session is not None:
            self._session.abort()
        if self._watch is not None:
            self._watch.cancel()

    def _lose(self, reason: str) -> None:
        node = self.node
        if not node.is_connected:
            return
        node.is_connected = False
        node.commands = None
        node.last_trouble = reason
        self._listener.on_lost(node, reason)


def _reason_of(part: asyncio.Task[None]) -> str:
    if part.cancelled():
        return "cancelled"
    error = part.exception()
    if isinstance(error, LinkLost):
        return str(error)
    logger.error("link_failed error=%r", error, exc_info=error)
    return f"unexpected {type(error).__name__}"


def _why_stalled(status: pb.NodeStatus, progress_deadline_s: float, *, was_stalled: bool) -> str | None:
    if status.state == pb.NODE_STATE_STALLED:
        return "it says so"
    # Its work is taken away once it stalls, which proves nothing: only a step does.
    has_work = bool(status.in_flight or status.running_sequences or status.waiting_sequences)
    if (has_work or was_stalled) and status.last_step_age_s > progress_deadline_s:
        return f"no step for {status.last_step_age_s:.1f} s with work at hand"
    return None
