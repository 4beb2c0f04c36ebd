"""Which nodes there are, and which of them may be used: directory records in, routable nodes out.

The directory only hints at addresses; what a node is and how it is, it proves itself on its link. So an unreachable
directory changes nothing, a record that vanished under a living node changes nothing, and a node that answers with
another epoch than the record's is believed at once.

All nodes in use share one fingerprint: that of most connected nodes, of the one seen earliest among equals. The others
are listed as mismatched, with the field that differs, and get no work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from engine.errors import AttemptFailed
from engine.fingerprint import Fingerprint
from engine.ids import Epoch, NodeId
from kv_transfer.directory import Directory, NodeRecord
from kv_transfer.wire import fingerprint_from_wire
from proto import worker_pb2 as pb
from router.cluster_counters import ClusterCounters
from router.cluster_timing import ClusterTiming
from router.node import Node, NodeHealth
from router.node_link import NodeLink

logger = logging.getLogger(__name__)

ROLE_NAMES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}


class NodeRegistry:
    """Owns every Node and its link. Implements LinkListener."""

    def __init__(
        self,
        directory: Directory,
        *,
        router_id: str,
        progress_deadline_s: float,
        timing: ClusterTiming,
        counters: ClusterCounters,
        clock: Callable[[], float],
        cluster_token: str | None = None,
    ) -> None:
        self._directory = directory
        self._router_id = router_id
        self._progress_deadline_s = progress_deadline_s
        self._timing = timing
        self._counters = counters
        self._clock = clock
        self._cluster_token = cluster_token
        self._links: dict[NodeId, NodeLink] = {}
        self._fingerprint_seen_at: dict[Fingerprint, float] = {}
        self._served: Fingerprint | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._poll: asyncio.Task[list[NodeRecord]] | None = None
        self._directory_is_away = False
        self._is_closing = False

    async def start(self) -> None:
        """Read the directory once, then keep reading it and keep watching for silence."""
        await self._poll_once()
        self._tasks = [
            asyncio.create_task(self._keep_polling(), name="directory-poll"),
            asyncio.create_task(self._monitor(), name="node-monitor"),
        ]

    async def close(self) -> None:
        """Let queued cancels leave, then close every connection."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links = list(self._links.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.flush_s):
                await asyncio.gather(*(link.flush() for link in links))
        await asyncio.gather(*(link.close() for link in links), *self._closing)
        if self._poll is not None:
            # Never cancelled midway; the directory's own timeouts end it.
            await asyncio.wait({self._poll}, timeout=self._timing.poll_timeout_s)

    # What there is

    @property
    def served_fingerprint(self) -> Fingerprint | None:
        """What the cluster serves; None until a node has described itself. Kept when all nodes are gone."""
        return self._served

    def nodes(self) -> list[Node]:
        """Every known node, by name."""
        return [self._links[node_id].node for node_id in sorted(self._links)]

    def routable(self, role: str, fingerprint: Fingerprint | None = None) -> list[Node]:
        """Nodes that may get new work now, of one fingerprint if given."""
        now = self._clock()
        return [
            link.node
            for link in self._links.values()
            if link.node.role == role
            and (fingerprint is None or link.node.fingerprint == fingerprint)
            and link.node.is_routable(now)
        ]

    def find(self, node_id: NodeId, epoch: Epoch) -> Node | None:
        """That very incarnation, if still known."""
        link = self._links.get(node_id)
        return link.node if link is not None and link.node.epoch == epoch else None

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when any node's state may have changed, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def fresh_statuses(self, nodes: Sequence[Node]) -> list[pb.NodeStatus | None]:
        """Ask connected nodes at once, each within its timeout; None where there was no answer."""

        async def ask(node: Node) -> pb.NodeStatus | None:
            link = self._links.get(node.node_id)
            if link is None or link.node is not node or not node.is_connected:
                return None
            return await link.fresh_status()

        return list(await asyncio.gather(*(ask(node) for node in nodes)))

    # What links tell

    def on_described(self, node: Node, description: pb.NodeDescription) -> str | None:
        """Take a node's word on what it is; if another incarnation answers at its address, adopt that one."""
        node_id = NodeId(description.identity.node_id)
        epoch = Epoch(description.identity.epoch)
        role = ROLE_NAMES.get(description.role, node.role)
        if (node_id, epoch) != node.key:
            try:
                self._adopt(NodeRecord(node_id=node_id, epoch=epoch, role=role, address=node.address))
            except ValueError as error:
                return f"it describes itself wrongly: {error}"
            return f"{node_id} of epoch {epoch} answered"
        try:
            fingerprint = fingerprint_from_wire(description.fingerprint)
        except AttemptFailed as error:
            return f"it describes itself wrongly: {error}"
        if node.description is None:
            logger.info("node_described node_id=%s epoch=%d role=%s address=%s", node_id, epoch, role, node.address)
        node.description = description
        node.fingerprint = fingerprint
        node.role = role
        self._fingerprint_seen_at.setdefault(fingerprint, self._clock())
        self._agree()
        return None

    def on_changed(self, node: Node) -> None:
        """A node was heard, drains, stalled or recovered."""
        self._agree()
        if node.health(self._clock()) is NodeHealth.STALLED:
            self._move_attempts(node, f"{node.node_id} stalled: {node.stalled}", fence=True)
        self._notify()

    def on_lost(self, node: Node, reason: str) -> None:
        """A connection broke or fell silent: everything there moves at once."""
        if node.is_replaced or self._is_closing:
            self._move_attempts(node, reason, fence=False)
            return
        logger.warning("node_lost node_id=%s epoch=%d reason=%r", node.node_id, node.epoch, reason)
        self._counters.nodes_lost += 1
        node.breaker.fault(self._clock())
        self._agree()
        self._move_attempts(node, f"{node.node_id} was lost: {reason}", fence=False)
        self._notify()

    # Inside

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(self._timing.poll_s)
            await self._poll_once()

    async def _poll_once(self) -> None:
        if self._poll is None:
            self._poll = asyncio.create_task(self._directory.nodes())
        done, _ = await asyncio.wait({self._poll}, timeout=self._timing.poll_timeout_s)
        if not done:
            self._directory_failed(f"no answer within {self._timing.poll_timeout_s} s")
            return
        poll, self._poll = self._poll, None
        error = asyncio.CancelledError() if poll.cancelled() else poll.exception()
        if error is not None:
            self._directory_failed(f"{type(error).__name__}: {error}")
            return
        if self._directory_is_away:
            self._directory_is_away = False
            logger.info("directory_back")
        self._take_records(poll.result())

    def _directory_failed(self, why: str) -> None:
        self._counters.directory_errors += 1
        if not self._directory_is_away:
            self._directory_is_away = True
            logger.warning("directory_away reason=%r", why)

    def _take_records(self, records: Sequence[NodeRecord]) -> None:
        now = self._clock()
        for record in records:
            self._adopt(record)
        listed = {(record.node_id, record.epoch) for record in records}
        for node_id, link in list(self._links.items()):
            node = link.node
            if node.key in listed or node.is_connected:
                node.in_directory_at = now
            elif now - node.in_directory_at > self._timing.forget_after_s:
                logger.info("node_forgotten node_id=%s epoch=%d", node_id, node.epoch)
                self._drop(link)
                self._agree()
                self._notify()

    def _adopt(self, record: NodeRecord) -> None:
        """A newer incarnation replaces an older one; an older or equal one tells nothing new."""
        known = self._links.get(record.node_id)
        if known is not None and known.node.epoch >= record.epoch:
            return
        node = Node(record.node_id, record.epoch, record.role, record.address, now=self._clock())
        logger.info(
            "node_found node_id=%s epoch=%d role=%s address=%s", node.node_id, node.epoch, node.role, node.address
        )
        if known is not None:
            self._drop(known)
        link = NodeLink(
            node,
            self,
            router_id=self._router_id,
            progress_deadline_s=self._progress_deadline_s,
            timing=self._timing,
            counters=self._counters,
            clock=self._clock,
            cluster_token=self._cluster_token,
        )
        self._links[node.node_id] = link
        link.start()
        self._agree()
        self._notify()

    def _drop(self, link: NodeLink) -> None:
        node = link.node
        node.is_replaced = True
        del self._links[node.node_id]
        closing = asyncio.create_task(link.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._move_attempts(node, f"{node.node_id} has restarted", fence=False)

    def _move_attempts(self, node: Node, reason: str, *, fence: bool) -> None:
        for attempt in list(node.attempts.values()):
            if fence:
                attempt.cancel()
            else:
                attempt.close()
            attempt.owner.on_node_lost(attempt, reason)

    def _agree(self) -> None:
        """Decide what is served, from the nodes that are connected; without any, what was served stays."""
        described = [link.node for link in self._links.values() if link.node.fingerprint is not None]
        votes = Counter(node.fingerprint for node in described if node.is_connected and node.fingerprint is not None)
        if votes:
            self._served = min(
                votes, key=lambda fingerprint: (-votes[fingerprint], self._fingerprint_seen_at[fingerprint])
            )
        elif self._served is None and described:
            self._served = described[0].fingerprint
        if self._served is None:
            return
        for node in described:
            assert node.fingerprint is not None
            difference = self._served.difference(node.fingerprint)
            if difference is not None and node.mismatch is None:
                logger.warning("node_mismatch node_id=%s epoch=%d field=%r", node.node_id, node.epoch, difference)
            node.mismatch = difference

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _monitor(self) -> None:
        """Look for silence; time in which this process itself stood still does not count against anyone."""
        interval_s = min(self._timing.monitor_s, self._progress_deadline_s / 8)
        while True:
            slept_from = self._clock()
            await asyncio.sleep(interval_s)
            now = self._clock()
            oversleep_s = now - slept_from - interval_s
            for link in list(self._links.values()):
                if oversleep_s > interval_s:
                    link.forgive(oversleep_s)
                link.check_silence(now)
