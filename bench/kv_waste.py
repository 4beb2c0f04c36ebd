"""How much KV memory is allocated and unused while a trace is replayed, beside contiguous reservation to max length.

The decode scheduler and the block pool are the node's own; time is virtual, and a step takes what a cost model says.
Requests come as hand-offs: blocks for the prompt are promised when a prefill node starts with it and fill while it is
computed, then one token is added per step. There are as many prefill nodes as are wanted, all of one rate; the slower
they are, the longer promised blocks stay empty.

    contiguous   each request reserves room for the longest sequence that is allowed, for as long as it decodes; what
                 it has not written yet is waste (Orca (Max) in the vLLM paper, https://arxiv.org/abs/2309.06180)
    paged        slots of blocks of decoding sequences that hold no token; blocks promised to a transfer that still runs
                 are told apart, since they fill within it
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

GPU_PREFILL_TOKENS_PER_S = 10_000.0
"""About what one GPU computes of a prompt for a model of some billion weights."""

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
        prefill_tokens_per_s: of one hand-off, from its grant until it has come over.
    """

    num_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 256
    max_model_len: int = 8192
    step_s: float = 0.02
    step_sequence_s: float = 0.0002
    prefill_tokens_per_s: float = GPU_PREFILL_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class KvUse:
    """Slots at one step, in tokens.

    Attributes:
        weight_s: how long it stayed so.
        used: with K and V.
        allocated: of blocks that sequences hold.
        promised: of blocks that a transfer is filling.
        coming: of these, slots without a token yet.
        contiguous: that the same sequences would have reserved contiguously.
    """

    weight_s: float
    used: int
    allocated: int
    promised: int
    coming: int
    contiguous: int

    @property
    def paged(self) -> float:
        """Share of the allocated slots that hold no token."""
        return 1 - self.used / self.allocated

    @property
    def empty(self) -> int:
        """Slots without a token, allocated or promised."""
        return self.allocated - self.used + self.coming


@dataclass(frozen=True, slots=True)
class KvWaste:
    """What a replay came to; shares between 0 and 1, means over memory and time.

    Attributes:
        requests: that were served.
        steps: decode steps.
        mean_sequences: decoding at once.
        paged_max: largest share at any step of allocated slots that hold no token.
        paged_mean: its mean.
        paged_over: share of the steps at which it was more than PAGED_LIMIT.
        over_sequences: the most sequences that decoded at such a step.
        over_pool: the largest share of the pool that was allocated at such a step.
        pool_max: the largest amount of allocated slots that hold no token at any step, as a share of the pool.
        promised_mean: mean share of all slots in use, allocated or promised, that a transfer was filling.
        empty_mean: mean share of all slots in use that held no token.
        empty_pool_max: the largest amount of these at any step, as a share of the pool.
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
    over_sequences: int
    over_pool: float
    pool_max: float
    promised_mean: float
    empty_mean: float
    empty_pool_max: float
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
    in_use = total(lambda use: use.allocated + use.promised)
    pool = settings.num_blocks * settings.block_size
    over = [use for use in uses if use.paged > PAGED_LIMIT]
    return KvWaste(
        requests=requests,
        steps=len(uses),
        mean_sequences=contiguous / settings.max_model_len / seconds,
        paged_max=max(use.paged for use in uses),
        paged_mean=1 - used / allocated,
        paged_over=len(over) / len(uses),
        over_sequences=max((use.contiguous // settings.max_model_len for use in over), default=0),
        over_pool=max((use.allocated for use in over), default=0) / pool,
        pool_max=max(use.allocated - use.used for use in uses) / pool,
        promised_mean=total(lambda use: use.promised) / in_use,
        empty_mean=total(lambda use: use.empty) / in_use,
        empty_pool_max=max(use.empty for use in uses) / pool,
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
                ready_s = self._now_s + len(granted.leader.prompt_token_ids) / settings.prefill_tokens_per_s
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
        # A prompt's tokens arrive at the rate at which they are computed.
        to_compute = sum(ready_s - self._now_s for ready_s, *_ in self._transfers) * self._settings.prefill_tokens_per_s
        tokens = sum(len(reservation.leader.prompt_token_ids) for *_, reservation in self._transfers)
        coming = promised - tokens + round(to_compute)
        contiguous = self._scheduler.num_running * self._settings.max_model_len
        return KvUse(seconds, allocated - self._scheduler.unused_slots, allocated, promised, coming, contiguous)
