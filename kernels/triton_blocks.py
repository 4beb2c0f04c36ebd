"""Moves whole blocks of KV on a GPU, in Triton: pool to contiguous staging, staging to pool, block to block.

Shapes: a pool `[num_blocks, ...]` or a range of its layers `pool[:, first:last]`, each block of which is one contiguous
run; staging `[n, ...]` of the same inner shape and dtype, contiguous; block ids `[n]` int64. Offsets are int64.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK_BYTES = 16384
"""What one program moves."""


@triton.jit
def _move_kernel(
    target,
    source,
    target_ids,
    source_ids,
    target_stride,
    source_stride,
    num_words,
    HAS_TARGET_IDS: tl.constexpr,
    HAS_SOURCE_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one block, in words of 8, 4, 2 or 1 bytes."""
    num_chunks = tl.cdiv(num_words, CHUNK)
    place = (tl.program_id(0) // num_chunks).to(tl.int64)
    target_block = place
    source_block = place
    if HAS_TARGET_IDS:
        target_block = tl.load(target_ids + place)
    if HAS_SOURCE_IDS:
        source_block = tl.load(source_ids + place)
    words = (tl.program_id(0) % num_chunks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    held = words < num_words
    data = tl.load(source + source_block * source_stride + words, mask=held)
    tl.store(target + target_block * target_stride + words, data, mask=held)


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy `pool[block_ids]` to `staging`."""
    _move(staging, pool, None, block_ids)


def scatter_blocks(staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Copy `staging` to `pool[block_ids]`; no id may occur twice."""
    _move(pool, staging, block_ids, None)


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy `pool[sources]` to `pool[targets]`; no target may be a source or occur twice."""
    _move(pool, pool, targets, sources)


def _move(
    target: torch.Tensor, source: torch.Tensor, target_ids: torch.Tensor | None, source_ids: torch.Tensor | None
) -> None:
    given = [ids for ids in (target_ids, source_ids) if ids is not None]
    count = given[0].shape[0]
    if target.dtype != source.dtype or target.shape[1:] != source.shape[1:]:
        raise ValueError(f"blocks of {source.dtype} {list(source.shape[1:])} do not fit {list(target.shape[1:])}")
    for ids in given:
        if ids.dtype != torch.int64 or ids.shape != (count,) or not ids.is_contiguous():
            raise ValueError("block ids must be int64, contiguous and as many on both sides")
    for tensor, own_ids in ((target, target_ids), (source, source_ids)):
        if own_ids is None and tensor.shape[0] != count:
            raise ValueError(f"staging holds {tensor.shape[0]} blocks, not {count}")
        if not tensor[:1].is_contiguous():
            raise ValueError("a block must be one contiguous run")
    if count == 0:
        return
    size = target.element_size()
    block_bytes = target[:1].numel() * size
    # The widest word that divides the blocks, the distances between them and the places where they begin.
    strides = [tensor.stride(0) * size for tensor in (target, source)]
    offsets = [tensor.storage_offset() * size for tensor in (target, source)]
    width = next(w for w in (8, 4, 2, 1) if not any(value % w for value in (block_bytes, *strides, *offsets)))
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    num_words, chunk = block_bytes // width, _CHUNK_BYTES // width
    chunk = min(chunk, triton.next_power_of_2(num_words))
    # One axis: the others of a grid end at 65535. Ids that are not given are never read; any pointer will do.
    _move_kernel[(count * -(-num_words // chunk),)](
        _as_words(target, words),
        _as_words(source, words),
        given[0] if target_ids is None else target_ids,
        given[0] if source_ids is None else source_ids,
        strides[0] // width,
        strides[1] // width,
        num_words,
        HAS_TARGET_IDS=target_ids is not None,
        HAS_SOURCE_IDS=source_ids is not None,
        CHUNK=chunk,
        num_warps=8,
    )


def _as_words(tensor: torch.Tensor, words: torch.dtype) -> torch.Tensor:
    """The first block, whose place is what a kernel needs, as words."""
    return tensor[0].view(-1).view(words)
