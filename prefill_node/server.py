"""The prefill node's process: gRPC in front of `PrefillNode`. Only translates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from engine.errors import PdserveError
from engine.faults import Faults
from engine.model_store import resolve_model
from engine.runners import make_runner
from kv_transfer.node_host import NodeProcess, describe, run_node
from kv_transfer.processes import process_start_ticks
from kv_transfer.wire import error_to_wire
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc


class PrefillService(worker_pb2_grpc.PrefillServiceServicer):
    """Serves PrefillService for one node."""

    def __init__(self, node: PrefillNode) -> None:
        self._node = node

    async def Handoff(
        self, request_iterator: AsyncIterator[pb.HandoffCommand], context: grpc.aio.ServicerContext
    ) -> None:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("command") != "open":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be open")
            return
        message = first.open
        identity = self._node.description.identity
        if message.prefill_node != identity:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this is {identity.node_id} epoch {identity.epoch}, "
                f"not {message.prefill_node.node_id[:64]} epoch {message.prefill_node.epoch}",
            )
        try:
            sender = self._node.open(message)
        except PdserveError as error:
            await context.write(pb.HandoffEvent(failed=error_to_wire(error)))
            return
        accepted = pb.Accepted(
            identity=identity, transport=sender.transport.kind, queue_length=self._node.scheduler.num_waiting
        )
        if sender.transport.kind == pb.TRANSPORT_KIND_SHARED_MEMORY:
            accepted.pid = self._node.description.pid
            accepted.pid_start_ticks = process_start_ticks(accepted.pid) or 0
        sender.say_accepted(accepted)
        await sender.serve(request_iterator, context.write)

    async def Fence(self, request: pb.FenceRequest, context: grpc.aio.ServicerContext) -> pb.FenceReply:
        if request.prefill_node != self._node.description.identity:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation of the node runs here")
        return pb.FenceReply(stopped=not self._node.is_writing(request.attempt_id))


def run(config: PrefillConfig) -> int:
    """Run a prefill node until SIGTERM; returns the exit code. Blocks."""

    async def start(process: NodeProcess) -> PrefillNode:
        faults = Faults.from_env()
        files = await asyncio.to_thread(resolve_model, config.node.engine.model)
        runner = await asyncio.to_thread(make_runner, config.node.engine, files)
        description = describe(config.node, runner, pb.ROLE_PREFILL, process, [pb.TRANSPORT_KIND_GRPC])
        node = PrefillNode(config, runner, description, faults)
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(node), process.server)
        return node

    return run_node(config.node, "prefill", start)
