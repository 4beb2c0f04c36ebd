"""How much KV memory is allocated and unused while a trace is replayed, beside contiguous reservation to max length.

The decode scheduler and the block pool are the node's own; time is virtual, and a step takes what a cost model says.
Requests come as hand-offs: blocks for the prompt are promised when a request arrives and full when its transfer is
over, then one token is added per step.

    contiguous   each request reserves room for the longest sequence that is allowed, for as long as it decodes; what
                 it has not written yet is waste (Orca (Max) in the vLLM paper, https://arxiv.org/abs/2309.06180)
    paged        slots of allocated blocks that hold no token; blocks promised to a transfer that still runs are told
                 apart, since they fill within it
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.traces import TraceRow
from decode_node.scheduler import DecodeScheduler
from decode_node.sequence import DecodeSequence, Reservation
from engine.block_pool import BlockPool
from engine.ids import BlockHash
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams

PAGED_LIMIT = 0.04
"""The share that paging is said to stay under."""

_STEP_TOKENS = 2048
_ROOT = BlockHash(bytes(16))


@dataclass(frozen=True, slots=True)
class Replay:
    """A node and its cost model.

    Attributes:
        num_blocks: of the pool.
        block_size: tokens of a block.
        max_num_seqs: sequences at once.
        max_model_len: longest prompt plus output; longer requests are cut, and contiguous reservation is of this size.
        step_s: seconds of a decode step.
        step_sequence_s: seconds more for each sequence in it.
        prefill_token_s: seconds per prompt token until a hand-off has come over.
    """

    num_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 256
    max_model_len: int = 8192
    step_s: float = 0.02
    step_sequence_s: float = 0.0002
    prefill_token_s: float = 0.0001


@dataclass(frozen=True, slots=True)
class KvUse:
    """Slots at one step, in tokens.

    Attributes:
        weight_s: how long it stayed so.
        used: with K and V.
        allocated: of blocks that sequences hold.
        promised: of blocks that a transfer is filling.
        contiguous: that the same sequences would have reserved contiguously.
    """

    weight_s: float
    used: int
    allocated: int
    promised: int
    contiguous: int

    @property
    def paged(self) -> float:
        """Share of the allocated slots that hold no token."""
        return 1 - self.used / self.allocated


@dataclass(frozen=True, slots=True)
class KvWaste:
    """What a replay came to; shares between 0 and 1, means over memory and time.

    Attributes:
        requests: that were served.
        steps: decode steps.
        mean_sequences: decoding at once.
        paged_max: largest share at any step of allocated slots that hold no token.
        paged_mean: its mean.
        paged_over: share of the time in which it was more than PAGED_LIMIT.
        pool_max: the largest amount of such slots at any step, as a share of the pool.
        promised_mean: mean share of all slots in use that a transfer was filling.
        contiguous_min: smallest share at any step of what is reserved contiguously that holds no token.
        contiguous_mean: its mean.
        preemptions: times that a sequence lost its blocks.
    """

    requests: int
    steps: int
    mean_sequences: float
    paged_max: float
    paged_mean: float
    paged_over: float
    pool_max: float
    promised_mean: float
    contiguous_min: float
    contiguous_mean: float
    preemptions: int


def replay(rows: Sequence[TraceRow], settings: Replay) -> KvWaste:
    """Serve a trace to its end and look at every step."""
    node = VirtualNode(settings)
    return summarise(list(node.steps(rows)), settings, requests=len(rows), preemptions=node.preemptions)


def summarise(uses: Sequence[KvUse], settings: Replay, *, requests: int, preemptions: int) -> KvWaste:
    """What the steps of a replay come to. ValueError where there is none."""
    if not uses:
        raise ValueError("the trace has no decode step: every output is a single token")

    def total(amount: Callable[[KvUse], float]) -> float:
        return sum(amount(use) * use.weight_s for use in uses)

    used, allocated = total(lambda use: use.used), total(lambda use: use.allocated)
    seconds, contiguous = total(lambda use: 1.0), total(lambda use: use.contiguous)
    promised = total(lambda use: use.promised)
    return KvWaste(
        requests=requests,
        steps=len(uses),
        mean_sequences=contiguous / settings.max_model_len / seconds,
        paged_max=max(use.paged for use in uses),
        paged_mean=1 - used / allocated,
        paged_over=total(lambda use: use.paged > PAGED_LIMIT) / seconds,
        pool_max=max(use.allocated - use.used for use in uses) / (settings.num_blocks * settings.block_size),
        promised_mean=promised / (promised + allocated),
        contiguous_min=min(1 - use.used / use.contiguous for use in uses),
        contiguous_mean=1 - used / contiguous,
        preemptions=preemptions,
    )


class VirtualNode:
    """A decode node's scheduler and pool under a virtual clock."""

    def __init__(self, settings: Replay) -> None:
        self._settings = settings
        self._pool = BlockPool(settings.num_blocks)
        # Only the size of a block counts here.
        layout = KvLayout(num_layers=1, kv_heads=1, head_dim=8, block_size=settings.block_size, dtype="float32")
        self._scheduler = DecodeScheduler(
            self._pool, layout, max_num_batched_tokens=_STEP_TOKENS, max_num_seqs=settings.max_num_seqs
        )
        self._transfers: list[tuple[float, int, Reservation]] = []
        self._now_s = 0.0

    @property
    def preemptions(self) -> int:
        """Times that a sequence lost its blocks."""
        return self._scheduler.preemptions

    def steps(self, rows: Sequence[TraceRow]) -> Iterator[KvUse]:
        """One KvUse per decode step, until every request is done."""
        settings, scheduler = self._settings, self._scheduler
        arrivals = deque(enumerate(rows))
        while True:
            while arrivals and arrivals[0][1].at_s <= self._now_s:
                scheduler.ask(self._reservation(*arrivals.popleft()))
            for granted in scheduler.admit():
                ready_s = self._now_s + settings.prefill_token_s * len(granted.leader.prompt_token_ids)
                heapq.heappush(self._transfers, (ready_s, granted.leader.index, granted))
            while self._transfers and self._transfers[0][0] <= self._now_s:
                reservation = heapq.heappop(self._transfers)[2]
                scheduler.join(reservation)
                self._add_token(reservation.leader)  # the prefill node's
            decision = scheduler.decide()
            scheduler.take_preempted()  # They are computed again here.
            if decision is None:
                coming_s = [arrivals[0][1].at_s] if arrivals else []
                coming_s += [ready_s for ready_s, *_ in self._transfers[:1]]
                if not coming_s:
                    return
                self._now_s = min(coming_s)
                continue
            seconds = settings.step_s + settings.step_sequence_s * len(decision.slices)
            # Looked at between deciding and computing, when blocks just taken are still empty.
            yield self._use(seconds)
            self._now_s += seconds
            scheduler.commit(decision)
            for piece in decision.slices:
                if piece.is_last:
                    self._add_token(piece.sequence)

    def _reservation(self, number: int, row: TraceRow) -> Reservation:
        output = min(row.output_tokens, self._settings.max_model_len - 1)
        prompt_length = max(1, min(row.input_tokens, self._settings.max_model_len - output))
        # No two prompts share a block: what sharing saves is another claim.
        prompt = [number + 1] * prompt_length
        sequence = DecodeSequence(number, prompt, SamplingParams(max_tokens=output), _ROOT)
        return Reservation(sequence, blocks_held=0, count=-(-prompt_length // self._settings.block_size))

    def _add_token(self, sequence: DecodeSequence) -> None:
        sequence.output_token_ids.append(0)
        if len(sequence.output_token_ids) == sequence.sampling.max_tokens:
            self._scheduler.end(sequence)

    def _use(self, seconds: float) -> KvUse:
        block_size = self._settings.block_size
        promised = self._scheduler.num_reserved_blocks * block_size
        allocated = self._pool.counts.in_use * block_size - promised
        contiguous = self._scheduler.num_running * self._settings.max_model_len
        return KvUse(seconds, allocated - self._scheduler.unused_slots, allocated, promised, contiguous)
