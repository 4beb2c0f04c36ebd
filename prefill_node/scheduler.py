"""Decides which prompts a prefill step computes. Knows no tensors, no network and no clock.

Queues, and what moves a job on:

    waiting    moves when it is its turn (below), blocks for the whole prompt are free, its decode node has left few
               enough results ungranted, and no job is computing the next block of its prefix
    computing  gets chunks until every token is computed; what it will compute is claimed, so that nobody else does
    computed   keeps its blocks until its hand-off says `finish` (committed, failed or cancelled)

    blocks of a job:  | cached prefix (shared) | computed by this job | still to compute |
                      0                 cached_tokens            num_computed         num_tokens

Whose turn it is, with policy `priority`: the most urgent class that can be computed shares the step with the job that
came first, however urgent that is, as engine/prompt_shares.py says. So a job is computed after at most (its tokens and
those of the jobs before it) / quarter steps, plus one for each of these.

With policy `fcfs` jobs are computed in order of arrival, each step filled. Blocks: a job that finds too few free is
overtaken by later ones until they have started as many tokens as it has; then nobody starts before it.

A waiting job whose next block is claimed waits for it, and its claimant counts as urgent, as old and as short as the
most pressing of those who wait for it. When the claimant is stopped, they go on from the blocks that it has filled.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.block_pool import BlockPool, NoFreeBlocks
from engine.ids import AttemptId, BlockHash, BlockId
from engine.kv_layout import KvLayout
from engine.prompt_shares import share_out
from engine.sampling_params import SamplingParams

SchedulingPolicy = Literal["fcfs", "priority"]

_MAX_UNGRANTED_SHARE = 0.5
"""Of the pool, for results that one decode node has no room for yet."""

_arrivals = itertools.count()


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
        priority: lower is more urgent.
        arrival: place in line.
        num_computed: tokens whose K/V lies in the pool.
        cached_tokens: how many of those came from the prefix cache.
        known_blocks: leading blocks that were in the prefix cache when last looked at, before it started.
        overtaken_tokens: tokens of jobs that started while this one found too few free blocks.
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
    priority: int = 0
    arrival: int = field(default_factory=lambda: next(_arrivals))
    num_computed: int = 0
    cached_tokens: int = 0
    known_blocks: int = 0
    overtaken_tokens: int = 0
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
    def is_started(self) -> bool:
        """Whether it has its blocks."""
        return bool(self.block_ids)

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


class _Rank(NamedTuple):
    """How pressing a job is."""

    priority: int
    arrival: int
    work: int

    def least(self, other: _Rank) -> _Rank:
        """The rank of a job for which another one waits."""
        return _Rank(*map(min, self, other))


@dataclass(slots=True)
class _Round:
    """Books of one decision.

    Attributes:
        ungranted: by decode node, jobs that it has not granted yet.
        ungranted_blocks: by decode node, the blocks of these; what they share counts once.
        started: jobs that began.
        blocked: jobs that found too few free blocks.
    """

    ungranted: Counter[tuple[str, int]] = field(default_factory=Counter)
    ungranted_blocks: defaultdict[tuple[str, int], set[BlockId]] = field(default_factory=lambda: defaultdict(set))
    started: list[PrefillJob] = field(default_factory=list)
    blocked: list[PrefillJob] = field(default_factory=list)

    def note_ungranted(self, job: PrefillJob) -> None:
        """A started job for which its decode node has no blocks yet."""
        self.ungranted[job.peer] += 1
        self.ungranted_blocks[job.peer].update(job.block_ids)


class PrefillScheduler:
    """Shares steps out among prompts.

    Args:
        pool: owner of the block ids.
        layout: for the size of a block.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: chunks in a step.
        max_ungranted: started jobs of one decode node without its grant, at which no more of its jobs are started.
        policy: whose turn it is.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KvLayout,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_ungranted: int,
        policy: SchedulingPolicy = "priority",
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_ungranted = max_ungranted
        self._policy = policy
        self._waiting: list[PrefillJob] = []
        self._computing: list[PrefillJob] = []
        self._computed: set[PrefillJob] = set()
        self._claims: dict[BlockHash, PrefillJob] = {}

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
        """Tokens that are still to be computed for everything accepted, as far as known."""
        return sum(self._work(job) for job in (*self._waiting, *self._computing))

    @property
    def num_leases(self) -> int:
        """Jobs whose blocks are pinned."""
        return len(self._computing) + len(self._computed)

    def add(self, job: PrefillJob) -> None:
        """Queue a job. The caller has checked that its blocks fit an empty pool."""
        self._waiting.append(job)

    def decide(self) -> PrefillDecision | None:
        """Choose the chunks of the next step; reserves blocks for the jobs it starts. None: nothing to compute."""
        round_ = _Round()
        for job in (*self._computing, *self._computed):
            if job.is_ungranted:
                round_.note_ungranted(job)
        ranks = self._ranks(round_)
        by_age = sorted(ranks, key=lambda job: ranks[job].arrival)
        oldest = next((job for job in by_age if self._begin(job, round_)), None)
        if oldest is None:
            return None
        for urgency in sorted({rank.priority for rank in ranks.values()}):
            of_class = {job: ranks[job] for job in by_age if ranks[job].priority == urgency}
            chunks = self._share_out(of_class, oldest, round_)
            if chunks:
                for chunk in chunks:
                    chunk.job.is_running = True
                return PrefillDecision(tuple(chunks), tuple(round_.started))
        return None

    def commit(self, decision: PrefillDecision) -> None:
        """The step is done: advance counters, make full blocks findable, let go of what ended meanwhile."""
        for chunk in decision.chunks:
            job = chunk.job
            job.is_running = False
            job.num_computed += chunk.length
            full_blocks = job.num_computed // self._layout.block_size
            for index in range(chunk.start // self._layout.block_size, full_blocks):
                # Nothing reads a block that is full only now: it is sent after this.
                job.block_ids[index] = self._pool.publish_or_adopt(job.block_ids[index], job.block_hashes[index])
                self._unclaim(job, job.block_hashes[index])
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
        for block_hash in job.block_hashes:
            self._unclaim(job, block_hash)
        if job in self._waiting:
            self._waiting.remove(job)

    def finish(self, job: PrefillJob) -> None:
        """The hand-off is over, however it ended. Blocks go back now, or when the step that holds them returns."""
        if job.is_finished:
            return
        self.stop(job)
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
        for block_hash, job in self._claims.items():
            assert job in self._computing and not job.is_unwanted, "a claim of a job that computes nothing"
            index = job.block_hashes.index(block_hash)
            assert index >= job.num_computed // self._layout.block_size, "a claim of a block that is computed"

    # -- whose turn it is -----------------------------------------------------------------------------------

    def _ranks(self, round_: _Round) -> dict[PrefillJob, _Rank]:
        """Every job that could be in the next step, and how pressing it is."""
        ranks = {job: self._rank(job) for job in self._computing if not job.is_unwanted}
        for job in self._waiting:
            claimant = self._claimant(job)
            if not self._may_start(job, round_):
                continue
            ranks[claimant or job] = self._rank(job) if claimant is None else ranks[claimant].least(self._rank(job))
        return ranks

    def _rank(self, job: PrefillJob) -> _Rank:
        return _Rank(0 if self._policy == "fcfs" else job.priority, job.arrival, self._work(job))

    def _work(self, job: PrefillJob) -> int:
        """Tokens still to compute; before the start, what lies in the prefix cache counts as computed."""
        return job.num_tokens - (job.num_computed or job.known_blocks * self._layout.block_size)

    def _share_out(self, ranks: dict[PrefillJob, _Rank], oldest: PrefillJob, round_: _Round) -> list[Chunk]:
        """Chunks for jobs of one class, given by age, and for the oldest of all.

        Starts those it chooses; none when nothing of the class can be computed.
        """
        is_fcfs = self._policy == "fcfs"
        lengths = share_out(
            list(ranks) if is_fcfs else sorted(ranks, key=lambda job: ranks[job].work),
            oldest,
            budget=self._max_num_batched_tokens,
            places=self._max_num_seqs,
            work=self._work,
            # It may have more work after it has begun: some of its prefix may have been evicted.
            begin=lambda job: self._begin(job, round_),
            in_order=is_fcfs,
        )
        return [Chunk(job, job.num_computed, length) for job, length in lengths.items()]

    # -- who may begin --------------------------------------------------------------------------------------

    def _may_start(self, job: PrefillJob, round_: _Round) -> bool:
        """Whether its decode node has not too much waiting here already; others are not held up by one that is full."""
        count = round_.ungranted[job.peer]
        blocks = len(round_.ungranted_blocks[job.peer]) + self._layout.blocks_for(job.num_tokens) - job.known_blocks
        return not count or (count < self._max_ungranted and blocks <= self._pool.counts.total * _MAX_UNGRANTED_SHARE)

    def _claimant(self, job: PrefillJob) -> PrefillJob | None:
        """Who computes the next block of a waiting job's prefix now; looks how far the prefix cache has got."""
        reusable = self._reusable_blocks(job)
        hashes = job.block_hashes
        while job.known_blocks < reusable and self._pool.peek(hashes[job.known_blocks : job.known_blocks + 1]):
            job.known_blocks += 1
        return self._claims.get(hashes[job.known_blocks]) if job.known_blocks < reusable else None

    def _begin(self, job: PrefillJob, round_: _Round) -> bool:
        """Whether it has its blocks, now or already."""
        if job.is_started:
            return True
        if job in round_.blocked or not self._may_start(job, round_):
            return False
        if any(other.overtaken_tokens >= other.num_tokens for other in round_.blocked):
            return False
        reusable = self._reusable_blocks(job)
        cached = self._pool.match(job.block_hashes[:reusable])
        job.known_blocks = len(cached)
        if len(cached) < reusable and job.block_hashes[len(cached)] in self._claims:
            self._pool.release(cached)
            return False
        try:
            fresh = self._pool.allocate(self._layout.blocks_for(job.num_tokens) - len(cached))
        except NoFreeBlocks:
            self._pool.release(cached)
            round_.blocked.append(job)
            return False
        job.block_ids = [*cached, *fresh]
        job.num_computed = job.cached_tokens = len(cached) * self._layout.block_size
        self._waiting.remove(job)
        self._computing.append(job)
        for block_hash in job.block_hashes[len(cached) :]:
            self._claims.setdefault(block_hash, job)
        for other in round_.blocked:
            other.overtaken_tokens += job.num_tokens
        if job.is_ungranted:
            round_.note_ungranted(job)
        round_.started.append(job)
        return True

    def _reusable_blocks(self, job: PrefillJob) -> int:
        # A hit never covers the last token, whose logits are needed; prompt log probabilities need every token's.
        return (job.num_tokens - 1) // self._layout.block_size if job.sampling.prompt_logprobs is None else 0

    def _unclaim(self, job: PrefillJob, block_hash: BlockHash) -> None:
        if self._claims.get(block_hash) is job:
            del self._claims[block_hash]

    def _drop(self, job: PrefillJob) -> None:
        if job in self._computed:
            self._computed.remove(job)
        elif job in self._computing:
            self._computing.remove(job)
        elif job in self._waiting:
            self._waiting.remove(job)
        self._pool.release(job.block_ids)
        job.block_ids = []
