"""What stands between a layer's matrix products on a GPU, in Triton: RMSNorm, rotary embedding, SiLU times up.

Each takes bfloat16, float16 or float32 tensors whose last dimension has stride 1, computes in float32 and rounds once,
except where a model's own definition rounds in between and says so here. Rows are independent and each is reduced in an
order that follows from its length alone.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_ELEMENTS = 2048
"""Short rows share a program up to so many elements."""


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    output,
    sums,
    values,
    residual,
    weight,
    num_rows,
    values_stride,
    residual_stride,
    epsilon,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, PADDED_WIDTH)[None, :]
    held = (rows < num_rows) & (columns < WIDTH)
    x = tl.load(values + rows * values_stride + columns, mask=held, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual + rows * residual_stride + columns, mask=held, other=0.0).to(tl.float32)
        rounded = x.to(sums.dtype.element_ty)
        tl.store(sums + rows * WIDTH + columns, rounded, mask=held)
        x = rounded.to(tl.float32)
    mean_square = tl.sum(x * x, 1) / WIDTH
    x = x * (1.0 / tl.sqrt(mean_square + epsilon))[:, None]
    if ROUNDS_FIRST:
        x = x.to(output.dtype.element_ty).to(tl.float32)
    factors = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32) + weight_offset
    tl.store(output + rows * WIDTH + columns, (x * factors).to(output.dtype.element_ty), mask=held)


def rms_norm(
    values: torch.Tensor,
    weight: torch.Tensor,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    rounds_first: bool = True,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root mean square normalisation (Zhang, Sennrich 2019), after adding a residual where one is given.

    Args:
        values: [T, width], rows at any distance.
        weight: [width].
        epsilon: added to the mean square.
        weight_offset: added to the weight; Gemma stores it less 1.
        rounds_first: whether the normalised row is rounded to the dtype before the weight, as llama does.
        residual: [T, width], added to `values` first and the sum rounded.

    Returns:
        The normalised rows and what was normalised (`values` itself without a residual), each [T, width].
    """
    num_rows, width = values.shape
    for name, tensor in (("values", values), ("residual", residual)):
        if tensor is not None and (tensor.shape != values.shape or tensor.stride(1) != 1):
            raise ValueError(f"{name} must be [{num_rows}, {width}] with rows contiguous")
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"weight must be [{width}] and contiguous")
    output = values.new_empty(num_rows, width)
    sums = values if residual is None else values.new_empty(num_rows, width)
    if num_rows:
        padded = triton.next_power_of_2(width)
        rows = max(1, _TILE_ELEMENTS // padded)
        _rms_norm_kernel[(-(-num_rows // rows),)](
            output,
            sums,
            values,
            values if residual is None else residual,
            weight,
            num_rows,
            values.stride(0),
            0 if residual is None else residual.stride(0),
            epsilon,
            weight_offset,
            HAS_RESIDUAL=residual is not None,
            ROUNDS_FIRST=rounds_first,
            WIDTH=width,
            PADDED_WIDTH=padded,
            ROWS=rows,
            num_warps=4 if padded <= 2048 else 8 if padded <= 8192 else 16,
        )
    return output, sums


@triton.jit
def _rotary_kernel(
    query,
    key,
    cosines,
    sines,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    angle_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """All heads of one token, queries then keys."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, PADDED_HEADS).to(tl.int64)[:, None]
    dims = tl.arange(0, PADDED_HALF)[None, :]
    cosine = tl.load(cosines + token * angle_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sines + token * angle_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)

    is_query = heads < HEADS
    query_places = query + token * query_token_stride + heads * query_head_stride + dims
    query_held = is_query & (dims < HALF)
    key_places = key + token * key_token_stride + (heads - HEADS) * key_head_stride + dims
    key_held = (heads >= HEADS) & (heads < HEADS + KV_HEADS) & (dims < HALF)

    first = tl.load(query_places, mask=query_held, other=0.0).to(tl.float32)
    second = tl.load(query_places + HALF, mask=query_held, other=0.0).to(tl.float32)
    first += tl.load(key_places, mask=key_held, other=0.0).to(tl.float32)
    second += tl.load(key_places + HALF, mask=key_held, other=0.0).to(tl.float32)

    rotated_first = first * cosine - second * sine
    rotated_second = second * cosine + first * sine
    tl.store(query_places, rotated_first.to(query.dtype.element_ty), mask=query_held)
    tl.store(query_places + HALF, rotated_second.to(query.dtype.element_ty), mask=query_held)
    tl.store(key_places, rotated_first.to(key.dtype.element_ty), mask=key_held)
    tl.store(key_places + HALF, rotated_second.to(key.dtype.element_ty), mask=key_held)


def rotary(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Turn queries and keys by their positions, in place (Su et al. 2021), the two halves of a head being the pairs.

    Args:
        query: [T, heads, head_dim]; tokens and heads at any distance.
        key: [T, kv_heads, head_dim].
        cosines: [T, rotated] with `rotated` even and at most head_dim, its halves equal; the rest of a head stays.
        sines: the same.
    """
    num_tokens, num_heads, head_dim = query.shape
    rotated = cosines.shape[-1]
    if key.shape[0] != num_tokens or key.shape[2] != head_dim or query.stride(2) != 1 or key.stride(2) != 1:
        raise ValueError(f"a key of {list(key.shape)} does not fit a query of {list(query.shape)}")
    if cosines.shape != (num_tokens, rotated) or sines.shape != cosines.shape or rotated % 2 or rotated > head_dim:
        raise ValueError(f"cosines and sines must be [{num_tokens}, rotated], rotated even and at most {head_dim}")
    if cosines.stride(1) != 1 or sines.stride() != cosines.stride():
        raise ValueError("cosines and sines must be laid out alike, rows contiguous")
    if num_tokens == 0:
        return
    total_heads = triton.next_power_of_2(num_heads + key.shape[1])
    padded = triton.next_power_of_2(rotated // 2)
    _rotary_kernel[(num_tokens,)](
        query,
        key,
        cosines,
        sines,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cosines.stride(0),
        HEADS=num_heads,
        KV_HEADS=key.shape[1],
        PADDED_HEADS=total_heads,
        HALF=rotated // 2,
        PADDED_HALF=padded,
        num_warps=4 if total_heads * padded <= 4096 else 8,
    )


@triton.jit
def _silu_mul_kernel(output, gate, up, gate_stride, up_stride, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """One chunk of one row."""
    NUM_CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    row = (tl.program_id(0) // NUM_CHUNKS).to(tl.int64)
    columns = tl.program_id(0) % NUM_CHUNKS * CHUNK + tl.arange(0, CHUNK)
    held = columns < WIDTH
    x = tl.load(gate + row * gate_stride + columns, mask=held, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + columns, mask=held, other=0.0).to(tl.float32)
    activated = x / (1.0 + tl.exp2(x * -1.4426950408889634))
    tl.store(output + row * WIDTH + columns, (activated * y).to(output.dtype.element_ty), mask=held)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, [T, width] each and in the result; both may be halves of one tensor."""
    num_rows, width = gate.shape
    if up.shape != gate.shape or gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError(f"up must be [{num_rows}, {width}] as gate is, with rows contiguous")
    output = gate.new_empty(num_rows, width)
    if num_rows:
        chunk = min(1024, triton.next_power_of_2(width))
        # One axis: the others of a grid end at 65535.
        _silu_mul_kernel[(num_rows * -(-width // chunk),)](
            output, gate, up, gate.stride(0), up.stride(0), WIDTH=width, CHUNK=chunk, num_warps=4
        )
    return output
