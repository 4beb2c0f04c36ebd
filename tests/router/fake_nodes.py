"""Decode and prefill nodes for tests of the router: real gRPC on loopback, scripted behaviour, no model.

A token is a function of everything before it (prompt, seed, sequence index, output so far), so a stream that moved to
another node with one token lost or doubled ends differently from `expected_tokens`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.fingerprint import Fingerprint
from engine.ids import Epoch, NodeId
from engine.kv_layout import KvLayout
from kv_transfer.channels import SERVER_OPTIONS
from kv_transfer.directory import NodeRecord
from kv_transfer.memory_directory import MemoryDirectory
from kv_transfer.wire import fingerprint_to_wire
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc as rpc

VOCAB_SIZE = 1000
BLOCK_SIZE = 4
HEARTBEAT_S = 0.02


def make_fingerprint(**changes: str) -> Fingerprint:
    values = {"model_id": "fake", "weights_digest": "weights", "rope_digest": "rope"} | changes
    return Fingerprint.of(KvLayout(2, 1, 4, BLOCK_SIZE, "float32"), **values)


def next_token(prompt: Sequence[int], seed: int, index: int, output: Sequence[int]) -> int:
    value = seed * 31 + index * 17 + 7
    for token in (*prompt, *output):
        value = (value * 1103515245 + token + 12345) % 2**31
    return (value >> 8) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], seed: int, index: int, count: int) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        output.append(next_token(prompt, seed, index, output))
    return output


@dataclass
class Behaviour:
    """What a node does; tests change it at any time.

    Attributes:
        token_delay_s: between two tokens of an attempt.
        die_after_tokens: the node dies right after its n-th token in all.
        hold_after_tokens: every attempt stops producing after so many tokens of its own.
        refusals: the next attempts are answered with these errors, one each.
        always_refuse: every attempt is answered with this error.
        forget_attempts: attempts are taken and never heard of again.
        cached_tokens: reported for each attempt.
        ignore_cancels: cancelled attempts go on, as if the cancel were still on its way.
        nonsense: so many attempts are answered with a finish reason that does not exist.
    """

    token_delay_s: float = 0.0
    die_after_tokens: int | None = None
    hold_after_tokens: int | None = None
    refusals: list[pb.Error] = field(default_factory=list)
    always_refuse: pb.Error | None = None
    forget_attempts: bool = False
    cached_tokens: int | None = None
    ignore_cancels: bool = False
    nonsense: int = 0


class FakeNode(rpc.NodeServiceServicer, rpc.DecodeServiceServicer):
    """One incarnation. `await start()`; `await die()` breaks every connection at once; `freeze()` is SIGSTOP."""

    def __init__(
        self,
        role: str,
        node_id: str,
        *,
        epoch: int = 1,
        port: int = 0,
        num_blocks: int = 1000,
        max_num_seqs: int = 8,
        max_model_len: int = 2000,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self.role = role
        self.node_id = node_id
        self.epoch = epoch
        self.port = port
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint or make_fingerprint()
        self.does = Behaviour()
        self.state: Any = pb.NODE_STATE_READY
        self.last_step_age_s = 0.0
        self.waiting_tokens = 0
        self.running_sequences: int | None = None
        self.allocated_slots: int | None = None
        self.prefill_tokens_per_s = 0.0
        self.starts: list[pb.StartAttempt] = []
        self.cancels: list[pb.CancelAttempt] = []
        self.sessions = 0
        self.tokens_sent = 0
        self.is_dead = False
        self._running = asyncio.Event()
        self._running.set()
        self._attempts: dict[str, dict[int, asyncio.Task[None]]] = {}
        self._server: Any = None

    # Control

    async def start(self, directory: MemoryDirectory | None = None) -> FakeNode:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_NodeServiceServicer_to_server(self, self._server)
        if self.role == "decode":
            rpc.add_DecodeServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        if directory is not None:
            await directory.register(self.record, ttl_s=3600.0)
        return self

    async def die(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            await self._server.stop(None)
            self._drop_attempts()

    def freeze(self) -> None:
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    async def restart(self, directory: MemoryDirectory | None = None, **changes: Any) -> FakeNode:
        """Another incarnation at the same address; this one must be dead."""
        again = FakeNode(
            self.role,
            self.node_id,
            epoch=changes.pop("epoch", self.epoch + 1),
            port=self.port,
            num_blocks=self.num_blocks,
            fingerprint=changes.pop("fingerprint", self.fingerprint),
        )
        return await again.start(directory)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def record(self) -> NodeRecord:
        return NodeRecord(NodeId(self.node_id), Epoch(self.epoch), self.role, self.address)

    @property
    def live_attempts(self) -> set[str]:
        return set(self._attempts)

    # NodeService

    async def Describe(self, request: Any, context: Any) -> pb.NodeDescription:
        await self._running.wait()
        return pb.NodeDescription(
            identity=self._identity(),
            role=pb.ROLE_DECODE if self.role == "decode" else pb.ROLE_PREFILL,
            address=self.address,
            fingerprint=fingerprint_to_wire(self.fingerprint),
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.num_blocks,
            pid=os.getpid(),
        )

    async def GetStatus(self, request: Any, context: Any) -> pb.NodeStatus:
        await self._running.wait()
        return self._status()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeStatus]:
        while True:
            await self._running.wait()
            yield self._status()
            await asyncio.sleep(min(HEARTBEAT_S, request.interval_s))

    # DecodeService

    async def Session(
        self, commands: AsyncIterator[pb.SessionCommand], context: Any
    ) -> AsyncIterator[pb.SessionUpdate]:
        hello = (await anext(commands)).hello
        if hello.decode_node.epoch != self.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another epoch")
        self.sessions += 1
        updates: asyncio.Queue[pb.SessionUpdate] = asyncio.Queue()
        mine: set[str] = set()
        reader = asyncio.create_task(self._read(commands, updates, mine))
        try:
            update = pb.SessionUpdate(identity=self._identity())
            while True:
                await self._running.wait()
                yield update
                try:
                    update = await asyncio.wait_for(updates.get(), HEARTBEAT_S)
                except TimeoutError:
                    update = pb.SessionUpdate(identity=self._identity())
        finally:
            reader.cancel()
            for attempt_id in mine:
                self._drop(attempt_id)

    async def _read(
        self, commands: AsyncIterator[pb.SessionCommand], updates: asyncio.Queue[pb.SessionUpdate], mine: set[str]
    ) -> None:
        async for command in commands:
            await self._running.wait()
            if command.HasField("start"):
                mine.add(command.start.attempt_id)
                self._start(command.start, updates)
            elif command.HasField("cancel"):
                self._cancel(command.cancel, updates)

    def _start(self, start: pb.StartAttempt, updates: asyncio.Queue[pb.SessionUpdate]) -> None:
        assert start.attempt_id not in self._attempts
        assert start.decode_node == self._identity()
        self.starts.append(start)
        refusal = self.does.refusals.pop(0) if self.does.refusals else self.does.always_refuse
        if refusal is not None:
            errors = [
                pb.SequenceUpdate(
                    attempt_id=start.attempt_id,
                    sequence_index=sequence.index,
                    finish_reason=pb.FINISH_REASON_ERROR,
                    error=refusal,
                )
                for sequence in start.sequences
            ]
            updates.put_nowait(pb.SessionUpdate(identity=self._identity(), sequences=errors))
            return
        if self.does.nonsense:
            self.does.nonsense -= 1
            nonsense = pb.SequenceUpdate(attempt_id=start.attempt_id, token_ids=[1])
            nonsense.finish_reason = 77  # type: ignore[assignment]
            updates.put_nowait(pb.SessionUpdate(identity=self._identity(), sequences=[nonsense]))
        self._attempts[start.attempt_id] = {
            sequence.index: asyncio.create_task(self._generate(start, sequence, updates))
            for sequence in start.sequences
        }
        facts = pb.AttemptUpdate(
            attempt_id=start.attempt_id,
            cached_tokens=self.does.cached_tokens,
            prefill_node_id=start.prefill_nodes[0].identity.node_id if start.prefill_nodes else "",
            times=pb.PhaseTimes(queue_s=0.25, prefill_s=0.5, transfer_s=0.0, first_decode_s=0.0),
        )
        if start.sampling.HasField("prompt_logprobs"):
            facts.prompt_logprobs.add()
            for token in start.prompt_token_ids[1:]:
                entry = pb.TokenLogprob(token_id=token, logprob=-1.0, rank=1)
                facts.prompt_logprobs.append(pb.TokenLogprobs(entries=[entry]))
        if not self.does.forget_attempts:
            updates.put_nowait(pb.SessionUpdate(identity=self._identity(), attempts=[facts]))

    async def _generate(
        self, start: pb.StartAttempt, sequence: pb.SequenceStart, updates: asyncio.Queue[pb.SessionUpdate]
    ) -> None:
        output = list(sequence.output_token_ids)
        made_here = 0
        while True:
            await asyncio.sleep(self.does.token_delay_s)
            await self._running.wait()
            held = self.does.hold_after_tokens is not None and made_here >= self.does.hold_after_tokens
            if held or self.does.forget_attempts:
                await asyncio.sleep(0.005)
                continue
            token = next_token(start.prompt_token_ids, start.sampling.seed, sequence.index, output)
            output.append(token)
            made_here += 1
            is_last = len(output) >= start.sampling.max_tokens
            update = pb.SequenceUpdate(
                attempt_id=start.attempt_id,
                sequence_index=sequence.index,
                token_ids=[token],
                finish_reason=pb.FINISH_REASON_LENGTH if is_last else pb.FINISH_REASON_UNSPECIFIED,
            )
            updates.put_nowait(pb.SessionUpdate(identity=self._identity(), sequences=[update]))
            self.tokens_sent += 1
            if self.tokens_sent == self.does.die_after_tokens:
                # Once the token is on the wire.
                await asyncio.sleep(0.02)
                asyncio.get_running_loop().create_task(self.die())
                await asyncio.sleep(3600)
            if is_last:
                self._end(start.attempt_id, sequence.index)
                return

    def _cancel(self, cancel: pb.CancelAttempt, updates: asyncio.Queue[pb.SessionUpdate]) -> None:
        self.cancels.append(cancel)
        sequences = self._attempts.get(cancel.attempt_id, {})
        if self.does.ignore_cancels:
            return
        indices = [cancel.sequence_index] if cancel.HasField("sequence_index") else list(sequences)
        for index in indices:
            if index in sequences:
                sequences[index].cancel()
                self._end(cancel.attempt_id, index)
                update = pb.SequenceUpdate(
                    attempt_id=cancel.attempt_id, sequence_index=index, finish_reason=pb.FINISH_REASON_CANCELLED
                )
                updates.put_nowait(pb.SessionUpdate(identity=self._identity(), sequences=[update]))

    def _end(self, attempt_id: str, index: int) -> None:
        sequences = self._attempts[attempt_id]
        del sequences[index]
        if not sequences:
            del self._attempts[attempt_id]

    def _drop(self, attempt_id: str) -> None:
        for task in self._attempts.pop(attempt_id, {}).values():
            task.cancel()

    def _drop_attempts(self) -> None:
        for attempt_id in list(self._attempts):
            self._drop(attempt_id)

    def _identity(self) -> pb.NodeIdentity:
        return pb.NodeIdentity(node_id=self.node_id, epoch=self.epoch)

    def _status(self) -> pb.NodeStatus:
        running = sum(len(sequences) for sequences in self._attempts.values())
        return pb.NodeStatus(
            identity=self._identity(),
            state=self.state,
            blocks=pb.BlockCounts(total=self.num_blocks, free=self.num_blocks - running, in_use=running),
            transfers=pb.TransferCounts(started=3, committed=2, failed=1),
            in_flight=len(self._attempts),
            running_sequences=running if self.running_sequences is None else self.running_sequences,
            waiting_tokens=self.waiting_tokens,
            last_step_age_s=self.last_step_age_s,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            failures={"digest_mismatch": 1},
            allocated_slots=self.allocated_slots,
            transports={"shared_memory": pb.TransportUse(transfers=2, bytes=4096, seconds=0.25)},
        )
