"""Draws tokens on a GPU, in Triton: the largest score plus counter-based noise of every row, to the very bit.

Shapes: scores `[R, vocab]` float32, rows contiguous; keys `[R, 2]` int64, each the two 32-bit words of `noise_key`.
Tokens are those of `torch_sampling.sample_gumbel`: the noise that decides is computed in float64 from IEEE additions,
products and quotients only, in the same order as on the host and never fused. As there, float32 finds the few that can
win.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.reference import noise_key
from kernels.token_choice import TokenChoice

_CHUNK = 1024
"""Scores that one program looks at."""

_NOT_A_TOKEN = tl.constexpr(1 << 30)


@triton.jit
def _mix(value):
    """lowbias32 (reference.py), uint32."""
    value = value ^ (value >> 16)
    value = value * 0x7FEB352D
    value = value ^ (value >> 15)
    value = value * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _noise_bits(keys, row, token_ids):
    """31 random bits of each token, int32."""
    first = tl.load(keys + row * 2).to(tl.uint32)
    second = tl.load(keys + row * 2 + 1).to(tl.uint32)
    mixed = _mix(token_ids.to(tl.uint32) ^ first)
    return (_mix(mixed + second) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _rough_gumbel(bits):
    """Gumbel noise in float32, off by less than 0.01: -ln(-ln(1 - u)) with u = (bits + 1/2) / 2^31."""
    uniform = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10
    # What is left of 1 has to come from the integer: in float32 it would be 0 next to the end.
    rest = ((0x7FFFFFFF - bits).to(tl.float32) + 0.5) * 4.656612873077393e-10
    small = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333333333))
    exponential = tl.where(uniform < 0.01, small, -tl.log(rest))
    return -tl.log(exponential)


@triton.jit
def _natural_log(value):
    """ln of float64 numbers above 0, as `token_choice.py` computes it: 2 artanh((m - 1) / (m + 1)) + e ln 2."""
    raw = value.to(tl.int64, bitcast=True)
    exponent = ((raw >> 52) & 0x7FF) - 1022
    mantissa = ((raw & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    low = mantissa < 0.7071067811865476
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    exponent = tl.where(low, exponent - 1, exponent)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = square * 0.0
    for place in tl.static_range(13):
        series = series * square + 1.0 / (25 - 2 * place)
    return exponent.to(tl.float64) * 0.6931471805599453 + (ratio * 2.0) * series


@triton.jit
def _exact_gumbel(bits):
    uniform = (bits.to(tl.float64) + 0.5) * 4.656612873077393e-10
    return -_natural_log(-_natural_log(1.0 - uniform))


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
def _rough_kernel(maxima, scores, keys, scores_stride, vocab_size, num_chunks, CHUNK: tl.constexpr):
    """The largest approximate sum of one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    held = token_ids < vocab_size
    values = tl.load(scores + row * scores_stride + token_ids, mask=held, other=float("-inf"))
    rough = values + _rough_gumbel(_noise_bits(keys, row, token_ids))
    tl.store(maxima + row * num_chunks + chunk, tl.max(rough, 0))


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
def _draw_kernel(
    tokens,
    maxima,
    scores,
    keys,
    scores_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """One row: exact sums in the few chunks that can hold the winner. Of equal sums the lowest id wins."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    rough_maxima = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    largest = tl.max(rough_maxima, 0)
    # Rounding of sums far from 0 comes on top of what the noise is off by.
    least = largest - 1.0 - tl.abs(largest) * 2.384185791015625e-07
    possible = rough_maxima >= least
    best = tl.full([1], float("-inf"), tl.float64)
    winner = tl.full([1], _NOT_A_TOKEN, tl.int32)
    chunk = tl.min(tl.where(possible, chunks, PADDED_CHUNKS), 0)
    while chunk < num_chunks:
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        held = token_ids < vocab_size
        values = tl.load(scores + row * scores_stride + token_ids, mask=held, other=float("-inf"))
        bits = _noise_bits(keys, row, token_ids)
        finalist = held & (values + _rough_gumbel(bits) >= least)
        exact = tl.where(finalist, values.to(tl.float64) + _exact_gumbel(bits), float("-inf"))
        chunk_best = tl.max(exact, 0)
        chunk_winner = tl.min(tl.where(finalist & (exact == chunk_best), token_ids, _NOT_A_TOKEN), 0)
        winner = tl.where(chunk_best > best, chunk_winner, winner)
        best = tl.maximum(best, chunk_best)
        chunk = tl.min(tl.where(possible & (chunks > chunk), chunks, PADDED_CHUNKS), 0)
    tl.store(tokens + row + tl.arange(0, 1), winner.to(tl.int64))


def noise_keys(places: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Keys `[R, 2]` int64, on the host, for rows of (seed, sequence index, position)."""
    return torch.tensor([noise_key(*place) for place in places], dtype=torch.int64).view(-1, 2)


def sample_gumbel(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One draw from softmax of each row; nothing waits for the device.

    Args:
        scores: [R, vocab] float32, rows contiguous, each with a finite score; -inf is never drawn. Candidates that
            top_k and the like removed are -inf here.
        keys: [R, 2] int64 on the same device, see `noise_keys`.

    Returns:
        [R] int64 token ids. For a row without a finite score an id past the vocabulary.
    """
    num_rows, vocab_size = scores.shape
    if scores.dtype != torch.float32 or scores.stride(1) != 1:
        raise ValueError("scores must be float32 with rows contiguous")
    if keys.shape != (num_rows, 2) or keys.dtype != torch.int64 or not keys.is_contiguous():
        raise ValueError(f"keys must be [{num_rows}, 2] int64 and contiguous")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if num_rows == 0:
        return tokens
    num_chunks = -(-vocab_size // _CHUNK)
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=scores.device)
    _rough_kernel[(num_rows, num_chunks)](
        maxima, scores, keys, scores.stride(0), vocab_size, num_chunks, CHUNK=_CHUNK, num_warps=4
    )
    _draw_kernel[(num_rows,)](
        tokens,
        maxima,
        scores,
        keys,
        scores.stride(0),
        vocab_size,
        num_chunks,
        CHUNK=_CHUNK,
        PADDED_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,
        # A multiply and an add stay two roundings, as on the host.
        enable_fp_fusion=False,
    )
    return tokens


def draw(scores: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """The Draw (torch_sampling.py) for a GPU: all rows at once."""
    keys = noise_keys([(choice.seed, choice.sequence_index, choice.position) for choice in choices])
    return sample_gumbel(scores, keys.to(scores.device, non_blocking=True))
