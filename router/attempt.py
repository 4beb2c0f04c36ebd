"""One try at running some sequences of a request on one decode node. Never reused: a retry is another attempt.

It holds what it occupies (on its decode node, and on the prefill node tried first) and gives it back exactly once. What
its node says after that finds no attempt and is counted as late.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine.ids import AttemptId
from proto import worker_pb2 as pb
from router.node import Node, Reservation


class AttemptOwner(Protocol):
    """Who is told what becomes of an attempt. All calls come on the loop and must not block."""

    def on_facts(self, attempt: Attempt, update: pb.AttemptUpdate) -> None: ...

    def on_sequence(self, attempt: Attempt, update: pb.SequenceUpdate) -> None: ...

    def on_node_lost(self, attempt: Attempt, reason: str) -> None:
        """The node died, stalled or was replaced; the attempt has been closed."""
        ...


class Attempt:
    """Alive from `start` until every sequence of it was let go.

    Attributes:
        sequences: indices still under way here.
        had_tokens: whether the node has sent any token for it.
    """

    def __init__(
        self,
        attempt_id: AttemptId,
        owner: AttemptOwner,
        node: Node,
        *,
        blocks_of_sequences: Mapping[int, int],
        prefill_node: Node | None,
        prefill_tokens: int,
    ) -> None:
        self.attempt_id = attempt_id
        self.owner = owner
        self.node = node
        self.had_tokens = False
        self._prefill_node = prefill_node
        self._prefill_tokens = prefill_tokens
        self._blocks_of_sequences = dict(blocks_of_sequences)
        self._of_sequences: dict[int, Reservation] = {}
        self._of_attempt: list[Reservation] = []
        self._of_prefill: Reservation | None = None
        self._is_probe = False

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._of_sequences)

    def start(self, message: pb.StartAttempt, now: float) -> None:
        """Reserve and send. Nothing awaits between the choice of the node and this."""
        node = self.node
        assert node.commands is not None, f"{node!r} has no session"
        self._is_probe = node.breaker.start(now)
        self._of_attempt.append(node.reserve(attempts=1))
        for index, blocks in self._blocks_of_sequences.items():
            self._of_sequences[index] = node.reserve(sequences=1, blocks=blocks)
        if self._prefill_node is not None:
            self._of_prefill = self._prefill_node.reserve(prefills=1, prefill_tokens=self._prefill_tokens)
            self._prefill_node.recent_tokens.add(len(message.prompt_token_ids), now)
        node.attempts[self.attempt_id] = self
        node.commands.send(pb.SessionCommand(start=message))

    def note_tokens(self) -> None:
        """The node sent tokens: prefill is over, and the node proved itself."""
        if not self.had_tokens:
            self.had_tokens = True
            self.node.breaker.success()
            self._release_prefill()

    def let_go(self, index: int) -> None:
        """A sequence ended or failed here; the last one closes the attempt."""
        reservation = self._of_sequences.pop(index, None)
        if reservation is not None:
            reservation.release()
        if not self._of_sequences:
            self.close()

    def cancel_sequence(self, index: int) -> None:
        """Tell the node to stop one sequence, and let go of it."""
        if index in self._of_sequences:
            self._send_cancel(index)
            self.let_go(index)

    def cancel(self) -> None:
        """Tell the node to stop everything of this attempt, if it still lives, and close."""
        if self._of_sequences:
            self._send_cancel(None)
        self.close()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        for reservation in (*self._of_sequences.values(), *self._of_attempt):
            reservation.release()
        self._of_sequences.clear()
        self._of_attempt.clear()
        self._release_prefill()
        self.node.attempts.pop(self.attempt_id, None)
        if self._is_probe and not self.had_tokens:
            self._is_probe = False
            self.node.breaker.end_probe()

    def _release_prefill(self) -> None:
        if self._of_prefill is not None:
            self._of_prefill.release()
            self._of_prefill = None

    def _send_cancel(self, index: int | None) -> None:
        if self.node.commands is not None:
            cancel = pb.CancelAttempt(attempt_id=self.attempt_id, sequence_index=index)
            self.node.commands.send(pb.SessionCommand(cancel=cancel))
