"""Decides which prompts a prefill step computes. Knows no tensors, no network and no clock.

Queues, in order, and what moves a job on:

    waiting    in arrival order; moves when blocks for the whole prompt are free, its decode node has left few enough
               results ungranted and a step has tokens left in its budget
    computing  gets a chunk per step, oldest first, until every token is computed
    computed   keeps its blocks until its hand-off says `finish` (committed, failed or cancelled)

    blocks of a job:  | cached prefix (shared) | computed by this job | still to compute |
                      0                 cached_tokens            num_computed         num_tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_pool import BlockPool, NoFreeBlocks
from engine.ids import AttemptId, BlockHash, BlockId
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams

_MAX_UNGRANTED_SHARE = 0.5
"""Of the pool, for results that one decode node has no room for yet."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt to compute, described by counters.

    Attributes:
        attempt_id: of the hand-off.
        token_ids: prompt, and for a moved sequence its output so far.
        prompt_length: how many of them are the client's prompt.
        sampling: how to choose the first token.
        sequence_indices: for which sequences.
        block_hashes: of every full block.
        peer: the decode node that asked, by id and epoch.
        num_computed: tokens whose K/V lies in the pool.
        cached_tokens: how many of those came from the prefix cache.
        block_ids: empty until started.
        is_running: a step that holds it is on the device.
        is_finished: the hand-off is over; blocks go back once no step holds it.
        is_unwanted: its hand-off has ended; it keeps its blocks until `finish`, and no step takes it up again.
        is_ungranted: decode has not reserved blocks for it yet.
    """

    attempt_id: AttemptId
    token_ids: Sequence[int]
    prompt_length: int
    sampling: SamplingParams
    sequence_indices: tuple[int, ...]
    block_hashes: list[BlockHash]
    peer: tuple[str, int] = ("", 0)
    num_computed: int = 0
    cached_tokens: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    is_running: bool = False
    is_finished: bool = False
    is_unwanted: bool = False
    is_ungranted: bool = True

    @property
    def num_tokens(self) -> int:
        """All tokens to compute."""
        return len(self.token_ids)

    @property
    def is_computed(self) -> bool:
        """Whether every token's K/V lies in the pool."""
        return self.num_computed == self.num_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one job."""

    job: PrefillJob
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the job is computed after this chunk."""
        return self.start + self.length == self.job.num_tokens


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """What one step computes, and which jobs begin with it."""

    chunks: tuple[Chunk, ...]
    started: tuple[PrefillJob, ...]


class PrefillScheduler:
    """First come, first served, in chunks, batched over jobs.

    Args:
        pool: owner of the block ids.
        layout: for the size of a block.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: chunks in a step.
        max_ungranted: started jobs of one decode node without its grant, at which no more of its jobs are started.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KvLayout,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_ungranted: int,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_ungranted = max_ungranted
        self._waiting: deque[PrefillJob] = deque()
        self._computing: list[PrefillJob] = []
        self._computed: set[PrefillJob] = set()

    @property
    def num_waiting(self) -> int:
        """Jobs that have not started."""
        return len(self._waiting)

    @property
    def num_computing(self) -> int:
        """Jobs with tokens left to compute."""
        return len(self._computing)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that are still to be computed for everything accepted."""
        return sum(job.num_tokens - job.num_computed for job in (*self._waiting, *self._computing))

    @property
    def num_leases(self) -> int:
        """Jobs whose blocks are pinned."""
        return len(self._computing) + len(self._computed)

    def add(self, job: PrefillJob) -> None:
        """Queue a job. The caller has checked that its blocks fit an empty pool."""
        self._waiting.append(job)

    def decide(self) -> PrefillDecision | None:
        """Choose the chunks of the next step; reserves blocks for the jobs it starts. None: nothing to compute."""
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        started: list[PrefillJob] = []
        for job in self._computing:
            if budget == 0 or len(chunks) == self._max_num_seqs:
                break
            if job.is_unwanted:
                continue
            chunks.append(self._chunk(job, budget))
            budget -= chunks[-1].length
        for job in list(self._waiting):
            if budget == 0 or len(chunks) == self._max_num_seqs:
                break
            if not self._may_start(job):
                continue
            if not self._start(job):
                break
            self._waiting.remove(job)
            started.append(job)
            chunks.append(self._chunk(job, budget))
            budget -= chunks[-1].length
        if not chunks:
            return None
        for chunk in chunks:
            chunk.job.is_running = True
        return PrefillDecision(tuple(chunks), tuple(started))

    def commit(self, decision: PrefillDecision) -> None:
        """The step is done: advance counters, make full blocks findable, let go of what ended meanwhile."""
        for chunk in decision.chunks:
            job = chunk.job
            job.is_running = False
            job.num_computed += chunk.length
            full_blocks = job.num_computed // self._layout.block_size
            for index in range(chunk.start // self._layout.block_size, full_blocks):
                self._pool.publish(job.block_ids[index], job.block_hashes[index])
            if job.is_finished:
                self._drop(job)
            elif job.is_computed:
                self._computing.remove(job)
                self._computed.add(job)

    def abandon(self, decision: PrefillDecision) -> None:
        """The step failed: nothing of it counts."""
        for chunk in decision.chunks:
            chunk.job.is_running = False
            if chunk.job.is_finished:
                self._drop(chunk.job)

    def stop(self, job: PrefillJob) -> None:
        """The hand-off has ended: compute no more of it, so that no other job meets it in a step. `finish` follows."""
        job.is_unwanted = True
        if job in self._waiting:
            self._waiting.remove(job)

    def finish(self, job: PrefillJob) -> None:
        """The hand-off is over, however it ended. Blocks go back now, or when the step that holds them returns."""
        if job.is_finished:
            return
        job.is_finished = True
        if not job.is_running:
            self._drop(job)

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not balance."""
        self._pool.check_invariants()
        for job in self._waiting:
            assert not job.block_ids, "a waiting job holds blocks"
        for job in (*self._computing, *self._computed):
            assert len(job.block_ids) == self._layout.blocks_for(job.num_tokens), "a job lost blocks"

    def _may_start(self, job: PrefillJob) -> bool:
        """Whether its decode node has not too much waiting here already; others are not held up by one that is full."""
        ungranted = [
            other for other in (*self._computing, *self._computed) if other.is_ungranted and other.peer == job.peer
        ]
        blocks = sum(len(other.block_ids) for other in ungranted) + self._layout.blocks_for(job.num_tokens)
        return not ungranted or (
            len(ungranted) < self._max_ungranted and blocks <= self._pool.counts.total * _MAX_UNGRANTED_SHARE
        )

    def _start(self, job: PrefillJob) -> bool:
        # A hit never covers the last token, whose logits are needed; prompt log probabilities need every token's.
        reusable = (job.num_tokens - 1) // self._layout.block_size if job.sampling.prompt_logprobs is None else 0
        cached = self._pool.match(job.block_hashes[:reusable])
        try:
            fresh = self._pool.allocate(self._layout.blocks_for(job.num_tokens) - len(cached))
        except NoFreeBlocks:
            self._pool.release(cached)
            return False
        job.block_ids = [*cached, *fresh]
        job.num_computed = job.cached_tokens = len(cached) * self._layout.block_size
        self._computing.append(job)
        return True

    def _chunk(self, job: PrefillJob, budget: int) -> Chunk:
        return Chunk(job, job.num_computed, min(budget, job.num_tokens - job.num_computed))

    def _drop(self, job: PrefillJob) -> None:
        if job in self._computed:
            self._computed.remove(job)
        elif job in self._computing:
            self._computing.remove(job)
        elif job in self._waiting:
            self._waiting.remove(job)
        self._pool.release(job.block_ids)
        job.block_ids = []
