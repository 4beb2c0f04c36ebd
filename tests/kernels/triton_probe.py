"""Kernels that show what device functions of the sampler compute. Defined anew by each test that runs them."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_sampling import _exact_gumbel, _noise_bits, _rough_gumbel


@triton.jit
def noise(exact, rough, bits, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    values = tl.load(bits + places)
    tl.store(exact + places, _exact_gumbel(values))
    tl.store(rough + places, _rough_gumbel(values))


@triton.jit
def bits(output, keys, token_ids, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(output + places, _noise_bits(keys, 0, tl.load(token_ids + places)))
