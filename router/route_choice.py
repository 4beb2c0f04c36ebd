"""Which decode node serves an attempt, and which prefill nodes it should try in which order.

A pure function: views of the nodes in, a plan out; randomness is passed in; no clock, no awaits. Costs are counted in
prompts: a prefill node's score is the share of the prompt it has cached, less the work ahead of it measured in prompts
of this size (weighed by the nodes' speeds where known). With equal speeds that orders nodes by when they would be done.

Affinity may not make a hot spot: a node that leads the least busy one by too many requests in flight, or that was given
too large a share of all recent prompt tokens, comes after all others whatever it has cached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.ids import Epoch, NodeId

MAX_PREFILL_TARGETS = 3
LOAD_WEIGHT = 1.0
MAX_IN_FLIGHT_LEAD = 2
RECENT_PROMPTS_BEFORE_CAP = 8
LARGEST_SHARE = 0.7
DECODE_PREFIX_BONUS = 0.15


@dataclass(frozen=True, slots=True)
class PrefillView:
    """What the router knows of a routable prefill node.

    Attributes:
        cached_tokens: of this prompt, as far as the directory knows.
        own_tokens: uncached prompt tokens this router has under way there; counted the moment they are sent.
        foreign_tokens: waiting there on behalf of others, from its last status less our own part of it.
        in_flight: requests this router has under way there.
        recent_tokens: prompt tokens this router gave it of late, fading.
        tokens_per_s: speed the node learned of itself; 0 is unknown.
    """

    node_id: NodeId
    epoch: Epoch
    cached_tokens: int = 0
    own_tokens: int = 0
    foreign_tokens: int = 0
    in_flight: int = 0
    recent_tokens: float = 0.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeView:
    """What the router knows of a routable decode node.

    Attributes:
        cached_tokens: of this prompt, as far as the directory knows.
        total_blocks: of its pool.
        used_blocks: in use, or promised to our own sequences under way there, whichever is known to be more.
        own_sequences: of this router, counted the moment they are sent.
        foreign_sequences: running or waiting on behalf of others.
        max_num_seqs: sequences one step may hold.
        is_avoided: it refused or failed this request since its last token.
    """

    node_id: NodeId
    epoch: Epoch
    total_blocks: int
    max_num_seqs: int
    cached_tokens: int = 0
    used_blocks: int = 0
    own_sequences: int = 0
    foreign_sequences: int = 0
    is_avoided: bool = False


@dataclass(frozen=True, slots=True)
class RouteQuestion:
    """What has to be placed.

    Attributes:
        num_tokens: prompt, and for a moved sequence the output so far.
        needed_blocks: for prompt and expected output of all sequences of the attempt.
    """

    num_tokens: int
    num_sequences: int
    needed_blocks: int


@dataclass(frozen=True, slots=True)
class ScoredNode:
    """One candidate as it was seen; candidates of a plan are listed best first."""

    node_id: NodeId
    epoch: Epoch
    score: float
    hit_fraction: float
    load: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """The answer, with everything that was weighed."""

    decode: ScoredNode
    prefill: tuple[ScoredNode, ...]
    decode_candidates: tuple[ScoredNode, ...]
    prefill_candidates: tuple[ScoredNode, ...]


def plan_route(
    question: RouteQuestion,
    decode: Sequence[DecodeView],
    prefill: Sequence[PrefillView],
    dice: random.Random,
) -> RoutePlan | None:
    """None when there is no decode node to choose."""
    decode_order = _order_decode(question, decode, dice)
    if not decode_order:
        return None
    prefill_order = _order_prefill(question, prefill, dice)
    return RoutePlan(
        decode=decode_order[0],
        prefill=prefill_order[:MAX_PREFILL_TARGETS],
        decode_candidates=decode_order,
        prefill_candidates=prefill_order,
    )


def _order_prefill(
    question: RouteQuestion, views: Sequence[PrefillView], dice: random.Random
) -> tuple[ScoredNode, ...]:
    if not views:
        return ()
    prompt = max(1, question.num_tokens)
    known_speeds = [view.tokens_per_s for view in views if view.tokens_per_s > 0.0]
    usual_speed = sum(known_speeds) / len(known_speeds) if known_speeds else 1.0
    least_in_flight = min(view.in_flight for view in views)
    recent_in_all = sum(view.recent_tokens for view in views)
    largest_share = min(LARGEST_SHARE, 1.5 / len(views))
    ranked: list[tuple[bool, float, float, ScoredNode]] = []
    for view in views:
        hit_fraction = min(view.cached_tokens, prompt) / prompt
        slowness = usual_speed / view.tokens_per_s if view.tokens_per_s > 0.0 else 1.0
        load = (view.own_tokens + view.foreign_tokens) / prompt
        score = 1.0 - slowness * (1.0 - hit_fraction + LOAD_WEIGHT * load)
        note = ""
        if len(views) > 1:
            if view.in_flight - least_in_flight >= MAX_IN_FLIGHT_LEAD and hit_fraction > 0.0:
                note = "leads by in-flight requests"
            elif (
                recent_in_all >= RECENT_PROMPTS_BEFORE_CAP * prompt
                and view.recent_tokens > largest_share * recent_in_all
            ):
                note = "had too large a share of late"
        node = ScoredNode(view.node_id, view.epoch, score, hit_fraction, load, note)
        ranked.append((bool(note), -score, dice.random(), node))
    ranked.sort(key=lambda entry: entry[:3])
    return tuple(entry[3] for entry in ranked)


def _order_decode(question: RouteQuestion, views: Sequence[DecodeView], dice: random.Random) -> tuple[ScoredNode, ...]:
    usable = [view for view in views if not view.is_avoided] or list(views)
    prompt = max(1, question.num_tokens)
    ranked: list[tuple[bool, float, float, ScoredNode]] = []
    for view in _drawn(usable, dice):
        hit_fraction = min(view.cached_tokens, prompt) / prompt
        shared_blocks = int(hit_fraction * question.needed_blocks)
        is_full = view.total_blocks - view.used_blocks < question.needed_blocks - shared_blocks
        sequence_load = (view.own_sequences + view.foreign_sequences) / max(1, view.max_num_seqs)
        block_load = view.used_blocks / max(1, view.total_blocks)
        load = sequence_load + block_load
        score = DECODE_PREFIX_BONUS * hit_fraction - load
        note = "full" if is_full else ("refused before" if view.is_avoided else "")
        ranked.append(
            (is_full, -score, dice.random(), ScoredNode(view.node_id, view.epoch, score, hit_fraction, load, note))
        )
    ranked.sort(key=lambda entry: entry[:3])
    return tuple(entry[3] for entry in ranked)


def _drawn(views: Sequence[DecodeView], dice: random.Random) -> list[DecodeView]:
    """Two drawn at random, so that routers with the same old news do not all run to one node, and the best holder."""
    if len(views) <= 2:
        return list(views)
    drawn = dice.sample(list(views), 2)
    holder = max(views, key=lambda view: view.cached_tokens)
    if holder.cached_tokens > 0 and holder not in drawn:
        drawn.append(holder)
    return drawn
