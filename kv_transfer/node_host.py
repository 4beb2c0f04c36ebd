"""How a node lives as a process: gRPC server, health, directory, signals, drain. Knows neither prefill nor decode."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import metadata
from typing import Protocol, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine.block_pool import BlockPool
from engine.config import NodeConfig
from engine.errors import ConfigError
from engine.ids import Epoch, NodeId
from engine.model_runner import Runner
from engine.node_status import Node, NodeService
from kv_transfer.channels import SERVER_OPTIONS
from kv_transfer.cluster_token import TokenCheck
from kv_transfer.directory import NodeRecord
from kv_transfer.directory_publisher import DirectoryPublisher
from kv_transfer.redis_directory import RedisDirectory
from kv_transfer.wire import fingerprint_to_wire
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEALTH_INTERVAL_S = 0.25
_STOP_GRACE_S = 0.5


class HostedNode(Node, Protocol):
    """A node that this module can run."""

    pool: BlockPool

    async def run(self) -> None:
        """Work until cancelled."""
        ...

    async def close(self) -> None:
        """End what still runs; called once, after the drain."""
        ...


class NodeProcess:
    """What belongs to the process rather than to the node: its server, its address, what to give back at the end."""

    def __init__(self, config: NodeConfig) -> None:
        checks = [] if config.cluster_token is None else [TokenCheck(config.cluster_token)]
        self.server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=checks)
        self._config = config
        self._closers: list[Callable[[], None]] = []

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call `closer` when everything else has ended."""
        self._closers.append(closer)

    def bind(self) -> str:
        """Take the port; returns the address under which others reach it. Raises ConfigError when it is taken."""
        host, port = self._config.host, self._config.port
        try:
            port = self.server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"cannot listen on {host}:{self._config.port}: the port is taken or the address is not ours"
            )
        return f"{self._config.advertise_host or _reachable_name(host)}:{port}"

    def close(self) -> None:
        """Give everything back."""
        for closer in self._closers:
            closer()


def describe(
    config: NodeConfig, runner: Runner, role: pb.Role, process: NodeProcess, transports: Sequence[pb.TransportKind]
) -> pb.NodeDescription:
    """Take the port and say what this node is."""
    address = process.bind()
    name = pb.Role.Name(role).removeprefix("ROLE_").lower()
    return pb.NodeDescription(
        identity=pb.NodeIdentity(node_id=config.node_id or f"{name}-{address}", epoch=time.time_ns()),
        role=role,
        address=address,
        fingerprint=fingerprint_to_wire(runner.fingerprint),
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        num_blocks=runner.num_blocks,
        transports=transports,
        pid=os.getpid(),
        version=metadata.version("pdserve"),
    )


def run_node(config: NodeConfig, role: str, start: Callable[[NodeProcess], Awaitable[HostedNode]]) -> int:
    """Run a node until SIGTERM or SIGINT. Blocks; returns the exit code.

    Args:
        start: builds the node and registers its services; may raise ConfigError.
    """
    try:
        _check_port(config)
        return asyncio.run(_serve(config, role, start))
    except ConfigError as error:
        print(f"pdserve {role}: {error}", file=sys.stderr, flush=True)
        return 2


async def _serve(config: NodeConfig, role: str, start: Callable[[NodeProcess], Awaitable[HostedNode]]) -> int:
    signals = _Signals()
    process = NodeProcess(config)
    try:
        node = await signals.unless_stopped(start(process))
        if node is None:
            return 0
        return await _serve_node(config, role, process, node, signals)
    finally:
        process.close()


async def _serve_node(config: NodeConfig, role: str, process: NodeProcess, node: HostedNode, signals: _Signals) -> int:
    worker_pb2_grpc.add_NodeServiceServicer_to_server(NodeService(node), process.server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, process.server)
    await process.server.start()
    identity = node.description.identity
    record = NodeRecord(NodeId(identity.node_id), Epoch(identity.epoch), role, node.description.address)
    directory = RedisDirectory(config.redis_url, config.cluster)
    publisher = DirectoryPublisher(
        directory,
        record,
        take_changes=node.pool.take_changes,
        cached_hashes=node.pool.cached_hashes,
        heartbeat_s=config.heartbeat_s,
    )
    work = asyncio.create_task(node.run(), name="node")
    helpers = [asyncio.create_task(publisher.run()), asyncio.create_task(_show_health(node, servicer))]
    logger.info("node_ready node_id=%s epoch=%d address=%s", record.node_id, record.epoch, record.address)
    exit_code = 0
    try:
        await asyncio.wait((work, signals.stop), return_when=asyncio.FIRST_COMPLETED)
        if work.done() and not signals.stop.done():
            logger.critical("node_crashed node_id=%s", record.node_id, exc_info=work.exception())
            exit_code = 1
        await _stop_helpers(helpers)
        await publisher.close()
        if exit_code == 0:
            drained = await signals.unless_hurried(node.drain(config.drain_timeout_s))
            logger.info("node_drained node_id=%s finished_and_cut_short=%s", record.node_id, drained)
    finally:
        await _stop_helpers([*helpers, work])
        await node.close()
        await process.server.stop(_STOP_GRACE_S)
        await publisher.close()
        await directory.close()
    return exit_code


async def _stop_helpers(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _show_health(node: HostedNode, servicer: health.aio.HealthServicer) -> None:
    """Health is what the step loop proves, not that the process lives."""
    while True:
        is_ready = node.status().state == pb.NODE_STATE_READY
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await servicer.set("", status)
        await asyncio.sleep(_HEALTH_INTERVAL_S)


class _Signals:
    """SIGTERM and SIGINT: the first asks to stop, the second to hurry."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = loop.create_future()
        self._hurry: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self.stop.done():
            self.stop.set_result(None)
        elif not self._hurry.done():
            self._hurry.set_result(None)

    async def unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None when a stop was asked for first."""
        return await _first(work, self.stop)

    async def unless_hurried(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None when a hurry was asked for first."""
        return await _first(work, self._hurry)


async def _first(work: Awaitable[T], interruption: asyncio.Future[None]) -> T | None:
    task = asyncio.ensure_future(work)
    await asyncio.wait((task, interruption), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


def _check_port(config: NodeConfig) -> None:
    """Say that a port is taken before a model is loaded for it."""
    if config.port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from None


def _reachable_name(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host
