"""Runs real prefill and decode nodes inside this process, without network, and drives them as their peers would.

Everything a node does happens: admission, scheduling, batches, sampling, messages built and serialised. Only sockets
and peers are missing: a decode node computes its prompts by itself, and what a prefill node computes goes nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from engine.config import EngineConfig, NodeConfig
from engine.faults import Faults
from engine.ids import BlockId
from engine.kv_layout import DTYPE_BYTES
from engine.model_runner import ModelRunner, Runner
from engine.model_store import resolve_model
from engine.sampling_params import SamplingParams
from kv_transfer.wire import fingerprint_to_wire, sampling_to_wire
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from proto import worker_pb2 as pb

_DEADLINE_MS = 3_600_000
_LEASE_S = 3600.0
"""This decode side says nothing until a prompt is computed, which may take long on a busy machine."""

_numbers = itertools.count(1)


@dataclass(slots=True)
class Stream:
    """One sequence as its router hears it."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    error: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def load_runner(config: EngineConfig) -> ModelRunner:
    """The model as a node would load it. Raises ConfigError."""
    files = resolve_model(config.model, report=lambda message: print(message, file=sys.stderr))
    return ModelRunner(config, files)


def fill_pool(runner: Runner) -> None:
    """Random K/V in every block; memory that was never written would all be one page, and read from a cache."""
    elements = runner.layout.block_bytes // DTYPE_BYTES[runner.layout.dtype]
    block = torch.randn(elements).mul_(0.1).to(getattr(torch, runner.layout.dtype)).view(torch.uint8).numpy()
    for index in range(runner.num_blocks):
        runner.block_bytes(BlockId(index))[:] = block.data


def engine_config(runner: Runner, *, max_num_seqs: int, max_num_batched_tokens: int) -> EngineConfig:
    """Settings of a node around a runner that is already there."""
    return EngineConfig(
        model=runner.fingerprint.model_id,
        block_size=runner.layout.block_size,
        num_blocks=runner.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=torch.get_num_threads(),
    )


def _description(runner: Runner, role: pb.Role) -> pb.NodeDescription:
    return pb.NodeDescription(
        identity=pb.NodeIdentity(node_id="bench", epoch=next(_numbers)),
        role=role,
        fingerprint=fingerprint_to_wire(runner.fingerprint),
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        num_blocks=runner.num_blocks,
        pid=os.getpid(),
    )


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another function under this name of a module or an object while the context lasts."""
    original, was_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


class LocalDecode:
    """A decode node and the router's side of one session with it. Enter it to let it run."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self.node = DecodeNode(
            DecodeConfig(NodeConfig(engine=config), max_waiting=1_000_000),
            runner,
            _description(runner, pb.ROLE_DECODE),
            Faults.parse(""),
        )
        self._session = self.node.open_session("bench")
        self._streams: dict[tuple[str, int], Stream] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LocalDecode]:
        """The node works while the context lasts."""
        tasks = [asyncio.create_task(self.node.run()), asyncio.create_task(self._listen())]
        try:
            yield self
        finally:
            self.node.close_session(self._session)
            await self.node.close()
            await _end(tasks)

    def start(
        self, prompt: Sequence[int], sampling: SamplingParams, *, n: int = 1, is_beam_search: bool = False
    ) -> list[Stream]:
        """Begin a request; one stream for each of its samples, or for each of the beams found in the end."""
        attempt_id = f"bench-{next(_numbers)}"
        streams = [Stream() for _ in range(n)]
        self._streams |= {(attempt_id, index): stream for index, stream in enumerate(streams)}
        message = pb.StartAttempt(
            attempt_id=attempt_id,
            decode_node=self.node.description.identity,
            deadline_ms=_DEADLINE_MS,
            prompt_token_ids=prompt,
            sampling=sampling_to_wire(sampling),
            sequences=[pb.SequenceStart(index=index) for index in range(n)],
            beam_search=pb.BeamSearch(width=n, length_penalty=1.0) if is_beam_search else None,
        )
        self.node.start(message, self._session)
        return streams

    async def finish(self, streams: Sequence[Stream]) -> None:
        """Wait until all have ended. Raises RuntimeError when one did with an error."""
        for stream in streams:
            await stream.ended.wait()
            if stream.error:
                raise RuntimeError(f"a sequence ended with an error: {stream.error}")

    async def _listen(self) -> None:
        while True:
            message = await self._session.next_message()
            message.SerializeToString()  # what sending it would cost
            for update in message.sequences:
                stream = self._streams[update.attempt_id, update.sequence_index]
                stream.token_ids += update.token_ids
                if update.finish_reason:
                    stream.finish_reason = update.finish_reason
                    stream.error = update.error.message if update.HasField("error") else ""
                    del self._streams[update.attempt_id, update.sequence_index]
                    stream.ended.set()


class LocalPrefill:
    """A prefill node and a decode side that takes first tokens and then lets go. Enter it to let it run."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self.node = PrefillNode(
            PrefillConfig(NodeConfig(engine=config), max_waiting=1_000_000, max_ungranted=1_000_000, lease_s=_LEASE_S),
            runner,
            _description(runner, pb.ROLE_PREFILL),
            Faults.parse(""),
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LocalPrefill]:
        """The node works while the context lasts."""
        task = asyncio.create_task(self.node.run())
        try:
            yield self
        finally:
            await self.node.close()
            await _end([task])

    async def compute(self, prompt: Sequence[int], sampling: SamplingParams) -> int:
        """Compute a prompt; the token that follows it. Raises RuntimeError when it failed."""
        message = pb.OpenHandoff(
            attempt_id=f"bench-{next(_numbers)}",
            decode_node=pb.NodeIdentity(node_id=f"bench-{next(_numbers)}", epoch=1),
            prefill_node=self.node.description.identity,
            deadline_ms=_DEADLINE_MS,
            fingerprint=self.node.description.fingerprint,
            token_ids=prompt,
            prompt_length=len(prompt),
            sampling=sampling_to_wire(sampling),
            sequence_indices=[0],
            transports=[pb.TRANSPORT_KIND_GRPC],
        )
        sender = self.node.open(message)
        is_heard = asyncio.Event()
        tokens: list[int] = []
        failures: list[str] = []

        async def hear(event: pb.HandoffEvent) -> None:
            event.SerializeToString()
            match event.WhichOneof("event"):
                case "first_tokens":
                    tokens.extend(token.token_id for token in event.first_tokens.tokens)
                    is_heard.set()
                case "failed":
                    failures.append(event.failed.reason)
                    is_heard.set()

        async def commands() -> AsyncIterator[pb.HandoffCommand]:
            await is_heard.wait()
            yield pb.HandoffCommand(abort=pb.AbortHandoff(reason="bench"))

        await sender.serve(commands(), hear)
        if not tokens:
            raise RuntimeError(f"a prompt was not computed: {', '.join(failures)}")
        return tokens[0]


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
