"""Which nodes are found, believed, used and forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import time

from engine.ids import Epoch, NodeId
from kv_transfer.directory import NodeRecord
from proto import worker_pb2 as pb
from router.node import NodeHealth
from tests.router.cluster_harness import (
    PROGRESS_DEADLINE_S,
    collect,
    expected,
    make_request,
    running_cluster,
    until,
)
from tests.router.fake_nodes import FakeNode, make_fingerprint


class CutProxy:
    """A TCP proxy that can cut all connections at once, as the death of a process does, or swallow all bytes."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._swallows = False
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        self._swallows = True

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, there_writer}
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if not self._swallows:
                    sink.write(data)
        sink.transport.abort()


async def test_a_restarted_node_is_used_again_before_the_directory_knows() -> None:
    async with running_cluster() as harness:
        await harness.restart("decode-0", register=False)
        await until(lambda: [node.epoch for node in harness.cluster.registry.nodes()] == [2], 2.0)
        await harness.ready()
        request = make_request()
        assert (await harness.run(request)).tokens == {0: expected(request)}
        # The directory still names the old one; it must not come back.
        (node,) = harness.cluster.registry.nodes()
        await asyncio.sleep(0.1)
        assert harness.cluster.registry.nodes() == [node] and not node.is_replaced


async def test_a_newer_epoch_replaces_a_node_and_moves_its_requests_at_once() -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 3
        request = make_request()
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        old = next(node for node in harness.cluster.registry.nodes() if node.node_id == first.node_id)
        await until(lambda: first.tokens_sent == 3)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = None
        # The old process still runs, as it does when only its host moved the name elsewhere.
        first.does.hold_after_tokens = 3
        newer = await FakeNode("decode", first.node_id, epoch=first.epoch + 1).start(harness.directory)
        harness.nodes["newer"] = newer
        received = await collect(generation)
        assert received.tokens == {0: expected(request)}
        replacement = next(node for node in harness.cluster.registry.nodes() if node.node_id == first.node_id)
        assert replacement is not old and replacement.epoch == 2
        old.check_idle()
        await until(lambda: not first.live_attempts, 1.0)


async def test_a_cut_connection_is_noticed_at_once_and_made_again() -> None:
    async with running_cluster(decode=0, wait=False) as harness:
        node = await FakeNode("decode", "decode-0").start()
        harness.nodes["decode-0"] = node
        proxy = CutProxy(node.port)
        await proxy.start()
        record = NodeRecord(NodeId("decode-0"), Epoch(1), "decode", f"127.0.0.1:{proxy.port}")
        await harness.directory.register(record, ttl_s=60.0)
        await harness.ready()
        node.does.hold_after_tokens = 3
        request = make_request()
        generation = await harness.cluster.generate(request)
        await until(lambda: node.tokens_sent == 3)
        await asyncio.sleep(0.03)
        node.does.hold_after_tokens = None
        cut_at = time.monotonic()
        proxy.cut()
        await until(lambda: harness.cluster.counters.nodes_lost == 1)
        assert time.monotonic() - cut_at < PROGRESS_DEADLINE_S / 2
        assert (await collect(generation)).tokens == {0: expected(request)}
        assert generation.facts.attempts == 2
        assert node.sessions == 2
        await proxy.close()


async def test_a_connection_that_swallows_everything_counts_as_lost() -> None:
    async with running_cluster(decode=1) as harness:
        node = await FakeNode("decode", "decode-x").start()
        harness.nodes["decode-x"] = node
        proxy = CutProxy(node.port)
        await proxy.start()
        record = NodeRecord(NodeId("decode-x"), Epoch(1), "decode", f"127.0.0.1:{proxy.port}")
        await harness.directory.register(record, ttl_s=60.0)
        await harness.ready()
        proxy.swallow()
        await until(lambda: harness.health("decode-x") is NodeHealth.UNREACHABLE, PROGRESS_DEADLINE_S + 0.5)
        await proxy.close()
        await node.die()


async def test_a_draining_node_finishes_its_work_but_gets_no_more() -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.token_delay_s = 0.01
        request = make_request(max_tokens=20)
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        first.state = pb.NODE_STATE_DRAINING
        await until(lambda: harness.health(first.node_id) is NodeHealth.DRAINING)
        for _ in range(5):
            await harness.run(make_request(max_tokens=2))
        assert (await collect(generation)).tokens == {0: expected(request)}
        assert generation.facts.attempts == 1
        assert len(first.starts) == 1


async def test_a_starting_node_gets_no_work() -> None:
    async with running_cluster(decode=0, wait=False) as harness:
        node = await harness.add("decode", "decode-0")
        node.state = pb.NODE_STATE_STARTING
        await until(lambda: harness.health("decode-0") is NodeHealth.STARTING)
        assert not harness.cluster.is_ready()
        node.state = pb.NODE_STATE_READY
        await until(harness.cluster.is_ready)


async def test_a_node_whose_record_vanished_stays_while_it_lives() -> None:
    async with running_cluster() as harness:
        harness.directory.flush()
        await asyncio.sleep(0.6)
        assert harness.health("decode-0") is NodeHealth.READY
        request = make_request()
        assert (await harness.run(request)).tokens == {0: expected(request)}


async def test_a_dead_node_without_record_is_forgotten_after_a_while() -> None:
    async with running_cluster(decode=2) as harness:
        harness.directory.flush()
        await harness.directory.register(harness.nodes["decode-0"].record, ttl_s=60.0)
        await harness.nodes["decode-0"].die()
        await harness.nodes["decode-1"].die()
        await until(lambda: harness.health("decode-1") is NodeHealth.UNREACHABLE)
        await until(lambda: harness.health("decode-1") is None, 2.0)
        assert harness.health("decode-0") is NodeHealth.UNREACHABLE


async def test_nothing_is_forgotten_while_the_directory_is_away() -> None:
    async with running_cluster() as harness:
        harness.directory.available = False
        await harness.nodes["decode-0"].die()
        await asyncio.sleep(0.6)
        assert harness.health("decode-0") is NodeHealth.UNREACHABLE
        await harness.restart("decode-0", register=False)
        await harness.ready()
        harness.directory.available = True


async def test_all_decode_nodes_may_vanish_and_come_back() -> None:
    async with running_cluster(decode=2, prefill=1) as harness:
        for name in list(harness.nodes):
            await harness.nodes[name].die()
        await until(lambda: not harness.cluster.is_ready())
        for name in list(harness.nodes):
            await harness.restart(name)
        await harness.ready()
        request = make_request()
        assert (await harness.run(request)).tokens == {0: expected(request)}


async def test_the_fingerprint_of_most_nodes_is_served_and_others_are_named() -> None:
    async with running_cluster(decode=0, wait=False) as harness:
        other = make_fingerprint(weights_digest="others")
        await harness.add("decode", "odd", fingerprint=other)
        await until(lambda: harness.health("odd") is NodeHealth.READY)
        await harness.add("decode", "even")
        await harness.add("prefill", "even-prefill")
        await until(lambda: harness.health("odd") is NodeHealth.MISMATCH)
        await harness.ready("even", "even-prefill")
        for _ in range(6):
            await harness.run(make_request())
        assert len(harness.nodes["even"].starts) == 6
        described = await harness.cluster.describe()
        (odd,) = [node for node in described["nodes"] if node["id"] == "odd"]  # type: ignore[attr-defined]
        assert odd["state"] == "mismatch"
        assert odd["trouble"] == "weights_digest is 'weights' here and 'others' there"


async def test_the_earliest_fingerprint_wins_among_equals() -> None:
    async with running_cluster(decode=1) as harness:
        await harness.add("decode", "late", fingerprint=make_fingerprint(model_id="other"))
        await until(lambda: harness.health("late") is NodeHealth.MISMATCH)
        assert harness.health("decode-0") is NodeHealth.READY


async def test_a_request_never_moves_to_another_model() -> None:
    async with running_cluster(decode=1, failover_wait_s=0.3) as harness:
        node = harness.nodes["decode-0"]
        node.does.hold_after_tokens = 3
        request = make_request()
        generation = await harness.cluster.generate(request)
        await until(lambda: node.tokens_sent == 3)
        await harness.add("decode", "other", fingerprint=make_fingerprint(weights_digest="others"))
        await asyncio.sleep(0.1)
        await node.die()
        await harness.ready("other")
        error = None
        try:
            await collect(generation)
        except Exception as caught:
            error = caught
        assert type(error).__name__ == "Unavailable"
        assert not harness.nodes["other"].starts


async def test_a_stalled_prefill_node_is_not_offered() -> None:
    async with running_cluster(decode=1, prefill=2) as harness:
        harness.nodes["prefill-0"].state = pb.NODE_STATE_STALLED
        await until(lambda: harness.health("prefill-0") is NodeHealth.STALLED)
        await harness.run(make_request())
        (start,) = harness.nodes["decode-0"].starts
        assert [target.identity.node_id for target in start.prefill_nodes] == ["prefill-1"]


async def test_a_pause_of_the_router_itself_costs_no_node() -> None:
    async with running_cluster(decode=2, prefill=1) as harness:
        time.sleep(1.5 * PROGRESS_DEADLINE_S)  # noqa: ASYNC251 - the very thing under test
        await asyncio.sleep(PROGRESS_DEADLINE_S / 2)
        assert harness.cluster.counters.nodes_lost == 0
        await harness.ready()


async def test_a_node_that_describes_itself_wrongly_is_listed_with_the_reason() -> None:
    async with running_cluster(decode=1) as harness:
        odd = FakeNode("decode", "odd")
        odd.fingerprint = make_fingerprint(rope_digest="")
        harness.nodes["odd"] = await odd.start(harness.directory)
        await until(lambda: harness.health("odd") is NodeHealth.UNREACHABLE)
        described = await harness.cluster.describe()
        (node,) = [node for node in described["nodes"] if node["id"] == "odd"]  # type: ignore[attr-defined]
        assert "rope_digest" in node["trouble"]
