"""One stream of tokens on a decode node, described by counters, and what a hand-off asks for on its behalf."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_hash import extend
from engine.ids import BlockHash, BlockId
from engine.sampling_params import SamplingParams

Place = tuple[float, int]
"""Place in line: what is smaller goes first. The second number tells apart what the first does not."""

_arrivals = itertools.count()


def next_place(virtual_arrival_s: float = 0.0) -> Place:
    """The place of what arrives now; `virtual_arrival_s` comes before the order of arrival."""
    return virtual_arrival_s, next(_arrivals)


@dataclass(slots=True, eq=False)
class HostCopy:
    """K/V of a preempted sequence, kept outside the pool.

    Attributes:
        num_tokens: tokens it covers, from the first.
        num_blocks: blocks it covers, the last one perhaps partly.
        unsaved: the first of these blocks, still to be copied; it holds a reference to each.
        data: the bytes; whoever copies puts them there. Gone with this object.
    """

    num_tokens: int
    num_blocks: int
    unsaved: list[BlockId]
    data: object = None


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
        host_copy: its K/V, when it was preempted and copying was the quicker way back; kept until all is copied back.
        num_candidates: of a beam: how many of the most likely tokens are told instead of drawing one; else 0.
        priority: of the request, lower is more urgent; whose chunks go first.
        is_running: it has a place; its blocks may still be to come.
        is_on_device: the step that runs now holds it.
        is_ended: no more of it is wanted; blocks go back once no step holds it.
        num_preemptions: how often it lost its blocks.
    """

    index: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    root_hash: BlockHash
    output_token_ids: list[int] = field(default_factory=list)
    arrival: Place = field(default_factory=next_place)
    num_computed: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    siblings: list[DecodeSequence] = field(default_factory=list)
    host_copy: HostCopy | None = None
    num_candidates: int = 0
    priority: int = 0
    is_running: bool = False
    is_on_device: bool = False
    is_ended: bool = False
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 is plain decoding."""
        return self.num_tokens - max(self.num_computed, self.host_copy.num_tokens if self.host_copy else 0)

    @property
    def is_restoring(self) -> bool:
        """Whether it runs, but part of its K/V is still to be copied back."""
        return self.is_running and self.host_copy is not None

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
        num_tokens: tokens whose K/V will be there.
        lost_prefix: the held blocks were evicted before the grant, so the hand-off must be opened anew.
    """

    leader: DecodeSequence
    blocks_held: int
    count: int
    held_ids: list[BlockId] = field(default_factory=list)
    block_ids: list[BlockId] = field(default_factory=list)
    num_tokens: int = field(init=False)
    lost_prefix: bool = False

    def __post_init__(self) -> None:
        self.num_tokens = self.leader.num_tokens

    @property
    def arrival(self) -> Place:
        """Place in line."""
        return self.leader.arrival
