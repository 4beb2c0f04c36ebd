"""Chooses tokens in torch, on any device: what the compiled sampler must choose too, token by token.

    logits ──> scores = (logits - largest) * (1 / temperature), float32
        └─> top_k, top_p, min_p: each a least score; tokens at least as good as the greatest of the three are kept
              └─> the largest score plus noise

Nothing here hangs on the order in which a device adds, or on its exponential or logarithm: a token's weight is a whole
number, made from products and sums that are rounded one by one, and what decides a draw is such float64 arithmetic too.
So a row gives the same token in any company, on any device and by any sampler. Of equals all are kept by a filter, and
the lowest id wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kernels.token_choice import RankedTokens, TokenChoice, natural_log

_FIRST_CANDIDATES = 256
"""How many of the largest scores top_p looks at before it looks at more."""

_WINNERS_MARGIN = 1.0
"""How far below the best approximate score the true winner can lie. Float32 is off by less than 0.4 at the worst place
of the noise (uniforms next to 1) and by less than 0.01 elsewhere."""

WEIGHT_BITS = 40
"""The weight of the most likely token is 2 to this power. Sums of 2^22 weights are exact in 64 bits, and what rounding
takes from 2^17 of them together is less than a ten-millionth of the whole."""

Draw = Callable[[torch.Tensor, Sequence[TokenChoice]], torch.Tensor]
"""From scores [R, vocab], -inf where a token is not kept, to the tokens [R] int64 of the largest scores plus noise."""

# ------------------------------------------------------------------------------------------------ counter-based noise


def noise_bits(key: tuple[int, int], token_ids: torch.Tensor) -> torch.Tensor:
    """31 random bits for each token id, int32 in and out: the mixer of `reference.noise_bits`."""
    mixed = _lowbias32(token_ids ^ _signed(key[0]))
    return _lowbias32(mixed + _signed(key[1])) & 0x7FFFFFFF


def _lowbias32(value: torch.Tensor) -> torch.Tensor:
    # int32 products wrap; shifts are arithmetic, so their copies of the sign are masked off.
    value = value ^ ((value >> 16) & 0xFFFF)
    value = value * 0x7FEB352D
    value = value ^ ((value >> 15) & 0x1FFFF)
    value = value * _signed(0x846CA68B)
    return value ^ ((value >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def gumbel(bits: int) -> float:
    """Standard Gumbel noise of 31 random bits, on the host; the same bits on every machine."""
    # With 31 bits, 1 - uniform is exact.
    return -natural_log(-natural_log(1.0 - (bits + 0.5) * 2.0**-31))


def sample_gumbel(scores: torch.Tensor, token_ids: torch.Tensor | None, key: tuple[int, int]) -> int:
    """The token with the largest score plus noise: one draw from softmax(scores).

    Args:
        scores: [candidates] float32, at least one finite; -inf is never drawn.
        token_ids: [candidates] int64 the noise belongs to; None is 0, 1, 2...
        key: of the noise, see `reference.noise_key`.
    """
    if token_ids is None:
        ids = torch.arange(scores.shape[0], dtype=torch.int32, device=scores.device)
    else:
        ids = token_ids.to(torch.int32)
    bits = noise_bits(key, ids)
    # A first pass in float32 leaves the few that can win; only these, about three, get exact noise.
    uniform = (bits.to(torch.float32) + 0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    rough = scores - uniform.neg_().log1p_().neg_().log_()
    near = (rough >= rough.max() - _WINNERS_MARGIN).nonzero().flatten()
    # Waits for the device: the drawn token is needed on the host anyway. Of equal sums the lowest id wins.
    finalists = zip(scores[near].tolist(), bits[near].tolist(), ids[near].tolist(), strict=True)
    _, negative_id = max((score + gumbel(noise), -int(token_id)) for score, noise, token_id in finalists)
    return -negative_id


def draw_on_host(scores: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """The Draw for a CPU: row by row."""
    tokens = []
    for row, choice in zip(scores, choices, strict=True):
        kept = (row > -torch.inf).nonzero().flatten()
        everything = kept.shape[0] == row.shape[0]
        tokens.append(sample_gumbel(row if everything else row[kept], None if everything else kept, choice.key))
    return torch.tensor(tokens, dtype=torch.int64)


# ------------------------------------------------------------------------------------------------------------ weights


def weights(scores: torch.Tensor) -> torch.Tensor:
    """e^score in units of 2^-WEIGHT_BITS, int64, for float32 scores of at most 0.

    Range reduction and polynomial of expf in Moshier's Cephes library, within 2 units in the last place of float32.
    Every operation rounds by itself, as torch's do; the compiled sampler keeps to that.
    """
    bounded = scores.clamp(min=-64.0)
    whole = (bounded * 1.44269504088896341).round_()
    rest = bounded - whole * 0.693359375
    rest = rest + whole * 2.12194440e-4
    series = torch.full_like(rest, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series.mul_(rest).add_(coefficient)
    fraction = series.mul_(rest * rest).add_(rest).add_(1.0)
    power = ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
    return (fraction * power).double().mul_(2.0**WEIGHT_BITS).round_().to(torch.int64)


# ----------------------------------------------------------------------------------------------------------- choosing


def choose(logits: torch.Tensor, choices: Sequence[TokenChoice], draw: Draw) -> list[int]:
    """One token for each row of `logits` [R, vocab] float32; -1 for a row with NaN, +inf, or nothing but -inf.

    Waits for the device when the tokens are there and, where top_p is wanted, once or a few times before.
    """
    # One pass finds the greedy token and every bad row: a NaN anywhere becomes the maximum. Of equals the first wins.
    largest, tokens = logits.max(dim=-1)
    is_good = largest.isfinite()
    if any(choice.scale for choice in choices):
        device = logits.device
        # A product, since devices divide by scalars differently; shifted first, so that it cannot overflow.
        scale = torch.tensor([choice.scale for choice in choices], dtype=torch.float32, device=device)
        scores = (logits - largest[:, None]) * scale[:, None]
        is_drawn = is_good & (scale > 0.0)
        scores.masked_fill_(~is_drawn[:, None], 0.0)
        if any(choice.top_k or choice.top_p < 1.0 or choice.min_p for choice in choices):
            scores.masked_fill_(scores < _least_scores(scores, choices)[:, None], -torch.inf)
        tokens = torch.where(is_drawn, draw(scores, choices), tokens)
    result: list[int] = torch.where(is_good, tokens, -1).tolist()
    return result


def _least_scores(scores: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """What top_k, top_p and min_p leave of scores [R, vocab]: those of at least the result [R].

    top_p is the least score v for which the weights of what top_k leaves, of v and above, reach top_p of their total.
    """
    vocab_size, device = scores.shape[1], scores.device
    least = torch.tensor([choice.least_score for choice in choices], dtype=torch.float32, device=device)
    counts = [choice.top_k if 0 < choice.top_k < vocab_size else vocab_size for choice in choices]
    limits_k = min(counts) < vocab_size
    limits_p = any(choice.top_p < 1.0 for choice in choices)
    if not (limits_k or limits_p):
        return least
    size = max(count if count < vocab_size else 0 for count in counts)
    size = min(max(size, _FIRST_CANDIDATES if limits_p else 0), vocab_size)
    values = torch.topk(scores, size).values  # descending
    if limits_k:
        places = torch.tensor([[min(count, size) - 1] for count in counts], device=device)
        is_limited = torch.tensor([[count < vocab_size] for count in counts], device=device)
        least_k = values.gather(1, places).masked_fill_(~is_limited, -torch.inf)
        least = torch.maximum(least, least_k[:, 0])
    else:
        least_k = torch.full((len(choices), 1), -torch.inf, device=device)
    if limits_p:
        share = torch.tensor([[choice.top_p] for choice in choices], dtype=torch.float64, device=device)
        is_limited = share < 1.0
        total = _kept_weights(scores, least_k).sum(-1, keepdim=True)
        needed = torch.where(is_limited, share * total.double(), 0.0)
        # Sorts no more than it must: first the few largest, and more only when these do not reach it.
        while True:
            is_short = _kept_weights(values, least_k).cumsum(-1).double() < needed
            if size == vocab_size or not bool(is_short[:, -1].any()):
                break
            size = min(size * 8, vocab_size)
            values = torch.topk(scores, size).values
        least_p = values.gather(1, is_short.sum(-1, keepdim=True)).masked_fill_(~is_limited, -torch.inf)
        least = torch.maximum(least, least_p[:, 0])
    return least


def _kept_weights(scores: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    return weights(scores).masked_fill_(scores < least, 0)


# ------------------------------------------------------------------------------------------------------------ ranking


def rank(row: torch.Tensor, token: int, count: int) -> RankedTokens | None:
    """About one token of a row of logits [vocab] float32, and about the `count` most likely; None as -1 of `choose`."""
    largest, chosen = row.max(), row[token]
    if not bool(largest.isfinite()):
        return None
    total = int(weights(row - largest).sum())
    rank = 1 + int((row > chosen).sum())
    top: list[tuple[float, int]] = []
    if count:
        least = torch.topk(row, min(count, row.shape[0])).values[-1]
        token_ids = (row >= least).nonzero().flatten()
        pairs = zip(row[token_ids].tolist(), token_ids.tolist(), strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:count]
    return ranked(float(largest), total, float(chosen), rank, top)


def ranked(largest: float, total: int, chosen: float, rank: int, top: Sequence[tuple[float, int]]) -> RankedTokens:
    """From logits to log probabilities.

    Args:
        largest: logit.
        total: of all weights.
        chosen: logit of the token that was asked about.
        rank: its rank.
        top: logits and ids of the most likely tokens.
    """
    normaliser = largest + math.log(total * 2.0**-WEIGHT_BITS)
    return RankedTokens(chosen - normaliser, rank, [(token, logit - normaliser) for logit, token in top])
