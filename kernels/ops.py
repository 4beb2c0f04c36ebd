"""What any model computes with: KV writes, paged attention, counter-based noise.

Attention on a CPU is the compiled kernels' where they are, else torch's. Whole batches compiled for a CPU are
`cpu_decoder.py`, a GPU's kernels `triton_*.py`. `reference.py` says what the results of all of them must be.
"""

from __future__ import annotations

import math

import torch

from kernels import cpu_operations, torch_attention
from kernels.cpu_library import load_library
from kernels.paged_plan import PagedPlan as PagedPlan
from kernels.reference import noise_key

# ----------------------------------------------------------------------------------------------------------- paged KV


def write_kv(plan: PagedPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put the new tokens' K and V, `[kv_heads, T, head_dim]` each, into their slots of one layer."""
    head_dim = plan.pool.shape[5]
    rows = plan.layer_rows(layer, head_dim)
    rows.index_copy_(0, plan.key_rows, key.reshape(-1, head_dim).to(rows.dtype))
    rows.index_copy_(0, plan.value_rows, value.reshape(-1, head_dim).to(rows.dtype))


def paged_attention(
    plan: PagedPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over everything its sequences have in the pool.

    The new tokens must have been written already. Softmax is in float32. Results of a sequence do not depend on the
    others in the batch. Slots past a sequence's context are never computed with, so what a block held before reaches
    nobody, NaN included.

    Args:
        plan: of this batch.
        layer: which layer of the pool.
        query: [heads, T, head_dim]; heads is a multiple of kv_heads.
        key: [kv_heads, T, head_dim], the new tokens' own.
        value: the same for values.
        scale: factor on the scores.
        window: how many tokens back a query sees, itself included; None is all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2, arXiv 2408.00118); None leaves them.
        sinks: [heads], a score per head that takes its share of the softmax and gives no value, as a learned key with
            a value of zero would (gpt-oss); None for none.

    Returns:
        [T, heads, head_dim]
    """
    library = load_library() if plan.pool.device.type == "cpu" else None
    if library is not None and cpu_operations.can_attend(plan.pool):
        return cpu_operations.paged_attention(
            library,
            plan.pool,
            layer,
            query.transpose(0, 1),
            query_starts=plan.query_starts_tensor,
            context_lens=plan.context_lens_tensor,
            block_tables=plan.block_tables,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            num_threads=torch.get_num_threads(),
        )
    scoring = torch_attention.Scoring(scale, soft_cap, sinks)
    narrow = (tensor.to(plan.pool.dtype) for tensor in (query, key, value))
    return torch_attention.paged_attention(plan, layer, *narrow, window=window, scoring=scoring).to(query.dtype)


# ------------------------------------------------------------------------------------------------ counter-based noise

_LN_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ARTANH_COEFFICIENTS = tuple(1.0 / divisor for divisor in range(25, 0, -2))
_WINNERS_MARGIN = 1.0
"""How far below the best approximate score the true winner can lie. Float32 is off by less than 0.4 at the worst place
of the noise (uniforms next to 1) and by less than 0.01 elsewhere."""


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
    """Standard Gumbel noise of 31 random bits, on the host.

    Built from IEEE additions, products and quotients only, so that every machine computes the same bits; the logarithms
    of libraries and devices differ in their last place.
    """
    # With 31 bits, 1 - uniform is exact.
    return -_natural_log(-_natural_log(1.0 - (bits + 0.5) * 2.0**-31))


def _natural_log(value: float) -> float:
    """ln of a positive number: 2 artanh((m - 1) / (m + 1)) + e ln 2, with m in [sqrt(1/2), sqrt(2))."""
    mantissa, exponent = math.frexp(value)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = 0.0
    for coefficient in _ARTANH_COEFFICIENTS:
        series = series * square + coefficient
    return exponent * _LN_2 + (ratio * 2.0) * series


def sample_gumbel(
    scores: torch.Tensor, token_ids: torch.Tensor | None, *, seed: int, sequence_index: int, position: int
) -> int:
    """The token with the largest score plus noise: one draw from softmax(scores).

    Args:
        scores: [candidates] float32, at least one finite; -inf is never drawn.
        token_ids: [candidates] int64 the noise belongs to; None is 0, 1, 2...
        seed: with the two below it decides all noise.
        sequence_index: which sequence of the request.
        position: tokens before the drawn one.
    """
    key = noise_key(seed, sequence_index, position)
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
