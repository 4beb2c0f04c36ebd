"""One attempt of a router on this node: its sequences, and what its router must be told. Knows no scheduling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from decode_node.beam_group import BeamGroup
from decode_node.sequence import DecodeSequence
from engine.errors import PdserveError
from engine.ids import AttemptId
from engine.sequence import finish_reason
from engine.tokens import FinishReason, PositionLogprobs, SampledToken
from kv_transfer.wire import error_to_wire, finish_reason_to_wire, logprobs_to_wire
from proto import worker_pb2 as pb


class UpdateSink(Protocol):
    """Collects what goes up to one router with its next message."""

    def attempt_update(self, attempt_id: str) -> pb.AttemptUpdate: ...
    def sequence_update(self, attempt_id: str, sequence_index: int) -> pb.SequenceUpdate: ...


class Attempt:
    """Books of one attempt; every sequence ends in exactly one update with a finish reason.

    Args:
        message: what the router asked for, already checked.
        sequences: in the order of the message; of a beam search its beams, in any order.
        sink: the router's session.
        beams: the search, if it is one.
    """

    def __init__(
        self,
        message: pb.StartAttempt,
        sequences: Sequence[DecodeSequence],
        sink: UpdateSink,
        beams: BeamGroup | None = None,
    ) -> None:
        self.attempt_id = AttemptId(message.attempt_id)
        self.request_id = message.request_id
        self.sequences = tuple(sequences)
        self.beams = beams
        self._wanted_ranks = {start.index for start in message.sequences}
        self.prefill_targets = list(message.prefill_nodes)
        self.tenant_salt = message.tenant_salt
        self.local_prefill_threshold = message.local_prefill_threshold
        self.priority = message.priority
        self.created_s = time.monotonic()
        self.deadline_s = self.created_s + message.deadline_ms / 1000
        self.sink = sink
        self._first_token_s: float | None = None
        self._committed_s: float | None = None
        self._has_decoded = False
        self._has_prefill = False
        self._has_cached_tokens = False
        self._prefill_started_s: float | None = None
        self._prompt_positions_reported = 0
        self._is_fresh = not any(sequence.output_token_ids for sequence in sequences)

    @property
    def leader(self) -> DecodeSequence:
        """The first sequence that is still wanted, or the first one."""
        return next((sequence for sequence in self.sequences if not sequence.is_ended), self.sequences[0])

    @property
    def is_over(self) -> bool:
        """Whether no sequence is wanted any more."""
        return all(sequence.is_ended for sequence in self.sequences)

    @property
    def unended(self) -> list[int]:
        """Indices of the sequences, or ranks of the hypotheses, whose end is still to be told."""
        if self.beams is not None:
            return sorted(self._wanted_ranks)
        return [sequence.index for sequence in self.sequences if not sequence.is_ended]

    @property
    def has_first_tokens(self) -> bool:
        """Whether a token was made in this attempt."""
        return self._first_token_s is not None

    def report_cached_tokens(self, count: int) -> bool:
        """Prompt tokens that a prefix cache had. Only the first report counts (True); later ones are recomputation."""
        if self._has_cached_tokens:
            return False
        self._has_cached_tokens = True
        self.sink.attempt_update(self.attempt_id).cached_tokens = min(count, len(self.sequences[0].prompt_token_ids))
        return True

    def note_local_prefill(self, started_s: float) -> None:
        """A step of this node computed part of the prompt; the first one ended the wait."""
        if self._prefill_started_s is None:
            self._prefill_started_s = started_s

    def report_prefill(self, *, queue_s: float, prefill_s: float, node_id: str) -> None:
        """Who computed the prompt, and how long that took; what computes it again is not told."""
        if self._has_prefill:
            return
        self._has_prefill = True
        update = self.sink.attempt_update(self.attempt_id)
        update.prefill_node_id = node_id
        update.times.queue_s = queue_s
        update.times.prefill_s = prefill_s

    def report_prompt_logprobs(self, first: int, positions: Sequence[PositionLogprobs]) -> None:
        """Log probabilities of prompt tokens from `first` on; what a retry computes again is not told again."""
        fresh = positions[max(0, self._prompt_positions_reported - first) :]
        if fresh and self._is_fresh:
            update = self.sink.attempt_update(self.attempt_id)
            update.prompt_logprobs.extend(logprobs_to_wire(position) for position in fresh)
            self._prompt_positions_reported += len(fresh)

    def report_committed(self) -> None:
        """The hand-off is done; decoding begins, or goes on after a preemption."""
        if self._committed_s is not None:
            return
        self._committed_s = time.monotonic()
        if self._first_token_s is not None:
            self.sink.attempt_update(self.attempt_id).times.transfer_s = self._committed_s - self._first_token_s

    def add_token(
        self, sequence: DecodeSequence, token: SampledToken, max_model_len: int
    ) -> tuple[FinishReason, int | None] | None:
        """A sequence has its next token. Returns why it ended, when it did; ending it is the caller's to do."""
        self.note_token()
        sequence.output_token_ids.append(token.token_id)
        update = self.sink.sequence_update(self.attempt_id, sequence.index)
        update.token_ids.append(token.token_id)
        if token.logprobs:
            update.logprobs.append(logprobs_to_wire(token.logprobs))
        ended = finish_reason(
            sequence.sampling, len(sequence.prompt_token_ids), sequence.output_token_ids, max_model_len
        )
        if ended is not None:
            reason, stop_token_id = ended
            update.finish_reason = finish_reason_to_wire(reason)
            if stop_token_id is not None:
                update.stop_token_id = stop_token_id
        return ended

    def note_token(self) -> None:
        """A token was made: phases end with the first one, and with the first that this node decodes."""
        now = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now
            if self._prefill_started_s is not None:
                self.report_prefill(
                    queue_s=self._prefill_started_s - self.created_s,
                    prefill_s=now - self._prefill_started_s,
                    node_id="",
                )
                self._committed_s = now
        elif self._committed_s is not None and not self._has_decoded:
            self._has_decoded = True
            self.sink.attempt_update(self.attempt_id).times.first_decode_s = now - self._committed_s

    def report_hypotheses(self) -> int:
        """The search is over: every rank that is wanted gets all of its tokens. Returns how many tokens those are."""
        assert self.beams is not None and self.beams.hypotheses is not None
        count = 0
        for rank in sorted(self._wanted_ranks):
            hypothesis = self.beams.hypotheses[rank]
            count += len(hypothesis.token_ids)
            update = self.sink.sequence_update(self.attempt_id, rank)
            update.token_ids.extend(hypothesis.token_ids)
            update.logprobs.extend(logprobs_to_wire(position) for position in hypothesis.logprobs)
            update.finish_reason = finish_reason_to_wire(hypothesis.finish_reason)
            if hypothesis.stop_token_id is not None:
                update.stop_token_id = hypothesis.stop_token_id
        return count

    def report_error(self, index: int, error: BaseException) -> None:
        """A sequence cannot go on here."""
        update = self.sink.sequence_update(self.attempt_id, index)
        update.finish_reason = pb.FINISH_REASON_ERROR
        update.error.CopyFrom(error_to_wire(error))

    def report_cancelled(self, index: int) -> None:
        """A sequence was ended by its router."""
        self._wanted_ranks.discard(index)
        self.sink.sequence_update(self.attempt_id, index).finish_reason = pb.FINISH_REASON_CANCELLED


def refuse(sink: UpdateSink, message: pb.StartAttempt, error: PdserveError) -> None:
    """Tell the router that an attempt never began."""
    for start in message.sequences or [pb.SequenceStart(index=0)]:
        update = sink.sequence_update(message.attempt_id, start.index)
        update.finish_reason = pb.FINISH_REASON_ERROR
        update.error.CopyFrom(error_to_wire(error))
