"""The one two-way stream to a decode node: commands down, one message per engine step up.

Everything about an attempt hangs on it: when it breaks, the node frees all attempts and the router moves them. Knows no
requests; what comes up goes to the attempt it names, and what names none is counted and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from engine.ids import AttemptId
from proto import worker_pb2 as pb
from router.cluster_counters import ClusterCounters
from router.node import Node

logger = logging.getLogger(__name__)


class LinkLost(Exception):
    """The connection to a node ended. Stays inside the link."""


def was_cancelled_here() -> bool:
    """Whether this very task is being cancelled; a cancelled call raises CancelledError in tasks that are not."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class DecodeSession:
    """Of one connection to one incarnation.

    `run` returns never: it raises LinkLost, or CancelledError when its task is cancelled. The session is up from the
    first message of the node on, which proves that it took the hello.
    """

    def __init__(
        self,
        stub: Any,
        node: Node,
        *,
        router_id: str,
        counters: ClusterCounters,
        clock: Callable[[], float],
        on_up: Callable[[], None],
    ) -> None:
        self._stub = stub
        self._node = node
        self._router_id = router_id
        self._counters = counters
        self._clock = clock
        self._on_up = on_up
        self._commands: deque[pb.SessionCommand] = deque()
        self._has_commands = asyncio.Event()
        self._is_flushed = asyncio.Event()
        self._call: Any = None
        self.is_up = False
        self.is_over = False
        self.heard_at = clock()

    def send(self, command: pb.SessionCommand) -> None:
        """Queue a command; it is written as soon as the stream takes it."""
        if not self.is_over:
            self._commands.append(command)
            self._has_commands.set()
            self._is_flushed.clear()

    async def flush(self) -> None:
        """Return once every queued command was handed to the transport, or the session is over."""
        if not self.is_over:
            await self._is_flushed.wait()

    def abort(self) -> None:
        """Break the stream from our side; `run` then raises LinkLost."""
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Write and read until the stream ends."""
        identity = pb.NodeIdentity(node_id=self._node.node_id, epoch=self._node.epoch)
        hello = pb.SessionHello(router_id=self._router_id, decode_node=identity)
        self._commands.appendleft(pb.SessionCommand(hello=hello))
        self._has_commands.set()
        self._call = self._stub.Session()
        writer = asyncio.create_task(self._write(self._call))
        try:
            await self._read(self._call)
        except grpc.aio.AioRpcError as error:
            raise LinkLost(f"session: {error.code().name}: {error.details()}") from error
        except asyncio.CancelledError:
            if was_cancelled_here():
                raise
            raise LinkLost("session: broken from here") from None
        finally:
            self.is_over = True
            self.is_up = False
            self._is_flushed.set()
            self._call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                code = await call.code()
                raise LinkLost(f"session: the node ended it with {code.name}: {await call.details()}")
            self.heard_at = self._clock()
            if message.identity.epoch != self._node.epoch:
                raise LinkLost(f"session: epoch is {self._node.epoch} here and {message.identity.epoch} there")
            if not self.is_up:
                self.is_up = True
                self._on_up()
            self._deliver(message)

    async def _write(self, call: Any) -> None:
        try:
            # The reader learns of a broken stream and reports it; here it only means that there is no more to write.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    while self._commands:
                        await call.write(self._commands.popleft())
                    self._is_flushed.set()
                    self._has_commands.clear()
                    await self._has_commands.wait()
        finally:
            # A session that can only be read must not look alive.
            call.cancel()

    def _deliver(self, message: pb.SessionUpdate) -> None:
        attempts = self._node.attempts
        for facts in message.attempts:
            attempt = attempts.get(AttemptId(facts.attempt_id))
            if attempt is None:
                self._counters.late_updates += 1
            else:
                attempt.owner.on_facts(attempt, facts)
        for update in message.sequences:
            attempt = attempts.get(AttemptId(update.attempt_id))
            if attempt is not None and update.sequence_index in attempt.sequences:
                attempt.owner.on_sequence(attempt, update)
            elif update.finish_reason != pb.FINISH_REASON_CANCELLED:
                self._counters.late_updates += 1
