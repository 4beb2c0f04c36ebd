"""Single operations of the compiled CPU kernels: paged attention, and products with weights."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import ELEMENT_TYPES, CpuLibrary, check_status


class _AttentionCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "num_tokens", "num_sequences", "heads", "kv_heads", "head_dim", "block_size", "num_blocks", "num_layers",
            "layer", "table_stride", "kv_type", "window",
        )),
        *((name, ctypes.c_void_p) for name in (
            "query_starts", "context_lens", "block_tables", "pool", "query", "output", "sinks",
        )),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )  # fmt: skip


class _ProductCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "rows", "depth", "weight_type")),
        *((name, ctypes.c_void_p) for name in ("tokens", "weights", "bias", "output")),
    )


_MOST_HEAD_DIM = 512
"""kMostHeadDim of kernels/cpu/interface.h."""


def can_attend(pool: torch.Tensor) -> bool:
    """Whether `paged_attention` takes a pool of this kind."""
    return pool.dtype in ELEMENT_TYPES and pool.shape[5] <= _MOST_HEAD_DIM


def paged_attention(
    library: CpuLibrary,
    pool: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_threads: int = 1,
) -> torch.Tensor:
    """Causal attention of a ragged batch over everything its sequences have in the pool, computed in float32.

    Args:
        library: the compiled kernels.
        pool: `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`, contiguous, float32 or bfloat16.
        layer: which layer of it.
        query: [T, heads, head_dim] of any float dtype; heads is a multiple of kv_heads.
        query_starts: [S + 1] int64.
        context_lens: [S] int64, the new tokens included, which must have been written already.
        block_tables: [S, longest] int64.
        scale: factor on the scores.
        window: how many tokens back a query sees, itself included; None is all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
        sinks: [heads], a score for each head that takes part in its softmax and has no value.
        num_threads: that share the work, the caller included.

    Returns:
        [T, heads, head_dim] of query's dtype.

    Raises:
        ValueError: dtypes are not supported, or a number is out of range.
    """
    num_blocks, num_layers, _, kv_heads, block_size, head_dim = pool.shape
    num_tokens, heads, _ = query.shape
    if pool.dtype not in ELEMENT_TYPES or not pool.is_contiguous() or not 0 <= layer < num_layers or heads % kv_heads:
        raise ValueError(f"a pool of {pool.dtype} {list(pool.shape)} does not fit {heads} heads of layer {layer}")
    wide = query.float().contiguous()
    output = torch.empty_like(wide)
    starts, lengths, tables = query_starts.contiguous(), context_lens.contiguous(), block_tables.contiguous()
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    call = _AttentionCall(
        num_tokens,
        lengths.shape[0],
        heads,
        kv_heads,
        head_dim,
        block_size,
        num_blocks,
        num_layers,
        layer,
        tables.shape[1],
        ELEMENT_TYPES[pool.dtype],
        window or 0,
        starts.data_ptr(),
        lengths.data_ptr(),
        tables.data_ptr(),
        pool.data_ptr(),
        wide.data_ptr(),
        output.data_ptr(),
        None if wide_sinks is None else wide_sinks.data_ptr(),
        scale,
        soft_cap or 0.0,
    )
    check_status(library.attention(ctypes.byref(call), num_threads))
    return output.to(query.dtype)


def product(
    library: CpuLibrary,
    tokens: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_threads: int = 1,
) -> torch.Tensor:
    """`tokens @ weights.T + bias`: [T, depth] float32, [rows, depth] float32 or bfloat16; [T, rows] float32."""
    if tokens.dtype != torch.float32 or weights.dtype not in ELEMENT_TYPES or tokens.shape[1] != weights.shape[1]:
        raise ValueError(f"{tokens.dtype} {list(tokens.shape)} does not fit {weights.dtype} {list(weights.shape)}")
    tokens, weights = tokens.contiguous(), weights.contiguous()
    output = torch.empty(tokens.shape[0], weights.shape[0])
    call = _ProductCall(
        *tokens.shape[:1],
        *weights.shape,
        ELEMENT_TYPES[weights.dtype],
        tokens.data_ptr(),
        weights.data_ptr(),
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
    )
    check_status(library.product(ctypes.byref(call), num_threads))
    return output
