"""One router's session: gathers what it must be told and sends it once per step. Knows no scheduling."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from proto import worker_pb2 as pb

KeyT = TypeVar("KeyT")
UpdateT = TypeVar("UpdateT", pb.AttemptUpdate, pb.SequenceUpdate)

SIGN_OF_LIFE_S = 0.5

_MAX_MESSAGE_BYTES = 2 * 1024 * 1024
"""After which no further update is added; well below what a connection takes."""


class Session:
    """Updates of one router, merged until they are sent.

    A router that reads slowly costs memory for its own tokens only, and those are bounded by its requests.
    """

    def __init__(self, router_id: str, identity: pb.NodeIdentity) -> None:
        self.router_id = router_id
        self._identity = identity
        self._attempts: dict[str, pb.AttemptUpdate] = {}
        self._sequences: dict[tuple[str, int], pb.SequenceUpdate] = {}
        self._ready = asyncio.Event()

    def attempt_update(self, attempt_id: str) -> pb.AttemptUpdate:
        """The pending update of an attempt, to be filled in."""
        return self._attempts.setdefault(attempt_id, pb.AttemptUpdate(attempt_id=attempt_id))

    def sequence_update(self, attempt_id: str, sequence_index: int) -> pb.SequenceUpdate:
        """The pending update of a sequence, to be added to."""
        key = (attempt_id, sequence_index)
        if key not in self._sequences:
            self._sequences[key] = pb.SequenceUpdate(attempt_id=attempt_id, sequence_index=sequence_index)
        return self._sequences[key]

    def flush(self) -> None:
        """What is pending may go."""
        if self._attempts or self._sequences:
            self._ready.set()

    async def next_message(self) -> pb.SessionUpdate:
        """The next message to send: what is pending, or after a while nothing, as a sign of life."""
        with contextlib.suppress(TimeoutError):  # An empty message is the sign of life.
            await asyncio.wait_for(self._ready.wait(), SIGN_OF_LIFE_S)
        self._ready.clear()
        attempts, room = _take(self._attempts, _MAX_MESSAGE_BYTES)
        sequences, _ = _take(self._sequences, room)
        self.flush()  # What did not fit goes with the next message.
        return pb.SessionUpdate(identity=self._identity, attempts=attempts, sequences=sequences)

    def hello(self) -> pb.SessionUpdate:
        """An empty message."""
        return pb.SessionUpdate(identity=self._identity)


def _take(pending: dict[KeyT, UpdateT], room: int) -> tuple[list[UpdateT], int]:
    """Remove the oldest updates while there is room in bytes for more; also the room that is left."""
    taken: list[UpdateT] = []
    while pending and room > 0:
        update = pending.pop(next(iter(pending)))
        room -= update.ByteSize()
        taken.append(update)
    return taken, room
