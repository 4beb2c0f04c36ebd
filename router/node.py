"""One incarnation of a node as this router knows it: what it is, how it is, what we have under way there.

Identity never changes: a restarted node is another `Node` object, so no counter is inherited. What is reserved here is
released on the very object it was reserved on, also after that object has left the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from engine.fingerprint import Fingerprint
from engine.ids import AttemptId, Epoch, NodeId
from proto import worker_pb2 as pb
from router.circuit_breaker import CircuitBreaker
from router.decay import DecayingSum

if TYPE_CHECKING:
    from router.attempt import Attempt

RECENT_HALF_LIFE_S = 10.0


class NodeHealth(Enum):
    """What keeps a node in or out of rotation. Only READY gets new work."""

    CONNECTING = "connecting"
    STARTING = "starting"
    READY = "ready"
    SUSPENDED = "suspended"
    DRAINING = "draining"
    STALLED = "stalled"
    UNREACHABLE = "unreachable"
    MISMATCH = "mismatch"
    REPLACED = "replaced"


class CommandChannel(Protocol):
    """The way down to a decode node; `router/decode_session.py` implements it."""

    def send(self, command: pb.SessionCommand) -> None:
        """Queue a command. Never blocks; a command for a broken session is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class OwnWork:
    """What this router has under way on a node at one moment."""

    attempts: int = 0
    sequences: int = 0
    blocks: int = 0
    prefills: int = 0
    prefill_tokens: int = 0


class Reservation:
    """A part of a node's capacity, held until released. Releasing twice is harmless; `with` releases at the end."""

    __slots__ = ("_is_held", "_node", "_work")

    def __init__(self, node: Node, work: OwnWork) -> None:
        self._node = node
        self._work = work
        self._is_held = True
        node._change(work, 1)

    def release(self) -> None:
        """Give it back."""
        if self._is_held:
            self._is_held = False
            self._node._change(self._work, -1)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Node:
    """Written by its link and the registry; read by everyone on the loop.

    Attributes:
        attempts: under way there, by id; only decode nodes have any.
        mismatch: why its fingerprint keeps it out, or None.
        stalled: why it is out of rotation though connected, or None.
        last_trouble: why the last connection ended or could not be made; empty while it is heard.
    """

    def __init__(self, node_id: NodeId, epoch: Epoch, role: str, address: str, *, now: float) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self.role = role
        self.address = address
        self.in_directory_at = now
        self.heard_at = now
        self.description: pb.NodeDescription | None = None
        self.fingerprint: Fingerprint | None = None
        self.status: pb.NodeStatus | None = None
        self.own_at_status = OwnWork()
        self.is_connected = False
        self.is_replaced = False
        self.mismatch: str | None = None
        self.stalled: str | None = None
        self.last_trouble = ""
        self.commands: CommandChannel | None = None
        self.attempts: dict[AttemptId, Attempt] = {}
        self.own = OwnWork()
        self.recent_tokens = DecayingSum(RECENT_HALF_LIFE_S)
        self.breaker = CircuitBreaker()

    def __repr__(self) -> str:
        return f"Node({self.node_id!r}, epoch={self.epoch}, {self.role}, {self.address})"

    @property
    def key(self) -> tuple[NodeId, Epoch]:
        """What names this incarnation."""
        return self.node_id, self.epoch

    def health(self, now: float) -> NodeHealth:
        """The first of all reasons that keep it out of rotation, else READY."""
        if self.is_replaced:
            return NodeHealth.REPLACED
        if self.mismatch is not None:
            return NodeHealth.MISMATCH
        if not self.is_up():
            return NodeHealth.UNREACHABLE if self.last_trouble else NodeHealth.CONNECTING
        assert self.status is not None
        if self.stalled is not None or self.status.state == pb.NODE_STATE_STALLED:
            return NodeHealth.STALLED
        if self.status.state == pb.NODE_STATE_DRAINING:
            return NodeHealth.DRAINING
        if self.status.state != pb.NODE_STATE_READY:
            return NodeHealth.STARTING
        if not self.breaker.allows(now):
            return NodeHealth.SUSPENDED
        return NodeHealth.READY

    def is_up(self) -> bool:
        """Whether it is heard: by its watch and, if it decodes, by its session."""
        return self.is_connected and self.status is not None and (self.role != "decode" or self.commands is not None)

    def is_routable(self, now: float) -> bool:
        """Whether new work may go there."""
        return self.health(now) is NodeHealth.READY

    def reserve(
        self, *, attempts: int = 0, sequences: int = 0, blocks: int = 0, prefills: int = 0, prefill_tokens: int = 0
    ) -> Reservation:
        """Count work as under way from now on."""
        return Reservation(self, OwnWork(attempts, sequences, blocks, prefills, prefill_tokens))

    def take_status(self, status: pb.NodeStatus, now: float) -> None:
        """Its word on itself; our own work at that moment is remembered so as not to count it twice."""
        self.status = status
        self.heard_at = now
        self.own_at_status = self.own

    def foreign_sequences(self) -> int:
        """Sequences there that are not ours, as of its last status."""
        if self.status is None:
            return 0
        seen = self.status.running_sequences + self.status.waiting_sequences
        return max(0, seen - self.own_at_status.sequences)

    def foreign_prefill_tokens(self) -> int:
        """Tokens waiting there that are not ours, as of its last status."""
        if self.status is None:
            return 0
        return max(0, self.status.waiting_tokens - self.own_at_status.prefill_tokens)

    def total_blocks(self) -> int:
        """Of its pool; 0 until known."""
        return self.description.num_blocks if self.description is not None else 0

    def used_blocks(self) -> int:
        """Blocks in use there, or promised to our own work, whichever is known to be more."""
        promised = self.own.blocks
        if self.status is None:
            return promised
        in_use = self.status.blocks.in_use + self.status.blocks.quarantined
        return max(promised, in_use + max(0, promised - self.own_at_status.blocks))

    def check_idle(self) -> None:
        """Nothing of ours is under way; tests and `close` call it."""
        assert not self.attempts and self.own == OwnWork(), f"{self!r} still has {self.own} and {self.attempts}"

    def _change(self, work: OwnWork, sign: int) -> None:
        own = self.own
        self.own = OwnWork(
            own.attempts + sign * work.attempts,
            own.sequences + sign * work.sequences,
            own.blocks + sign * work.blocks,
            own.prefills + sign * work.prefills,
            own.prefill_tokens + sign * work.prefill_tokens,
        )
        assert min(self.own.attempts, self.own.sequences, self.own.blocks, self.own.prefills) >= 0, self.own
        assert self.own.prefill_tokens >= 0, self.own
