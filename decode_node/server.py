"""The decode node's process: gRPC in front of `DecodeNode`. Only translates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from decode_node.session import Session as RouterSession
from engine.errors import ConfigError
from engine.faults import Faults
from engine.model_store import resolve_model
from engine.runners import make_runner
from kv_transfer.node_host import NodeProcess, describe, run_node
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.processes import can_name_processes
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc


class DecodeService(worker_pb2_grpc.DecodeServiceServicer):
    """Serves DecodeService for one node."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionCommand], context: grpc.aio.ServicerContext
    ) -> None:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("command") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
            return
        identity = self._node.description.identity
        if first.hello.decode_node != identity:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"this is {identity.node_id} epoch {identity.epoch}"
            )
        session = self._node.open_session(first.hello.router_id[:64])
        reader = asyncio.create_task(self._read(request_iterator, session))
        writer = asyncio.create_task(_write(session, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._node.close_session(session)
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, commands: AsyncIterator[pb.SessionCommand], session: RouterSession) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "start":
                    self._node.start(command.start, session)
                case "cancel":
                    self._node.cancel(command.cancel, session)
                case _:
                    self._node.count_ignored(1)


async def _write(session: RouterSession, context: grpc.aio.ServicerContext) -> None:
    # The first message tells the router that the session stands.
    await context.write(session.hello())
    while True:
        await context.write(await session.next_message())


def run(config: DecodeConfig) -> int:
    """Run a decode node until SIGTERM; returns the exit code. Blocks."""

    async def start(process: NodeProcess) -> DecodeNode:
        faults = Faults.from_env()
        engine = config.node.engine
        files = await asyncio.to_thread(resolve_model, engine.model)
        memories: list[PoolMemory] = []

        def allocate_pool(num_bytes: int) -> memoryview:
            try:
                memories.append(PoolMemory(num_bytes))
            except OSError as error:
                raise ConfigError(f"no memory for a KV pool of {num_bytes} bytes: {error}") from error
            process.on_close(memories[0].close)
            return memories[0].view

        shared = config.shared_memory and engine.device == "cpu" and can_name_processes()
        runner = await asyncio.to_thread(
            lambda: make_runner(engine, files, allocate_pool=allocate_pool if shared else None)
        )
        transports = [pb.TRANSPORT_KIND_GRPC, *([pb.TRANSPORT_KIND_SHARED_MEMORY] if shared else [])]
        description = describe(config.node, runner, pb.ROLE_DECODE, process, transports)
        node = DecodeNode(config, runner, description, faults, memories[0].offer if shared else None)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeService(node), process.server)
        return node

    return run_node(config.node, "decode", start)
