"""Prefill and decode nodes in one process, talking over real gRPC on loopback, and a router's side to drive them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from decode_node.server import DecodeService
from engine.config import EngineConfig, NodeConfig
from engine.faults import Faults
from engine.forward_batch import SequenceSlice, build_batch
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from engine.model_runner import Runner
from engine.node_status import NodeService
from engine.sampling import SampleRow, sample
from engine.sampling_params import SamplingParams
from engine.sim_runner import SimCost, SimRunner
from engine.tokens import SampledToken
from kv_transfer.channels import SERVER_OPTIONS, open_channel
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.wire import fingerprint_to_wire, sampling_to_wire
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from prefill_node.server import PrefillService
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc

BLOCK = 4
SIM_LAYOUT = KvLayout(num_layers=2, kv_heads=1, head_dim=4, block_size=BLOCK, dtype="float32")
_numbers = itertools.count(1)

Write = Callable[[pb.HandoffEvent], Awaitable[None]]
Script = Callable[[AsyncIterator[pb.HandoffCommand], Write], Awaitable[None]]


def sim_runner(
    num_blocks: int = 64, *, step_s: float = 0.0, memory: PoolMemory | None = None, **more: Any
) -> SimRunner:
    allocate = None if memory is None else lambda num_bytes: memory.view
    cost = SimCost(step_s=step_s)
    return SimRunner(num_blocks=num_blocks, layout=SIM_LAYOUT, cost=cost, allocate_pool=allocate, **more)


def pool_memory(num_blocks: int, layout: KvLayout = SIM_LAYOUT) -> PoolMemory:
    return PoolMemory(num_blocks * layout.block_bytes)


def alone(prompt: Sequence[int], count: int, index: int = 0, **sampling: Any) -> list[int]:
    """What a simulated model says when nothing is shared, moved or batched."""
    num_blocks = SIM_LAYOUT.blocks_for(len(prompt) + count)
    runner = sim_runner(num_blocks)
    blocks = [BlockId(block_id) for block_id in range(num_blocks)]
    params = SamplingParams(max_tokens=count, **{"temperature": 0.0, **sampling})
    output: list[int] = []
    for _ in range(count):
        start = len(prompt) + len(output) - 1 if output else 0
        part = SequenceSlice([*prompt, *output][start:], start, blocks, "last")
        logits = runner.run(build_batch([part], block_size=BLOCK))
        (token,) = sample(logits, [SampleRow(params, index, prompt, output)])
        assert isinstance(token, SampledToken)
        output.append(token.token_id)
    return output


def engine_config(num_blocks: int, **more: Any) -> EngineConfig:
    return EngineConfig(model="test", block_size=BLOCK, num_blocks=num_blocks, **{"max_num_batched_tokens": 32, **more})


@dataclass
class Host:
    """One node, its server and its loop."""

    node: Any
    server: grpc.aio.Server
    work: asyncio.Task[None]

    @property
    def target(self) -> pb.PrefillTarget:
        description = self.node.description
        return pb.PrefillTarget(identity=description.identity, address=description.address)

    async def crash(self) -> None:
        """Gone without a word."""
        await self.server.stop(None)
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)


def describe(runner: Runner, role: pb.Role, address: str, name: str, config: EngineConfig) -> pb.NodeDescription:
    return pb.NodeDescription(
        identity=pb.NodeIdentity(node_id=name, epoch=next(_numbers)),
        role=role,
        address=address,
        fingerprint=fingerprint_to_wire(runner.fingerprint),
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_blocks=runner.num_blocks,
        pid=os.getpid(),
    )


async def start_prefill(runner: Runner, *, faults: str = "", port: int = 0, **config: Any) -> Host:
    engine = engine_config(runner.num_blocks, **config.pop("engine", {}))
    node_config = NodeConfig(engine=engine, progress_deadline_s=config.pop("progress_deadline_s", 5.0))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    description = describe(runner, pb.ROLE_PREFILL, f"127.0.0.1:{port}", f"prefill-{port}", engine)
    node = PrefillNode(PrefillConfig(node_config, **config), runner, description, Faults.parse(faults))
    worker_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(node), server)
    worker_pb2_grpc.add_NodeServiceServicer_to_server(NodeService(node), server)
    await server.start()
    return Host(node, server, asyncio.create_task(node.run()))


async def start_decode(runner: Runner, *, memory: PoolMemory | None = None, faults: str = "", **config: Any) -> Host:
    engine = engine_config(runner.num_blocks, **config.pop("engine", {}))
    node_config = NodeConfig(engine=engine, progress_deadline_s=config.pop("progress_deadline_s", 5.0))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    description = describe(runner, pb.ROLE_DECODE, f"127.0.0.1:{port}", f"decode-{port}", engine)
    offer = None if memory is None else memory.offer
    node = DecodeNode(DecodeConfig(node_config, **config), runner, description, Faults.parse(faults), offer)
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeService(node), server)
    worker_pb2_grpc.add_NodeServiceServicer_to_server(NodeService(node), server)
    await server.start()
    return Host(node, server, asyncio.create_task(node.run()))


@dataclass
class Stream:
    """What the router heard of one sequence."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    error: pb.Error | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def failure(self) -> str:
        assert self.error is not None, f"it ended with {self.finish_reason} after {self.tokens}"
        return self.error.reason


class Router:
    """One router's session with a decode node; checks that every sequence ends exactly once."""

    def __init__(self, decode: Host) -> None:
        self.decode = decode
        self.streams: dict[tuple[str, int], Stream] = {}
        self.facts: dict[str, pb.AttemptUpdate] = {}
        self.unexpected: list[str] = []
        self._writing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Router]:
        async with open_channel(self.decode.node.description.address) as channel:
            self.call = worker_pb2_grpc.DecodeServiceStub(channel).Session()
            hello = pb.SessionHello(router_id="router", decode_node=self.decode.node.description.identity)
            await self.send(pb.SessionCommand(hello=hello))
            reader = asyncio.create_task(self._read())
            try:
                yield self
            finally:
                self.call.cancel()
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        assert not self.unexpected, self.unexpected

    async def _read(self) -> None:
        async for message in self.call:
            for facts in message.attempts:
                self.facts.setdefault(facts.attempt_id, pb.AttemptUpdate()).MergeFrom(facts)
            for update in message.sequences:
                self._on_sequence(update)

    def _on_sequence(self, update: pb.SequenceUpdate) -> None:
        stream = self.streams.setdefault((update.attempt_id, update.sequence_index), Stream())
        if stream.ended.is_set():
            self.unexpected.append(f"after its end: {update}")
        stream.tokens += update.token_ids
        if update.finish_reason:
            stream.finish_reason = update.finish_reason
            stream.error = update.error if update.HasField("error") else None
            stream.ended.set()

    def message(
        self,
        prompt: Sequence[int],
        prefill: Sequence[Host | pb.PrefillTarget] = (),
        *,
        n: int = 1,
        index: int = 0,
        output: Sequence[int] = (),
        deadline_ms: int = 20_000,
        threshold: int = 0,
        **sampling: Any,
    ) -> pb.StartAttempt:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling})
        return pb.StartAttempt(
            attempt_id=f"attempt-{next(_numbers)}",
            decode_node=self.decode.node.description.identity,
            deadline_ms=deadline_ms,
            prompt_token_ids=prompt,
            sampling=sampling_to_wire(params),
            sequences=[pb.SequenceStart(index=index + i, output_token_ids=output) for i in range(n)],
            prefill_nodes=[target.target if isinstance(target, Host) else target for target in prefill],
            local_prefill_threshold=threshold,
        )

    async def send(self, command: pb.SessionCommand) -> None:
        # A call takes one write at a time.
        async with self._writing:
            await self.call.write(command)

    async def start(self, message: pb.StartAttempt) -> list[Stream]:
        for start in message.sequences:
            self.streams.setdefault((message.attempt_id, start.index), Stream())
        await self.send(pb.SessionCommand(start=message))
        return [self.streams[message.attempt_id, start.index] for start in message.sequences]

    async def cancel(self, message: pb.StartAttempt, index: int | None = None) -> None:
        cancel = pb.CancelAttempt(attempt_id=message.attempt_id, sequence_index=index)
        await self.send(pb.SessionCommand(cancel=cancel))

    async def generate(self, prompt: Sequence[int], prefill: Sequence[Any] = (), **more: Any) -> list[list[int]]:
        """The tokens of each sequence; fails when one ended otherwise than by itself."""
        streams = await self.start(self.message(prompt, prefill, **more))
        await ended(streams)
        for stream in streams:
            assert stream.finish_reason in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP), stream.error
        return [stream.tokens for stream in streams]


async def ended(streams: Sequence[Stream], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        for stream in streams:
            await stream.ended.wait()


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0.005)


def unrest(host: Host) -> str:
    """What a node still holds; empty when idle."""
    status = host.node.status()
    blocks, transfers = status.blocks, status.transfers
    held = {
        "in_use": blocks.in_use,
        "quarantined": blocks.quarantined,
        "lost_blocks": blocks.total - blocks.free - blocks.cached - blocks.in_use - blocks.quarantined,
        "leases": status.leases,
        "in_flight": status.in_flight,
        "running": status.running_sequences,
        "waiting": status.waiting_sequences,
        "transfers": transfers.started - transfers.committed - transfers.failed - transfers.aborted,
        "work_ended": host.work.done(),
    }
    return " ".join(f"{name}={value}" for name, value in held.items() if value)


async def idle(hosts: Sequence[Host], timeout_s: float = 3.0) -> None:
    """I1, I2 and I5 of every node."""
    try:
        await until(lambda: not any(map(unrest, hosts)), timeout_s)
    except TimeoutError:
        raise AssertionError([unrest(host) for host in hosts]) from None
    for host in hosts:
        host.node.pool.check_invariants()
        host.node.scheduler.check_invariants()
        for name in ("_attempts", "_by_sequence", "_by_reservation", "_receivers", "_senders", "_by_job"):
            assert not getattr(host.node, name, {}), name


async def _no_tasks_left(before: set[asyncio.Task[Any]]) -> None:
    def left() -> set[asyncio.Task[Any]]:
        return {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}

    try:
        await until(lambda: not left(), 3.0)
    except TimeoutError:
        raise AssertionError(left()) from None


@dataclass
class Cluster:
    """What a test has started. On the way out everything must be idle, and no task left."""

    hosts: list[Host] = field(default_factory=list)
    crashed: list[Host] = field(default_factory=list)
    must_be_idle: bool = True

    async def prefill(self, runner: Runner | None = None, **config: Any) -> Host:
        self.hosts.append(await start_prefill(runner or sim_runner(), **config))
        return self.hosts[-1]

    async def decode(self, runner: Runner | None = None, **config: Any) -> Host:
        self.hosts.append(await start_decode(runner or sim_runner(), **config))
        return self.hosts[-1]

    async def crash(self, host: Host) -> None:
        self.hosts.remove(host)
        self.crashed.append(host)
        await host.crash()

    @contextlib.asynccontextmanager
    async def router(self, decode: Host) -> AsyncIterator[Router]:
        async with Router(decode).connected() as router:
            yield router

    async def fake_prefill(self, script: Script) -> tuple[pb.PrefillTarget, FakePrefill]:
        fake = FakePrefill(script)
        target = await fake.start()
        self.fakes.append(fake)
        return target, fake

    fakes: list[FakePrefill] = field(default_factory=list)


class FakePrefill(worker_pb2_grpc.PrefillServiceServicer):
    """A prefill node that does what the script says."""

    def __init__(self, script: Any) -> None:
        self.script = script
        self.opened: list[pb.OpenHandoff] = []

    async def start(self) -> pb.PrefillTarget:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        port = self.server.add_insecure_port("127.0.0.1:0")
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self, self.server)
        await self.server.start()
        self.identity = pb.NodeIdentity(node_id="fake", epoch=1)
        return pb.PrefillTarget(identity=self.identity, address=f"127.0.0.1:{port}")

    async def Handoff(self, request_iterator: AsyncIterator[pb.HandoffCommand], context: Any) -> None:
        first = await anext(aiter(request_iterator))
        self.opened.append(first.open)
        await self.script(request_iterator, context.write)

    async def Fence(self, request: pb.FenceRequest, context: Any) -> pb.FenceReply:
        return pb.FenceReply(stopped=True)


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    before = asyncio.all_tasks()
    made = Cluster()
    try:
        yield made
        if made.must_be_idle:
            await idle(made.hosts)
    finally:
        for host in (*made.hosts, *made.crashed):
            await host.node.close()
        for host in made.hosts:
            await host.crash()
        for fake in made.fakes:
            await fake.server.stop(None)
    await _no_tasks_left(before)
