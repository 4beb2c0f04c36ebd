"""Which token follows: logits in, tokens and their log probabilities out.

Batch-invariant: each row is decided from its own logits alone, and all noise is a function of (seed, sequence index,
position, token id), so a sequence gets the same tokens alone, in a crowd, after preemption and on another node.

The order of operations on a row:

    raw logits ──> logprobs
        └─> logit_bias -> min_tokens mask -> repetition, presence, frequency penalties
              └─> greedy: the largest
              └─> temperature -> top_k -> top_p -> min_p -> one draw
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import AttemptFailed
from engine.sampling_params import SamplingParams
from engine.tokens import PositionLogprobs, SampledToken, TokenLogprob
from kernels import ops


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose row of logits it is.

    Attributes:
        params: how tokens are chosen.
        sequence_index: which of the request's n sequences.
        prompt_token_ids: the whole prompt.
        output_token_ids: every token after it so far.
    """

    params: SamplingParams
    sequence_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


def sample(
    logits: torch.Tensor | Sequence[torch.Tensor], rows: Sequence[SampleRow]
) -> list[SampledToken | AttemptFailed]:
    """Choose one token for each row of `logits` [R, vocab] float32, rows contiguous; `logits` is left as it is.

    A row without a token to choose (NaN, +inf, or nothing but -inf) gives an AttemptFailed in its place with reason
    `nonfinite_logits`; the other rows do not notice.
    """
    if len(logits) != len(rows):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} sequences")
    raw = list(logits)
    scores = [own if _keeps_logits(row) else _adjusted(own, row) for own, row in zip(raw, rows, strict=True)]
    tokens = ops.choose_tokens(scores, [_choice_of(row) for row in rows])
    results: list[SampledToken | AttemptFailed] = [
        SampledToken(token) if token >= 0 else _nonfinite() for token in tokens
    ]
    reported = [
        (index, row.params.logprobs)
        for index, row in enumerate(rows)
        if row.params.logprobs is not None and tokens[index] >= 0
    ]
    positions = _positions([raw[i] for i, _ in reported], [tokens[i] for i, _ in reported], [n for _, n in reported])
    for (index, _), position in zip(reported, positions, strict=True):
        results[index] = SampledToken(tokens[index], position)
    return results


def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
    """Log probabilities of known tokens: row i of `logits` [R, vocab] is followed by `next_token_ids[i]`.

    Raises:
        AttemptFailed: logits are not finite.
    """
    if logits.shape[0] != len(next_token_ids):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(next_token_ids)} tokens")
    return _positions(list(logits), next_token_ids, [top] * len(next_token_ids))


def _positions(rows: Sequence[torch.Tensor], token_ids: Sequence[int], top: Sequence[int]) -> list[PositionLogprobs]:
    """Of each row of raw logits [vocab] the token's own entry, then as many of the most likely as `top` says."""
    positions = []
    for token_id, ranked in zip(token_ids, ops.rank_tokens(rows, token_ids, top), strict=True):
        if ranked is None:
            raise _nonfinite()
        entries = [TokenLogprob(token_id, ranked.logprob, ranked.rank)]
        entries += [TokenLogprob(other, logprob, place) for place, (other, logprob) in enumerate(ranked.top, start=1)]
        positions.append(tuple(entries))
    return positions


def _nonfinite() -> AttemptFailed:
    return AttemptFailed("the model gave logits that are not finite", reason="nonfinite_logits")


def _masks_stops(row: SampleRow) -> bool:
    return len(row.output_token_ids) < row.params.min_tokens


def _keeps_logits(row: SampleRow) -> bool:
    """Whether nothing before temperature changes the logits of this row."""
    params = row.params
    return not (
        params.logit_bias
        or _masks_stops(row)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _choice_of(row: SampleRow) -> ops.TokenChoice:
    params = row.params
    return ops.TokenChoice(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        sequence_index=row.sequence_index,
        position=len(row.prompt_token_ids) + len(row.output_token_ids),
    )


def _adjusted(raw: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Bias, min_tokens mask and penalties applied to a copy of the logits [vocab]."""
    params = row.params
    scores = raw.clone()
    device = raw.device
    if params.logit_bias:
        biases = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        scores.index_add_(0, _tensor_of(params.logit_bias, device), torch.from_numpy(biases).to(device))
    if _masks_stops(row):
        stops = {i for i in (*params.eos_token_ids, *params.stop_token_ids) if i < raw.shape[0]}
        # Added, so that a NaN among them still fails the row.
        scores.index_add_(0, _tensor_of(stops, device), torch.full((len(stops),), -torch.inf, device=device))
    if params.repetition_penalty != 1.0:
        where = _tensor_of(set(row.prompt_token_ids).union(row.output_token_ids), device)
        values = scores.index_select(0, where)
        values = torch.where(values > 0, values * (1.0 / params.repetition_penalty), values * params.repetition_penalty)
        scores.index_copy_(0, where, values)
    if (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0) and len(row.output_token_ids):
        produced = Counter(row.output_token_ids)
        counts = np.fromiter(produced.values(), np.float32, len(produced))
        penalty = -(np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty))
        scores.index_add_(0, _tensor_of(produced, device), torch.from_numpy(penalty).to(device))
    return scores


def _tensor_of(token_ids: Collection[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(token_ids, np.int64, len(token_ids))).to(device)
