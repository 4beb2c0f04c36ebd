"""How a decision becomes tokens: copies, one batch, one forward pass, one draw per sequence. Knows no attempts."""

from __future__ import annotations

from ctypes import c_int64
from dataclasses import dataclass

import torch

from decode_node.beam_group import candidates
from decode_node.block_moves import MovesMade, make_moves
from decode_node.scheduler import DecodeDecision, Slice
from decode_node.sequence import DecodeSequence
from engine.errors import AttemptFailed
from engine.forward_batch import SequenceSlice, WantedLogits, build_batch
from engine.model_runner import Runner
from engine.sampling import SampleRow, prompt_logprobs, sample
from engine.tokens import PositionLogprobs, SampledToken


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What a step computed for one slice; tokens only for a sequence's last slice, one for it and each sibling.

    Of a beam it is one token, with its candidates as log probabilities.
    """

    tokens: tuple[SampledToken | AttemptFailed, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    error: AttemptFailed | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per slice, and what became of the moves."""

    slices: list[SliceResult]
    moves: MovesMade


def run_step(decision: DecodeDecision, runner: Runner, pieces_done: c_int64) -> StepResult:
    """Called in the worker thread; reads the sequences and changes nothing but blocks and host copies.

    `pieces_done` is counted up after each move and each layer.
    """
    moves = make_moves(decision.moves, runner, pieces_done)
    return StepResult(_compute(decision, runner, pieces_done) if decision.slices else [], moves)


def _compute(decision: DecodeDecision, runner: Runner, pieces_done: c_int64) -> list[SliceResult]:
    slices = [
        SequenceSlice(
            token_ids=piece.sequence.tokens(piece.start, piece.start + piece.length),
            start=piece.start,
            block_ids=piece.sequence.block_ids,
            logits=_wanted_logits(piece),
        )
        for piece in decision.slices
    ]
    batch = build_batch(slices, block_size=runner.layout.block_size)
    logits = runner.run(batch, layers_done=pieces_done)
    sample_rows: list[SampleRow] = []
    logits_rows: list[int] = []
    row = 0
    beams: dict[Slice, SampledToken | AttemptFailed] = {}
    prompt_rows: list[tuple[PositionLogprobs, ...] | AttemptFailed] = []
    for piece, slice_ in zip(decision.slices, slices, strict=True):
        num_rows = {"none": 0, "last": 1, "all": piece.length}[slice_.logits]
        try:
            prompt_rows.append(_prompt_logprobs(piece, logits[row : row + num_rows]))
        except AttemptFailed as error:
            prompt_rows.append(error)
        row += num_rows
        if piece.is_last and piece.sequence.num_candidates:
            beams[piece] = candidates(logits[row - 1], piece.sequence.num_candidates)
        elif piece.is_last:
            for sequence in _sampled(piece):
                sample_rows.append(_sample_row(sequence))
                logits_rows.append(row - 1)
    sampled = iter(sample([logits[row] for row in logits_rows], sample_rows) if sample_rows else [])
    results = []
    for piece, positions in zip(decision.slices, prompt_rows, strict=True):
        if piece in beams:
            tokens: tuple[SampledToken | AttemptFailed, ...] = (beams[piece],)
        else:
            tokens = tuple(next(sampled) for _ in _sampled(piece)) if piece.is_last else ()
        results.append(_slice_result(tokens, positions))
    return results


def _slice_result(
    tokens: tuple[SampledToken | AttemptFailed, ...], positions: tuple[PositionLogprobs, ...] | AttemptFailed
) -> SliceResult:
    if isinstance(positions, AttemptFailed):
        return SliceResult(tuple(positions for _ in tokens), (), positions)
    return SliceResult(tokens, positions)


def _sampled(piece: Slice) -> tuple[DecodeSequence, ...]:
    return (piece.sequence, *piece.sequence.siblings)


def _sample_row(sequence: DecodeSequence) -> SampleRow:
    return SampleRow(
        params=sequence.sampling,
        sequence_index=sequence.index,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
    )


def _wants_prompt_logprobs(piece: Slice) -> bool:
    sequence = piece.sequence
    return sequence.sampling.prompt_logprobs is not None and not sequence.output_token_ids


def _wanted_logits(piece: Slice) -> WantedLogits:
    if _wants_prompt_logprobs(piece):
        return "all"
    return "last" if piece.is_last else "none"


def _prompt_logprobs(piece: Slice, logits: torch.Tensor) -> tuple[PositionLogprobs, ...]:
    """Args: logits: [rows, vocab], the rows that `_wanted_logits` asked for."""
    sequence = piece.sequence
    top = sequence.sampling.prompt_logprobs
    if top is None or not _wants_prompt_logprobs(piece):
        return ()
    positions: list[PositionLogprobs] = [()] if piece.start == 0 else []
    end = min(piece.start + piece.length + 1, len(sequence.prompt_token_ids))
    following = sequence.prompt_token_ids[piece.start + 1 : end]
    return (*positions, *prompt_logprobs(logits[: len(following)], following, top))
