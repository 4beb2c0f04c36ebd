"""Decides which tokens a decode step computes, and who gets blocks. Knows no tensors, no network and no clock.

Queues, in order of place in line, and what moves an entry on:

    waiting    sequences to compute here (preempted, or prefilled locally) and hand-offs that ask for blocks; the head
               moves when a place is left and what it will need fits beside what the running ones will need (growth.py).
               Nothing overtakes it, and nothing in it holds a block, so that two entries can never wait for each other
               (but for those still to be saved, which every step goes on with)
    reserved   hand-offs whose blocks are promised to a prefill node; `join` or `give_up` ends that
    running    each step computes one token of those that are up to date, and chunks of the others: with what is left of
               the budget, and not so much that the first ones wait too long. When blocks run out the last in line goes
               back to waiting, its K/V copied to host memory where that is the quicker way back (costs.py)

Of prompts the most urgent share a step with the first in line, as engine/prompt_shares.py says. One whose next block
another one before it has still to compute waits for that block, and takes it over.

Where the last in line could only make way for hand-offs behind it, it keeps its blocks and sits steps out until these
end: what is promised to another process is not taken back, but what has joined stands behind it like any other.

Copies are a part of steps, made before the step computes, and as bounded as prompts in it are: a few blocks of a
preempted sequence go out per step, from its end, and come back as if they were computed. A block that is saved counts
as free at once, since only the same step can write into it, later; for that `admit`, which may promise blocks to other
processes, does nothing until a step that copies is over.

Place in line is fixed for life, and later arrivals stand further back, so everybody is first one day: the first is
always admitted once the others have drained, and never preempted. That is why nobody starves.

    tokens of a sequence:  | K/V in the pool | to compute |
                           0           num_computed   num_tokens      (a difference of 1 is plain decoding)

Beams of a search have nothing to compute while one of them waits; they make way for it, see `_is_waited_for`.

Blocks are taken as tokens are computed. A partly filled block may be shared (`branch`); who is about to write into it
copies it first, unless nobody else is left.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.costs import Costs
from decode_node.growth import Demand, OutputLengths, peak_growth
from decode_node.host_copies import HostCopies, RestoreBlocks, SaveBlocks
from decode_node.sequence import DecodeSequence, Reservation
from engine.block_pool import BlockPool
from engine.ids import BlockHash, BlockId
from engine.kv_layout import KvLayout
from engine.prompt_shares import share_out


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + length) of one sequence."""

    sequence: DecodeSequence
    start: int
    length: int

    is_last: bool
    """Whether the next token is sampled after this slice."""


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy a block within the pool."""

    source: BlockId
    destination: BlockId


BlockMove = CopyBlock | SaveBlocks | RestoreBlocks


@dataclass(frozen=True, slots=True)
class DecodeDecision:
    """What one step does: first the moves, in order, then all slices at once; one of the two may be empty."""

    slices: tuple[Slice, ...]
    moves: tuple[BlockMove, ...] = ()

    @property
    def sequences(self) -> list[DecodeSequence]:
        """Those that the step holds: they keep their blocks until it is over."""
        restored = [move.sequence for move in self.moves if isinstance(move, RestoreBlocks)]
        return [*(piece.sequence for piece in self.slices), *restored]


class DecodeScheduler:
    """Continuous batching with growth-aware admission and preemption.

    Args:
        pool: owner of the block ids.
        layout: for the size of a block.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: sequences with blocks or promised blocks at once.
        itl_bound_s: seconds that a step with decoding sequences in it may take, as far as prompts and copies can help
            it; None does not care.
        swap_bytes: host memory for the K/V of preempted sequences.
        costs: what steps and copies take; the caller records it there.
        shortest_first: of the most urgent prompts the one with the least left goes first; else the first in line.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KvLayout,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        itl_bound_s: float | None = None,
        swap_bytes: int = 0,
        costs: Costs | None = None,
        shortest_first: bool = True,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._itl_bound_s = itl_bound_s
        self._is_shortest_first = shortest_first
        self._waiting: list[DecodeSequence | Reservation] = []
        self._reserved: set[Reservation] = set()
        self._running: list[DecodeSequence] = []
        self._moves: list[BlockMove] = []
        self._is_moving = False
        self._preempted: list[DecodeSequence] = []
        self._refused: tuple[DecodeSequence | Reservation | None, int, int] = None, 0, 0
        self.costs = costs or Costs()
        self.host_copies = HostCopies(pool, layout, swap_bytes)
        self.lengths = OutputLengths()
        self.preemptions = 0

    # -- what the node asks ---------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences in steps."""
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
    def num_reserved_blocks(self) -> int:
        """Blocks promised to them."""
        return sum(len(reservation.block_ids) for reservation in self._reserved)

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to be computed here."""
        waiting = sum(entry.num_uncomputed for entry in self._waiting if isinstance(entry, DecodeSequence))
        return waiting + sum(sequence.num_uncomputed for sequence in self._running)

    @property
    def allocated_slots(self) -> int:
        """Slots of the blocks of running sequences; those of a shared block count once."""
        blocks = {block_id for sequence in self._running for block_id in sequence.block_ids}
        return len(blocks) * self._layout.block_size

    @property
    def unused_slots(self) -> int:
        """Those of them that hold no token."""
        block_size = self._layout.block_size
        written: dict[BlockId, int] = {}
        for sequence in self._running:
            full_blocks, rest = divmod(sequence.num_computed, block_size)
            for block_id in sequence.block_ids[full_blocks:]:
                written[block_id] = max(written.get(block_id, 0), rest)
                rest = 0
        return sum(block_size - tokens for tokens in written.values())

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
        """Move what can move from waiting; returns reservations that were granted or lost their prefix.

        While a step copies blocks nothing moves, see above. Its `commit` or `abandon` is followed by another call.
        """
        answered: list[Reservation] = []
        if self._is_moving:
            return answered
        while self._waiting and (self._is_waited_for or not self._is_still_refused(self._waiting[0])):
            entry = self._waiting[0]
            if not (self._try_grant(entry) if isinstance(entry, Reservation) else self._try_start(entry)):
                # One at a time: its blocks are free when they are saved.
                if self._is_waited_for and self._running[-1].arrival > entry.arrival and not self.host_copies.is_saving:
                    self._preempt(self._running[-1])
                    continue
                self._refused = entry, self._pool.num_allocatable, self._num_taken
                break
            self._waiting.pop(0)
            if isinstance(entry, Reservation):
                answered.append(entry)
        return answered

    def take_preempted(self) -> list[DecodeSequence]:
        """Sequences that were put back to waiting, their K/V lost; `withdraw` those to compute elsewhere."""
        preempted, self._preempted = dict.fromkeys(self._preempted), []
        return [sequence for sequence in preempted if sequence in self._waiting and sequence.host_copy is None]

    def withdraw(self, sequence: DecodeSequence) -> None:
        """A waiting sequence will be computed elsewhere."""
        self._waiting.remove(sequence)

    def join(self, reservation: Reservation) -> None:
        """The hand-off committed: its sequences run from the next step on."""
        self._reserved.remove(reservation)
        leader = reservation.leader
        leader.block_ids = [*reservation.held_ids, *reservation.block_ids]
        leader.num_computed = reservation.num_tokens
        if leader.num_candidates:
            # Unless its search has gone on meanwhile, the last token is computed again for its logits.
            leader.num_computed = min(reservation.num_tokens, leader.num_tokens - 1)
        self._publish(leader, 0)
        self._run(leader)
        if not leader.num_candidates:
            self.fork(leader)

    def give_up(self, reservation: Reservation) -> None:
        """The hand-off ended without commit. Its own blocks are the caller's to quarantine and free."""
        self._refused = None, 0, 0
        if reservation in self._reserved:
            self._reserved.remove(reservation)
            self._pool.release(reservation.held_ids)
            reservation.held_ids = []
        elif reservation in self._waiting:
            self._waiting.remove(reservation)

    def fork(self, leader: DecodeSequence) -> None:
        """Give the siblings of a leader its prompt's blocks."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if not sibling.is_ended:
                self.branch(leader, sibling)
        self._release_if_ended(leader)

    def branch(self, parent: DecodeSequence, child: DecodeSequence) -> None:
        """A new sequence goes on from an old one, sharing its blocks: it has that one's tokens, but for the last.

        Takes no block and no place: nothing is copied before one of them writes. Without a parent that runs, the child
        is computed in its turn.
        """
        if not parent.is_running:
            self.add(child)
            return
        child.num_computed = min(parent.num_computed, child.num_tokens)
        child.block_ids = parent.block_ids[: self._layout.blocks_for(child.num_computed)]
        self._pool.share(child.block_ids)
        self._run(child)

    def can_rebase(self, sequence: DecodeSequence, parent: DecodeSequence) -> bool:
        """Whether both run, and no step or copy is under way that knows them as they are."""
        return all(each.is_running and not each.is_restoring and not each.is_on_device for each in (sequence, parent))

    def rebase(self, sequence: DecodeSequence, parent: DecodeSequence) -> None:
        """A sequence goes on from another of the same prompt instead: it gets that one's tokens and shares its blocks.

        As if it had ended and the other had branched, but costs what the two have not in common, and not their length.
        """
        own, end = sequence.block_ids, self._layout.blocks_for(parent.num_computed)
        theirs = parent.block_ids
        # Who shares a block shares all before it, or has the same text there.
        common = bisect.bisect_left(range(min(len(own), end)), True, key=lambda index: own[index] != theirs[index])
        self._pool.share(theirs[common:end])
        self._pool.release(own[common:])
        own[common:] = theirs[common:end]
        sequence.num_computed = parent.num_computed
        # The last common block may be partly filled, and the tokens beyond its K/V not the same.
        full = max(0, common - 1)
        first = max(0, full * self._layout.block_size - len(sequence.prompt_token_ids))
        sequence.output_token_ids[first:] = parent.output_token_ids[first:]
        known = min(full, len(sequence.block_hashes))
        sequence.block_hashes[known:] = parent.block_hashes[known:]

    def end(self, sequence: DecodeSequence, *, is_whole: bool = True) -> None:
        """Nobody wants more of it. Blocks go back now, or when the step that holds them returns.

        Of one that is not whole, such as a beam that others have overtaken, nothing is learned about lengths.
        """
        if sequence.is_ended:
            return
        sequence.is_ended = True
        self._refused = None, 0, 0
        if sequence.output_token_ids and is_whole:
            self.lengths.record(len(sequence.output_token_ids))
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self.host_copies.drop(sequence)
            self._hand_down(sequence)
        elif not sequence.is_on_device:
            self._release_if_ended(sequence)

    # -- steps ----------------------------------------------------------------------------------------------

    def decide(self) -> DecodeDecision | None:
        """Choose what the next step does. None: there is nothing to do. Call `admit` before."""
        budget = self._max_num_batched_tokens
        slices: list[Slice] = []
        waits = self._follow_prefixes()
        for sequence in list(self._running):
            is_due = sequence.num_uncomputed == 1 and not sequence.is_restoring
            if budget > 0 and is_due and self._grow(sequence, sequence.num_tokens):
                slices.append(Slice(sequence, sequence.num_computed, 1, is_last=True))
                budget -= 1
        bound_s = self._itl_bound_s if slices else None
        num_copied = self._copy_some(bound_s)
        if bound_s is not None:
            bound_s -= self.costs.copied.time_s(num_copied * self._layout.block_bytes)
            budget = min(budget, self.costs.prompt_tokens_within(bound_s, least=max(2, self._layout.block_size)))
        lengths = self._share_out(budget, waits)
        for sequence in list(self._running):
            length = lengths.get(sequence, 0)
            if length and self._grow(sequence, sequence.num_computed + length):
                is_last = length == sequence.num_uncomputed
                slices.append(Slice(sequence, sequence.num_computed, length, is_last=is_last))
        return self._decided(slices)

    def commit(self, decision: DecodeDecision, failed: Sequence[BlockMove] = ()) -> None:
        """The step is done: advance counters and make full blocks findable.

        Sampled tokens are the caller's to add, and leaders whose prompt is computed the caller's to `fork`.

        Args:
            failed: moves that could not be made. What could not be saved is computed again; a sequence that could not
                be restored is the caller's to `end`.
        """
        self._is_moving = False
        for move in decision.moves:
            if isinstance(move, SaveBlocks) and move in failed:
                self.host_copies.lose(move)
            elif isinstance(move, RestoreBlocks):
                self._commit_restored(move, is_made=move not in failed)
        for piece in decision.slices:
            sequence = piece.sequence
            sequence.is_on_device = False
            sequence.num_computed += piece.length
            self._publish(sequence, piece.start // self._layout.block_size)
            if not (piece.is_last and any(not sibling.is_ended for sibling in sequence.siblings)):
                self._release_if_ended(sequence)

    def abandon(self, decision: DecodeDecision) -> None:
        """The step failed: nothing of it counts, and nothing is known of the copies that it made."""
        self._is_moving = False
        for move in decision.moves:
            if isinstance(move, SaveBlocks):
                self.host_copies.lose(move)
        for sequence in decision.sequences:
            sequence.is_on_device = False
            self._release_if_ended(sequence)

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not balance."""
        self._pool.check_invariants()
        waiting = [entry for entry in self._waiting if isinstance(entry, DecodeSequence)]
        for entry in self._waiting:
            assert not entry.block_ids, "a waiting entry holds blocks"
        for sequence in waiting:
            assert not sequence.is_running and not sequence.num_computed, "a waiting sequence runs"
        for sequence in self._running:
            assert sequence.is_running, "a running sequence is waited for"
            assert len(sequence.block_ids) >= self._layout.blocks_for(sequence.num_computed), "a sequence lost blocks"
            assert sequence.host_copy is None or not sequence.host_copy.unsaved, "a sequence runs that is being saved"
        self.host_copies.check_invariants((*waiting, *self._running))

    # -- inside: admission ----------------------------------------------------------------------------------

    def _max_reusable(self, sequence: DecodeSequence) -> int:
        # A hit never covers the last token, whose logits are needed.
        if sequence.sampling.prompt_logprobs is not None and not sequence.output_token_ids:
            return 0
        return (sequence.num_tokens - 1) // self._layout.block_size

    @property
    def _num_taken(self) -> int:
        return len(self._running) + len(self._reserved)

    def _is_still_refused(self, entry: DecodeSequence | Reservation) -> bool:
        """Whether it was refused and nothing has ended since: what the running ones are expected to need only rises."""
        refused, allocatable, taken = self._refused
        return entry is refused and self._pool.num_allocatable <= allocatable and self._num_taken >= taken

    @property
    def _is_waited_for(self) -> bool:
        """Whether all that runs are beams that have done their step, so that none goes on before one that waits has."""
        has_beams = bool(self._running) and not self._reserved
        return has_beams and all(beam.num_candidates and not beam.num_uncomputed for beam in self._running)

    def _has_room(self, entry: DecodeSequence, held: list[BlockId]) -> bool:
        """Whether a family that holds these blocks of its own prompt may have the others, and all it will grow by."""
        needed = self._layout.blocks_for(entry.num_tokens) - len(held)
        if needed > self._pool.num_allocatable:
            return False
        demands = self._family_demands(entry, len(held), 0)
        taken: list[Demand] = []
        for sequence in self._running:
            taken += self._family_demands(sequence, len(sequence.block_ids), self._own_blocks(sequence))
        for reservation in self._reserved:
            own = len(reservation.block_ids)
            taken += self._family_demands(reservation.leader, len(reservation.held_ids) + own, own)
        if not taken:
            # Whatever fits alone must run one day.
            return True
        if len(taken) + len(demands) > self._max_num_seqs:
            return False
        if self._is_waited_for:
            return True
        return peak_growth([*taken, *demands], self._layout.block_size) <= self._pool.num_allocatable

    def _family_demands(self, leader: DecodeSequence, held: int, own: int) -> list[Demand]:
        """Of a sequence and of the siblings that will share its prompt."""
        shared = len(leader.prompt_token_ids) // self._layout.block_size
        return [
            Demand(leader.num_tokens, held, own, self._remaining(leader)),
            *(
                Demand(each.num_tokens, shared, 0, self._remaining(each))
                for each in leader.siblings
                if not each.is_ended
            ),
        ]

    def _remaining(self, sequence: DecodeSequence) -> int:
        return self.lengths.remaining(len(sequence.output_token_ids), sequence.sampling.max_tokens)

    def _own_blocks(self, sequence: DecodeSequence) -> int:
        """Blocks that nobody shares; who shares a block shares all before it."""
        blocks = sequence.block_ids
        return len(blocks) - bisect.bisect_left(blocks, True, key=lambda block_id: self._pool.ref_count(block_id) == 1)

    def _try_grant(self, reservation: Reservation) -> bool:
        leader = reservation.leader
        held = self._pool.match(leader.full_block_hashes(self._layout.block_size, reservation.blocks_held))
        if len(held) < reservation.blocks_held:
            self._pool.release(held)
            reservation.lost_prefix = True
            return True
        if not self._has_room(leader, held):
            self._pool.release(held)
            return False
        reservation.held_ids = held
        reservation.block_ids = self._pool.allocate(reservation.count)
        self._reserved.add(reservation)
        return True

    def _try_start(self, sequence: DecodeSequence) -> bool:
        copy = sequence.host_copy
        if copy is not None and copy.unsaved:
            return False  # A matter of few steps.
        hashes = sequence.full_block_hashes(self._layout.block_size, self._max_reusable(sequence))
        held = self._pool.match(hashes)
        if not self._has_room(sequence, held):
            self._pool.release(held)
            return False
        sequence.block_ids = held
        sequence.num_computed = len(held) * self._layout.block_size
        if copy is not None and copy.num_tokens <= sequence.num_computed:
            self.host_copies.drop(sequence)
        self._run(sequence)
        return True

    # -- inside: prompts ------------------------------------------------------------------------------------

    @property
    def _prompts(self) -> list[DecodeSequence]:
        """Those that have more to compute than one token."""
        return [each for each in self._running if each.num_uncomputed > 1 and not each.is_restoring]

    def _follow_prefixes(self) -> dict[DecodeSequence, DecodeSequence]:
        """Prompts take over blocks that have become findable; returns who waits for whom to compute its next one.

        Found out anew for each step, and everybody waits only for one before it: so nobody waits for one that is gone.
        """
        block_size = self._layout.block_size
        waits: dict[DecodeSequence, DecodeSequence] = {}
        before: list[DecodeSequence] = []
        for prompt in self._prompts:
            first, begun = divmod(prompt.num_computed, block_size)
            most = self._max_reusable(prompt)
            if not begun and first < most:
                hashes = prompt.full_block_hashes(block_size, most)
                if found := self._pool.match(hashes[first:]):
                    self._pool.release(prompt.block_ids[first:])
                    prompt.block_ids[first:] = found
                    first += len(found)
                    prompt.num_computed = first * block_size
                    # What it shares now, others will not need.
                    self._refused = None, 0, 0
                if first < most:
                    computer = next((each for each in before if self._computes(each, first, hashes[first])), None)
                    if computer is not None:
                        waits[prompt] = computer
                        continue
            before.append(prompt)
        return waits

    def _computes(self, sequence: DecodeSequence, index: int, block_hash: BlockHash) -> bool:
        """Whether it has this block, with all that is before it, still to compute."""
        size = self._layout.block_size
        is_to_come = sequence.num_computed < (index + 1) * size <= sequence.num_tokens
        return is_to_come and sequence.full_block_hashes(size, index + 1)[index] == block_hash

    def _share_out(self, budget: int, waits: dict[DecodeSequence, DecodeSequence]) -> dict[DecodeSequence, int]:
        """Tokens of the step for each prompt; one for which others wait is as urgent and as short as these."""
        prompts = [prompt for prompt in self._prompts if prompt not in waits]
        if budget < 1 or not prompts:
            return {}
        oldest = prompts[0]
        if self._is_shortest_first:
            urgency = {prompt: prompt.priority for prompt in prompts}
            work = {prompt: prompt.num_uncomputed for prompt in prompts}
            for prompt, computer in waits.items():
                if prompt.is_running and computer in work:
                    urgency[computer] = min(urgency[computer], prompt.priority)
                    work[computer] = min(work[computer], prompt.num_uncomputed)
            most = min(urgency.values())
            prompts = sorted((prompt for prompt in prompts if urgency[prompt] == most), key=lambda prompt: work[prompt])
        return share_out(
            prompts,
            oldest,
            budget=budget,
            places=self._max_num_seqs,
            work=lambda prompt: prompt.num_uncomputed,
            in_order=not self._is_shortest_first,
        )

    # -- inside: growth and preemption ----------------------------------------------------------------------

    def _grow(self, sequence: DecodeSequence, num_tokens: int) -> bool:
        """Make room for its first `num_tokens`, at the cost of the last in line; False when it is not in this step."""
        if not sequence.is_running:
            return False
        first = sequence.num_computed // self._layout.block_size
        while first < len(sequence.block_ids) and self._pool.ref_count(sequence.block_ids[first]) > 1:
            if self._pool.num_allocatable:
                shared, (own,) = sequence.block_ids[first], self._pool.allocate(1)
                self._moves.append(CopyBlock(shared, own))
                sequence.block_ids[first] = own
                self._pool.release([shared])
            elif not self._make_way(sequence):
                return False
        missing = self._layout.blocks_for(num_tokens) - len(sequence.block_ids)
        while missing > self._pool.num_allocatable:
            if not self._make_way(sequence):
                return False
        if missing > 0:
            sequence.block_ids += self._pool.allocate(missing)
        return True

    def _make_way(self, sequence: DecodeSequence) -> bool:
        """Free a block of who was preempted, or else preempt the last in line.

        False when that is this one: it is preempted, or sits this step out.
        """
        if self.host_copies.is_saving:
            self._save(1)
            return True
        last = self._running[-1]
        if last is sequence and self._gets_blocks_later(sequence):
            return False
        self._preempt(last)
        return last is not sequence

    def _gets_blocks_later(self, sequence: DecodeSequence) -> bool:
        """Whether the last of the running ones will get blocks without making way for anybody before it.

        From hand-offs behind it, that is, which join or are given up within their deadline; and from senders that stop.
        """
        if self._waiting and self._waiting[0].arrival < sequence.arrival:
            return False
        is_before_some = any(reservation.arrival > sequence.arrival for reservation in self._reserved)
        return is_before_some or self._pool.counts.quarantined > 0

    def _preempt(self, sequence: DecodeSequence) -> None:
        num_computed = sequence.num_computed
        if num_computed:
            sequence.num_preemptions += 1
            self.preemptions += 1
            self._preempted.append(sequence)
            num_bytes = self._layout.blocks_for(num_computed) * self._layout.block_bytes
            has_room = self.host_copies.has_room(num_bytes)
            # One that is preempted again before all was copied back still has its copy.
            if not sequence.is_restoring and has_room and self.costs.copy_is_quicker(num_bytes, num_computed):
                self.host_copies.begin(sequence)
        self._leave(sequence)
        self.add(sequence)

    # -- inside: copies -------------------------------------------------------------------------------------

    def _copy_some(self, bound_s: float | None) -> int:
        """Go on with saving, then with restoring, as far as the bound allows; returns how many blocks are copied."""
        if bound_s is None:
            most = self._pool.counts.total
        else:
            size = self._layout.block_bytes
            most = self.costs.copied_bytes_within(bound_s, least=size) // size
            # At least one more, whatever was saved already for those that could not wait.
            most = max(most, self._num_copied + 1)
        while self.host_copies.is_saving and self._num_copied < most:
            self._save(most - self._num_copied)
        for sequence in list(self._running):
            if sequence.is_restoring and self._num_copied < most:
                self._restore(sequence, most - self._num_copied)
        return self._num_copied

    @property
    def _num_copied(self) -> int:
        """Blocks that the next step will copy to and from host memory."""
        return sum(len(move.block_ids) for move in self._moves if not isinstance(move, CopyBlock))

    def _save(self, most: int) -> None:
        move = self.host_copies.save(most)
        self._moves.append(move)
        if not move.copy.unsaved:
            self._refused = None, 0, 0

    def _restore(self, sequence: DecodeSequence, most: int) -> None:
        copy = sequence.host_copy
        assert copy is not None, "only what has a copy is restored"
        first = sequence.num_computed // self._layout.block_size
        end = min(first + most, copy.num_blocks)
        if self._grow(sequence, min(end * self._layout.block_size, copy.num_tokens)):
            self._moves.append(RestoreBlocks(sequence, copy, first, tuple(sequence.block_ids[first:end])))

    def _decided(self, slices: list[Slice]) -> DecodeDecision | None:
        # Growing may have preempted a sequence that already had its slice, or blocks to be restored.
        held = [piece for piece in slices if piece.sequence.is_running]
        moves = [move for move in self._moves if not isinstance(move, RestoreBlocks) or move.sequence.is_running]
        self._moves = []
        if not held and not moves:
            return None
        decision = DecodeDecision(tuple(held), tuple(moves))
        for sequence in decision.sequences:
            sequence.is_on_device = True
        self._is_moving = bool(moves)
        return decision

    def _commit_restored(self, move: RestoreBlocks, *, is_made: bool) -> None:
        sequence = move.sequence
        sequence.is_on_device = False
        if is_made:
            end = (move.first_block + len(move.block_ids)) * self._layout.block_size
            sequence.num_computed = min(end, move.copy.num_tokens)
            self._publish(sequence, move.first_block)
            if sequence.num_computed == move.copy.num_tokens:
                self.host_copies.drop(sequence)
        self._release_if_ended(sequence)

    def _publish(self, sequence: DecodeSequence, first_block: int) -> None:
        full_blocks = sequence.num_computed // self._layout.block_size
        if full_blocks <= first_block:
            return
        hashes = sequence.full_block_hashes(self._layout.block_size, full_blocks)
        for index in range(first_block, full_blocks):
            sequence.block_ids[index] = self._pool.publish_or_adopt(sequence.block_ids[index], hashes[index])

    # -- inside: coming and going ---------------------------------------------------------------------------

    def _run(self, sequence: DecodeSequence) -> None:
        sequence.is_running = True
        bisect.insort(self._running, sequence, key=lambda entry: entry.arrival)

    def _leave(self, sequence: DecodeSequence) -> None:
        self._running.remove(sequence)
        self._refused = None, 0, 0
        sequence.is_running = False
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0

    def _release_if_ended(self, sequence: DecodeSequence) -> None:
        if sequence.is_ended and sequence.is_running:
            self._leave(sequence)
            self.host_copies.drop(sequence)
            self._hand_down(sequence)

    def _hand_down(self, leader: DecodeSequence) -> None:
        """A leader ended before its siblings got the prompt: the next sibling leads."""
        alive = [sibling for sibling in leader.siblings if not sibling.is_ended]
        leader.siblings = []
        if alive:
            alive[0].siblings = alive[1:]
            self.add(alive[0])
