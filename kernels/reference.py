"""What every operation of `ops.py` must compute, written to be read: the oracle of the tests, slow on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def noise_key(seed: int, sequence_index: int, position: int) -> tuple[int, int]:
    """Two 32-bit words that stand for one place of one stream of tokens.

    A chain of splitmix64 finalisers (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
    """
    state = 0
    for word in (seed, sequence_index, position):
        state = _splitmix64(state ^ (word & _MASK_64))
    return state >> 32, state & _MASK_32


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def noise_bits(key: tuple[int, int], token_id: int) -> int:
    """31 random bits of one token at one place.

    The mixer is `lowbias32` of Chris Wellons' hash-prospector, public domain:
    https://github.com/skeeto/hash-prospector
    """
    mixed = _lowbias32(token_id ^ key[0])
    return _lowbias32((mixed + key[1]) & _MASK_32) & 0x7FFFFFFF


def _lowbias32(value: int) -> int:
    value ^= value >> 16
    value = (value * 0x7FEB352D) & _MASK_32
    value ^= value >> 15
    value = (value * 0x846CA68B) & _MASK_32
    return value ^ (value >> 16)


def gumbel(bits: int) -> float:
    """Standard Gumbel noise of 31 random bits, to the precision of the platform's logarithm."""
    uniform = (bits + 0.5) / 2**31
    return -math.log(-math.log1p(-uniform))


def write_kv(pool: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slots: Sequence[int]) -> None:
    """Put `key` and `value` [T, kv_heads, head_dim] into `pool` [N, L, 2, kv_heads, block_size, head_dim]."""
    block_size = pool.shape[4]
    for token, slot in enumerate(slots):
        pool[slot // block_size, layer, 0, :, slot % block_size] = key[token]
        pool[slot // block_size, layer, 1, :, slot % block_size] = value[token]


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    *,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged queries `[T, heads, head_dim]` over the pool, one query at a time, in float64."""
    block_size = pool.shape[4]
    num_heads, kv_heads = query.shape[1], pool.shape[3]
    output = torch.empty_like(query)
    for sequence, context_len in enumerate(context_lens):
        blocks = pool[list(block_tables[sequence])[: -(-context_len // block_size)], layer].double()
        # [blocks, 2, kv_heads, block_size, head_dim] -> [2, kv_heads, tokens, head_dim]
        keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)
        first, last = query_starts[sequence], query_starts[sequence + 1]
        for row in range(first, last):
            position = context_len - (last - row)
            start = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // kv_heads)
                scores = keys[kv_head, start : position + 1] @ query[row, head].double() * scale
                if soft_cap is not None:
                    scores = (scores / soft_cap).tanh() * soft_cap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = scores.softmax(-1)[: position + 1 - start]
                output[row, head] = weights @ values[kv_head, start : position + 1]
    return output
