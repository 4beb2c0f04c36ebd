"""Decides which tokens a decode step computes, and who gets blocks. Knows no tensors, no network and no clock.

Queues, in order of arrival, and what moves an entry on:

    waiting    sequences to compute here (preempted, or prefilled locally) and hand-offs that ask for blocks; the head
               moves when its blocks are free and a place is left. Nothing overtakes it, and nothing in it holds a
               block, so that two entries can never wait for each other
    reserved   hand-offs whose blocks are promised to a prefill node; `join` or `give_up` ends that
    running    sequences with blocks; each step computes one token of those that are up to date, and with what is left
               of the budget chunks of the others. When blocks run out the youngest goes back to waiting

    tokens of a sequence:  | K/V in the pool | to compute |
                           0           num_computed   num_tokens      (a difference of 1 is plain decoding)
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_hash import extend
from engine.block_pool import BlockPool, NoFreeBlocks
from engine.ids import BlockHash, BlockId
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams

_arrivals = itertools.count()


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One stream of tokens, described by counters.

    Attributes:
        index: its number in the request; decides the noise.
        prompt_token_ids: shared with its siblings.
        sampling: the request's.
        root_hash: root of its block hash chain.
        output_token_ids: what came out so far.
        arrival: place in line; kept when preempted.
        num_computed: tokens whose K/V lies in the pool.
        block_ids: blocks it holds a reference to.
        block_hashes: of its full blocks, as far as known.
        siblings: sequences that wait for this one to compute their common prompt.
        is_on_device: the step that runs now holds it.
        is_ended: no more of it is wanted; blocks go back once no step holds it.
        num_preemptions: how often it lost its blocks.
    """

    index: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    root_hash: BlockHash
    output_token_ids: list[int] = field(default_factory=list)
    arrival: int = field(default_factory=lambda: next(_arrivals))
    num_computed: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    siblings: list[DecodeSequence] = field(default_factory=list)
    is_on_device: bool = False
    is_ended: bool = False
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Tokens [start, end)."""
        prompt_length = len(self.prompt_token_ids)
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : end - prompt_length]
        if end <= prompt_length:
            return self.prompt_token_ids[start:end]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: end - prompt_length]]

    def full_block_hashes(self, block_size: int, num_blocks: int) -> list[BlockHash]:
        """Hashes of the first `num_blocks` blocks, all of which must be full."""
        while len(self.block_hashes) < num_blocks:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else self.root_hash
            self.block_hashes.append(extend(parent, self.tokens(start, start + block_size)))
        return self.block_hashes[:num_blocks]


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks that a hand-off asks for.

    Attributes:
        leader: the sequence whose prompt will arrive; its siblings count as places too.
        blocks_held: leading blocks that prefill was told not to send.
        count: blocks that will be sent.
        held_ids: set when granted, `blocks_held` of them.
        block_ids: set when granted, `count` of them.
        lost_prefix: the held blocks were evicted before the grant, so the hand-off must be opened anew.
    """

    leader: DecodeSequence
    blocks_held: int
    count: int
    held_ids: list[BlockId] = field(default_factory=list)
    block_ids: list[BlockId] = field(default_factory=list)
    lost_prefix: bool = False

    @property
    def arrival(self) -> int:
        """Place in line."""
        return self.leader.arrival

    @property
    def num_sequences(self) -> int:
        """Places it takes."""
        return 1 + len(self.leader.siblings)


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + length) of one sequence."""

    sequence: DecodeSequence
    start: int
    length: int

    is_last: bool
    """Whether the next token is sampled after this slice."""


@dataclass(frozen=True, slots=True)
class DecodeDecision:
    """What one step computes."""

    slices: tuple[Slice, ...]


class DecodeScheduler:
    """Continuous batching with preemption by recomputation.

    Args:
        pool: owner of the block ids.
        layout: for the size of a block.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: sequences with blocks or promised blocks at once.
    """

    def __init__(self, pool: BlockPool, layout: KvLayout, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._pool = pool
        self._layout = layout
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._waiting: list[DecodeSequence | Reservation] = []
        self._reserved: set[Reservation] = set()
        self._running: list[DecodeSequence] = []
        self.preemptions = 0

    # -- what the node asks ---------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences with blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Entries without blocks."""
        return len(self._waiting)

    @property
    def num_reserved(self) -> int:
        """Hand-offs with promised blocks."""
        return len(self._reserved)

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to be computed here."""
        waiting = sum(entry.num_tokens for entry in self._waiting if isinstance(entry, DecodeSequence))
        return waiting + sum(sequence.num_tokens - sequence.num_computed for sequence in self._running)

    def reusable_blocks(self, sequence: DecodeSequence) -> int:
        """Leading blocks of the sequence that lie in the prefix cache now; takes no reference."""
        hashes = sequence.full_block_hashes(self._layout.block_size, self._max_reusable(sequence))
        return self._pool.peek(hashes)

    # -- what the node tells --------------------------------------------------------------------------------

    def add(self, sequence: DecodeSequence) -> None:
        """Compute this sequence here, in its turn."""
        bisect.insort(self._waiting, sequence, key=lambda entry: entry.arrival)

    def ask(self, reservation: Reservation) -> None:
        """A hand-off wants blocks, in its turn; `admit` grants them."""
        bisect.insort(self._waiting, reservation, key=lambda entry: entry.arrival)

    def admit(self) -> list[Reservation]:
        """Move what can move from waiting; returns reservations that were granted or lost their prefix."""
        answered: list[Reservation] = []
        while self._waiting:
            entry = self._waiting[0]
            if isinstance(entry, Reservation):
                if not self._try_grant(entry):
                    break
                answered.append(entry)
            elif not self._try_start(entry):
                break
            self._waiting.pop(0)
        return answered

    def join(self, reservation: Reservation) -> list[tuple[BlockId, BlockId]]:
        """The hand-off committed: its sequences run from the next step on. Returns block copies to make at once."""
        self._reserved.remove(reservation)
        leader = reservation.leader
        leader.block_ids = [*reservation.held_ids, *reservation.block_ids]
        # Prefill sent K/V of everything but the token it sampled.
        leader.num_computed = leader.num_tokens - 1
        self._publish(leader, 0)
        bisect.insort(self._running, leader, key=lambda sequence: sequence.arrival)
        return self.fork(leader)

    def give_up(self, reservation: Reservation) -> None:
        """The hand-off ended without commit. Its own blocks are the caller's to quarantine and free."""
        if reservation in self._reserved:
            self._reserved.remove(reservation)
            self._pool.release(reservation.held_ids)
            reservation.held_ids = []
        elif reservation in self._waiting:
            self._waiting.remove(reservation)

    def fork(self, leader: DecodeSequence) -> list[tuple[BlockId, BlockId]]:
        """Give the siblings of a leader its prompt's blocks; returns (source, destination) pairs to copy at once.

        Full blocks are shared; the partly filled one is copied before anybody writes into it. A sibling for which no
        block is free computes its prompt again later, mostly from the prefix cache.
        """
        copies: list[tuple[BlockId, BlockId]] = []
        prompt_length = len(leader.prompt_token_ids)
        full_blocks, rest = divmod(prompt_length, self._layout.block_size)
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if sibling.is_ended:
                continue
            try:
                own = self._pool.allocate(1) if rest else []
            except NoFreeBlocks:
                self.add(sibling)
                continue
            if rest:
                copies.append((leader.block_ids[full_blocks], own[0]))
            shared = leader.block_ids[:full_blocks]
            self._pool.share(shared)
            sibling.block_ids = [*shared, *own]
            sibling.num_computed = prompt_length
            bisect.insort(self._running, sibling, key=lambda sequence: sequence.arrival)
        self._release_if_ended(leader)
        return copies

    def end(self, sequence: DecodeSequence) -> None:
        """Nobody wants more of it. Blocks go back now, or when the step that holds them returns."""
        if sequence.is_ended:
            return
        sequence.is_ended = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._hand_down(sequence)
        elif not sequence.is_on_device:
            self._release_if_ended(sequence)

    # -- steps ----------------------------------------------------------------------------------------------

    def decide(self) -> DecodeDecision | None:
        """Choose the slices of the next step. None: nothing to compute. Call `admit` before."""
        budget = self._max_num_batched_tokens
        slices: list[Slice] = []
        for sequence in list(self._running):
            if sequence.num_tokens - sequence.num_computed == 1 and budget > 0 and self._grow(sequence):
                slices.append(Slice(sequence, sequence.num_computed, 1, is_last=True))
                budget -= 1
        # Growing may have preempted a sequence that already had its slice.
        slices = [piece for piece in slices if piece.sequence.block_ids]
        for sequence in self._running:
            remaining = sequence.num_tokens - sequence.num_computed
            if remaining > 1 and budget > 0:
                length = min(remaining, budget)
                slices.append(Slice(sequence, sequence.num_computed, length, is_last=length == remaining))
                budget -= length
        if not slices:
            return None
        for piece in slices:
            piece.sequence.is_on_device = True
        return DecodeDecision(tuple(slices))

    def commit(self, decision: DecodeDecision) -> None:
        """The step is done: advance counters and make full blocks findable.

        Sampled tokens are the caller's to add, and leaders whose prompt is computed the caller's to `fork`.
        """
        for piece in decision.slices:
            sequence = piece.sequence
            sequence.is_on_device = False
            sequence.num_computed += piece.length
            self._publish(sequence, piece.start // self._layout.block_size)
            if not (piece.is_last and any(not sibling.is_ended for sibling in sequence.siblings)):
                self._release_if_ended(sequence)

    def abandon(self, decision: DecodeDecision) -> None:
        """The step failed: nothing of it counts."""
        for piece in decision.slices:
            piece.sequence.is_on_device = False
            self._release_if_ended(piece.sequence)

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not balance."""
        self._pool.check_invariants()
        for entry in self._waiting:
            assert not entry.block_ids, "a waiting entry holds blocks"
        for sequence in self._running:
            assert len(sequence.block_ids) >= self._layout.blocks_for(sequence.num_computed), "a sequence lost blocks"

    # -- inside ---------------------------------------------------------------------------------------------

    def _max_reusable(self, sequence: DecodeSequence) -> int:
        # A hit never covers the last token, whose logits are needed.
        if sequence.sampling.prompt_logprobs is not None and not sequence.output_token_ids:
            return 0
        return (sequence.num_tokens - 1) // self._layout.block_size

    def _places_taken(self) -> int:
        # Siblings that wait for their leader's prompt get places of their own when it is computed.
        running = sum(1 + len(sequence.siblings) for sequence in self._running)
        return running + sum(reservation.num_sequences for reservation in self._reserved)

    def _has_room(self, num_sequences: int, num_blocks: int) -> bool:
        taken = self._places_taken()
        if taken == 0:
            return num_blocks <= self._pool.num_allocatable
        # One block of growth is left for each sequence that has blocks, so that admission does not cause preemption.
        return taken + num_sequences <= self._max_num_seqs and num_blocks + taken <= self._pool.num_allocatable

    def _try_grant(self, reservation: Reservation) -> bool:
        leader = reservation.leader
        held = self._pool.match(leader.full_block_hashes(self._layout.block_size, reservation.blocks_held))
        if len(held) < reservation.blocks_held:
            self._pool.release(held)
            reservation.lost_prefix = True
            return True
        if not self._has_room(reservation.num_sequences, reservation.count):
            self._pool.release(held)
            return False
        reservation.held_ids = held
        reservation.block_ids = self._pool.allocate(reservation.count)
        self._reserved.add(reservation)
        return True

    def _try_start(self, sequence: DecodeSequence) -> bool:
        hashes = sequence.full_block_hashes(self._layout.block_size, self._max_reusable(sequence))
        held = self._pool.match(hashes)
        needed = self._layout.blocks_for(sequence.num_tokens) - len(held)
        if not self._has_room(1 + len(sequence.siblings), needed):
            self._pool.release(held)
            return False
        sequence.block_ids = [*held, *self._pool.allocate(needed)]
        sequence.num_computed = len(held) * self._layout.block_size
        bisect.insort(self._running, sequence, key=lambda entry: entry.arrival)
        return True

    def _grow(self, sequence: DecodeSequence) -> bool:
        """Make room for the next token, at the cost of the youngest; False when that was this one."""
        if not sequence.block_ids:
            return False
        while self._layout.blocks_for(sequence.num_tokens) > len(sequence.block_ids):
            try:
                sequence.block_ids += self._pool.allocate(1)
            except NoFreeBlocks:
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False
        return True

    def _preempt(self, sequence: DecodeSequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def _publish(self, sequence: DecodeSequence, first_block: int) -> None:
        full_blocks = sequence.num_computed // self._layout.block_size
        if full_blocks <= first_block:
            return
        hashes = sequence.full_block_hashes(self._layout.block_size, full_blocks)
        for index in range(first_block, full_blocks):
            self._pool.publish(sequence.block_ids[index], hashes[index])

    def _release_if_ended(self, sequence: DecodeSequence) -> None:
        if sequence.is_ended and sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)
            self._hand_down(sequence)

    def _release(self, sequence: DecodeSequence) -> None:
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []

    def _hand_down(self, leader: DecodeSequence) -> None:
        """A leader ended before its siblings got the prompt: the next sibling leads."""
        alive = [sibling for sibling in leader.siblings if not sibling.is_ended]
        leader.siblings = []
        if alive:
            alive[0].siblings = alive[1:]
            self.add(alive[0])
