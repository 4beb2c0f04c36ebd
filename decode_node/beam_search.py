"""A beam search in terms of sequences: which begin, which go on from which, which are over. Knows no attempts.

What is chosen is BeamGroup's affair. Here its slots are sequences of the scheduler:

    begin     the first beam alone has a prompt to compute, and the others take their place when it has its candidates
    commit    one beam has its candidates; when all have them, the group chooses, and
                  a beam with children goes on as the first of them
                  a beam without any becomes another child: at the cost of what the two have not in common, if both run;
                  where one of them has lost its blocks, a new sequence takes its place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode_node.beam_group import BeamGroup, Continuation
from decode_node.scheduler import DecodeScheduler
from decode_node.sequence import DecodeSequence, next_place
from engine.errors import AttemptFailed
from engine.ids import BlockHash
from engine.sampling_params import SamplingParams
from engine.tokens import SampledToken
from proto import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class BeamStep:
    """All beams have taken a step.

    Attributes:
        beams: sequences of the search from now on; all of them when it is over.
        born: those of them that are new, and known to the scheduler.
        overtaken: those that are no longer among them, which are the caller's to end.
    """

    beams: tuple[DecodeSequence, ...]
    born: tuple[DecodeSequence, ...] = ()
    overtaken: tuple[DecodeSequence, ...] = ()


def begin_search(
    message: pb.StartAttempt, sampling: SamplingParams, root: BlockHash, virtual_arrival_s: float, max_model_len: int
) -> tuple[BeamGroup, list[DecodeSequence]]:
    """The search that a router asks for, already checked, and a sequence for each of its slots."""
    prompt = list(message.prompt_token_ids)
    group = BeamGroup(
        sampling,
        width=message.beam_search.width,
        length_penalty=message.beam_search.length_penalty,
        prompt_length=len(prompt),
        max_model_len=max_model_len,
    )
    beams = [
        DecodeSequence(
            slot,
            prompt,
            sampling,
            root,
            arrival=next_place(virtual_arrival_s),
            num_candidates=group.num_candidates,
            priority=message.priority,
        )
        for slot in range(message.beam_search.width)
    ]
    return group, beams


def commit_beam(
    group: BeamGroup,
    beams: Sequence[DecodeSequence],
    beam: DecodeSequence,
    token: SampledToken | AttemptFailed,
    scheduler: DecodeScheduler,
) -> BeamStep | None:
    """One of the beams has its candidates. Returns None as long as others have not; may set `group.hypotheses`.

    Raises:
        AttemptFailed: the search cannot go on.
    """
    if isinstance(token, AttemptFailed):
        raise token
    group.report(beam.index, token.logprobs)
    if not group.is_ready:
        return None
    continuations = group.advance()
    if group.hypotheses is not None:
        return BeamStep(tuple(beams))
    return _succeed(beams, continuations, scheduler)


def _succeed(
    beams: Sequence[DecodeSequence], continuations: Sequence[Continuation], scheduler: DecodeScheduler
) -> BeamStep:
    old = {beam.index: beam for beam in beams}
    new: dict[int, DecodeSequence] = {}
    for each in beams:
        each.siblings = []
    # First those without children of their own: they need the others as these are now.
    for child in sorted(continuations, key=lambda child: child.slot == child.parent):
        parent, beam = old[child.parent], old.get(child.slot)
        if beam is None or (beam is not parent and not scheduler.can_rebase(beam, parent)):
            beam = _born(child.slot, parent, beam or parent)
            scheduler.branch(parent, beam)
        elif beam is not parent:
            scheduler.rebase(beam, parent)
        new[child.slot] = beam
    for child in continuations:
        new[child.slot].output_token_ids.append(child.token_id)
    return BeamStep(
        beams=tuple(new.values()),
        born=tuple(beam for slot, beam in new.items() if beam is not old.get(slot)),
        overtaken=tuple(beam for slot, beam in old.items() if beam is not new.get(slot)),
    )


def _born(slot: int, parent: DecodeSequence, place: DecodeSequence) -> DecodeSequence:
    """A copy of the parent that holds nothing, at another one's place in line."""
    return replace(
        parent,
        index=slot,
        output_token_ids=list(parent.output_token_ids),
        arrival=place.arrival,
        num_computed=0,
        block_ids=[],
        block_hashes=list(parent.block_hashes),
        siblings=[],
        host_copy=None,
        is_running=False,
        num_preemptions=0,
    )
