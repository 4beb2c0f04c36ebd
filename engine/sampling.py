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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import AttemptFailed
from engine.sampling_params import SamplingParams
from engine.tokens import PositionLogprobs, SampledToken, TokenLogprob
from kernels import ops

_FIRST_CANDIDATES = 256
"""How many of the largest logits top_p looks at before it looks at more."""


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


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | AttemptFailed]:
    """Choose one token for each row of `logits` [R, vocab] float32; `logits` is left as it is.

    A row without a token to choose (NaN, +inf, or nothing but -inf) gives an AttemptFailed in its place with reason
    `nonfinite_logits`; the other rows do not notice.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sequences")
    if not rows:
        return []
    # One pass finds the greedy token and every bad row: a NaN anywhere becomes the maximum.
    # Of equal logits the first wins.
    largest, greedy = logits.max(dim=-1)
    largest_list, greedy_list = largest.tolist(), greedy.tolist()
    results: list[SampledToken | AttemptFailed] = []
    for index, row in enumerate(rows):
        if not np.isfinite(largest_list[index]):
            results.append(_nonfinite())
            continue
        token_id: int | None = greedy_list[index]
        if not (row.params.is_greedy and _keeps_logits(row)):
            token_id = _choose(logits[index], row)
        if token_id is None:
            results.append(_nonfinite())
        elif row.params.logprobs is None:
            results.append(SampledToken(token_id))
        else:
            results.append(SampledToken(token_id, _position_logprobs(logits[index], token_id, row.params.logprobs)))
    return results


def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
    """Log probabilities of known tokens: row i of `logits` [R, vocab] is followed by `next_token_ids[i]`.

    Raises:
        AttemptFailed: logits are not finite.
    """
    if logits.shape[0] != len(next_token_ids):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(next_token_ids)} tokens")
    if len(next_token_ids) and not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise _nonfinite()
    return [_position_logprobs(row, token_id, top) for row, token_id in zip(logits, next_token_ids, strict=True)]


def _nonfinite() -> AttemptFailed:
    return AttemptFailed("the model gave logits that are not finite", reason="nonfinite_logits")


def _position_logprobs(row: torch.Tensor, token_id: int, top: int) -> PositionLogprobs:
    """The token's own entry, then the `top` most likely. `row` is the raw logits [vocab]."""
    total = torch.logsumexp(row, dim=-1)
    chosen = row[token_id]
    rank = 1 + (row > chosen).sum()
    entries = [TokenLogprob(token_id, float(chosen - total), int(rank))]
    if top > 0:
        values, token_ids = torch.topk(row, min(top, row.shape[0]))
        logprobs = (values - total).tolist()
        for place, (logprob, other) in enumerate(zip(logprobs, token_ids.tolist(), strict=True), start=1):
            entries.append(TokenLogprob(other, logprob, place))
    return tuple(entries)


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


def _choose(raw: torch.Tensor, row: SampleRow) -> int | None:
    """The token for one row of raw logits [vocab]; None when nothing may be chosen."""
    params = row.params
    scores = raw if _keeps_logits(row) else _adjusted(raw, row)
    if not np.isfinite(float(scores.max())):
        return None
    if params.is_greedy:
        return int(scores.argmax())
    # Shifted first, so that a tiny temperature cannot overflow; a product, since devices divide by scalars differently.
    scores = (scores - scores.max()) * (1.0 / params.temperature)
    scores, token_ids = _candidates(scores, params)
    return ops.sample_gumbel(
        scores,
        token_ids,
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
        biased = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        scores[biased] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
    if _masks_stops(row):
        stops = [i for i in (*params.eos_token_ids, *params.stop_token_ids) if i < raw.shape[0]]
        scores[torch.tensor(stops, dtype=torch.int64, device=device)] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = np.union1d(_integers(row.prompt_token_ids), _integers(row.output_token_ids))
        where = torch.from_numpy(seen).to(device)
        values = scores[where]
        scores[where] = torch.where(
            values > 0, values * (1.0 / params.repetition_penalty), values * params.repetition_penalty
        )
    if (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0) and len(row.output_token_ids):
        produced, counts = np.unique(_integers(row.output_token_ids), return_counts=True)
        penalty = params.frequency_penalty * counts.astype(np.float32) + np.float32(params.presence_penalty)
        scores[torch.from_numpy(produced).to(device)] -= torch.from_numpy(penalty.astype(np.float32)).to(device)
    return scores


def _integers(token_ids: Sequence[int]) -> np.ndarray:
    return np.asarray(token_ids, dtype=np.int64)


def _candidates(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What top_k, top_p and min_p leave of the scores [vocab], and their token ids; None for ids means all, in order.

    Tokens tied with the last one kept are kept too, so the outcome does not hang on the order of equals.
    """
    vocab_size = scores.shape[0]
    limits_k = 0 < params.top_k < vocab_size
    if limits_k:
        least = torch.topk(scores, params.top_k).values[-1]
    elif params.top_p < 1.0:
        least = _top_p_threshold(scores, params.top_p)
    elif params.min_p > 0.0:
        least = scores.max() + np.log(params.min_p)
    else:
        return scores, None
    token_ids = (scores >= least).nonzero().flatten()
    kept = scores[token_ids]
    if limits_k and params.top_p < 1.0:
        inner = kept >= _top_p_threshold(kept, params.top_p)
        token_ids, kept = token_ids[inner], kept[inner]
    if params.min_p > 0.0:
        inner = kept >= kept.max() + np.log(params.min_p)
        token_ids, kept = token_ids[inner], kept[inner]
    return kept, token_ids


def _top_p_threshold(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least score of the smallest set of largest scores whose probability reaches `top_p`.

    Sorts no more than it must: first the few largest, and more only when these do not reach it.
    """
    total = torch.logsumexp(scores, dim=-1)
    size = min(_FIRST_CANDIDATES, scores.shape[0])
    while True:
        values = torch.topk(scores, size).values  # descending
        reached = torch.exp(values - total).to(torch.float64).cumsum(dim=-1)
        if size == scores.shape[0] or bool(reached[-1] >= top_p):
            break
        size = min(size * 8, scores.shape[0])
    # The first place that reaches top_p; rounding may keep even the last from it.
    place = int((reached < top_p).sum())
    return values[min(place, size - 1)]
