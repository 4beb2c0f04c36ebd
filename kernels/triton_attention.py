"""Paged attention on a GPU, in Triton: KV writes, prefill of ragged chunks, decode split over the context.

Shapes: pool `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`, contiguous; query `[heads, T, head_dim]`,
new keys and values `[kv_heads, T, head_dim]`, whose last dimension has stride 1; results `[T, heads, head_dim]`.
Dtypes: bfloat16, float16 or float32, the same in the pool and in what is written to it; softmax is in float32. Offsets
into the pool are products of an int64 block id, so a pool may be of any size.

Head dimensions are multiples of 16; between powers of two they are padded in registers only.

The result for a query depends on its own sequence alone, to the bit: tiles of keys start at absolute multiples of a
fixed width, keys a row may not see are exact no-ops, every multiply-add is explicit, and the number of splits of a
decode follows from the sequence's own context. For the same reason it does not matter how a prompt was cut into chunks,
except that a chunk of one token is computed as a decode, whose bits differ.

Algorithms: online softmax (Milakov, Gimelshein 2018), FlashAttention-2 (Dao 2023), Flash-Decoding's split over keys
(Dao et al. 2023), PagedAttention (Kwon et al. 2023).
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)

_MIN_SPLIT_TOKENS = tl.constexpr(256)
_MAX_SPLITS = tl.constexpr(32)
"""A decoding sequence is split into runs of at least so many tokens and into at most so many runs."""


# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _attend_range(
    accumulator,  # [M, PADDED_DIM] float32, not yet divided by the total
    maximum,  # [M] float32, of the scores in units of log2
    total,  # [M] float32
    query,  # [M, PADDED_DIM]
    positions,  # [M] of the queries
    key_pool,  # where the K of this layer and KV head begin, in block 0
    table,  # where the sequence's block ids begin
    context_len,
    first,  # key positions [first, last), first a multiple of BLOCK_N
    last,
    window,
    raw_scale,  # raw scores times this are what is capped; 1 without a cap
    soft_cap,
    exponent_scale,  # scores times this are in units of log2
    block_stride,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes the keys of a range into the running softmax. Without MASKED every row sees every key of it."""
    dims = tl.arange(0, PADDED_DIM)
    columns = tl.arange(0, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N):
        key_positions = start + columns
        # [BLOCK_N] int64
        if MASKED:
            written = key_positions < context_len
            blocks = tl.load(table + key_positions // BLOCK_SIZE, mask=written, other=0)
        else:
            blocks = tl.load(table + key_positions // BLOCK_SIZE)
        rows = blocks * block_stride + (key_positions % BLOCK_SIZE) * HEAD_DIM
        # Slots past the context are never read, so that what they held before, NaN included, reaches nobody.
        if MASKED:
            loaded = written[:, None] if PADDED_DIM == HEAD_DIM else written[:, None] & (dims[None, :] < HEAD_DIM)
            keys = tl.load(key_pool + rows[:, None] + dims[None, :], mask=loaded, other=0.0)
            values = tl.load(key_pool + KV_STRIDE + rows[:, None] + dims[None, :], mask=loaded, other=0.0)
        else:
            if PADDED_DIM == HEAD_DIM:
                keys = tl.load(key_pool + rows[:, None] + dims[None, :])
                values = tl.load(key_pool + KV_STRIDE + rows[:, None] + dims[None, :])
            else:
                held = dims[None, :] < HEAD_DIM
                keys = tl.load(key_pool + rows[:, None] + dims[None, :], mask=held, other=0.0)
                values = tl.load(key_pool + KV_STRIDE + rows[:, None] + dims[None, :], mask=held, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if HAS_SOFT_CAP:
            # cap * tanh(x / cap), with tanh(y) = 1 - 2 / (1 + exp(2 y))
            scores = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(scores * raw_scale))
        if MASKED:
            visible = key_positions[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible = visible & (key_positions[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * exponent_scale)
        # A row that has seen nothing yet stands at -inf, and -inf - -inf is NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        # Written as multiply-adds, so that no compiler's choice of fusing changes bits between the masked and the
        # unmasked form.
        weights = tl.exp2(tl.fma(scores, exponent_scale, -shift[:, None]))
        decay = tl.exp2(maximum - shift)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        accumulator = tl.dot(weights.to(values.dtype), values, accumulator * decay[:, None], input_precision=PRECISION)
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill_kernel(
    output,
    query,
    pool,
    tiles,  # [num_tiles, 2] int64: sequence, first query of the tile counted from the sequence's first
    query_starts,
    context_lens,
    block_tables,
    sinks,
    layer_offset,
    block_stride,
    table_stride,
    query_head_stride,
    query_token_stride,
    window,
    raw_scale,
    soft_cap,
    exponent_scale,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries, all query heads of one KV head: row r is query r // GROUP, head r % GROUP."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    TILE_QUERIES: tl.constexpr = BLOCK_M // GROUP
    KV_STRIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM

    sequence = tl.load(tiles + tile * 2)
    tile_first = tl.load(tiles + tile * 2 + 1)
    query_first = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_first
    context_len = tl.load(context_lens + sequence).to(tl.int32)
    tile_queries = tl.minimum(query_len - tile_first, TILE_QUERIES).to(tl.int32)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + rows % GROUP
    held_rows = rows // GROUP < tile_queries
    # [M] int64
    tokens = query_first + tile_first + rows // GROUP
    first_position = context_len - query_len.to(tl.int32) + tile_first.to(tl.int32)
    last_position = first_position + tile_queries - 1
    positions = first_position + rows // GROUP

    held = held_rows[:, None] & (dims[None, :] < HEAD_DIM)
    places = tokens * query_token_stride + heads.to(tl.int64) * query_head_stride
    queries = tl.load(query + places[:, None] + dims[None, :], mask=held, other=0.0)

    accumulator = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + heads).to(tl.float32) * _LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

    #   | masked: the window's edge | every row sees every key | masked: the diagonal |
    # begin                     edge_end                 diagonal_start      last_position
    end = last_position + 1
    diagonal_start = (first_position + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        edge_end = (tl.maximum(last_position - window + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        diagonal_start = tl.maximum(diagonal_start, edge_end)
    else:
        begin = 0
        edge_end = 0
    table = block_tables + sequence * table_stride
    key_pool = pool + layer_offset + kv_head * (BLOCK_SIZE * HEAD_DIM)
    if HAS_WINDOW:
        accumulator, maximum, total = _attend_range(
            accumulator, maximum, total, queries, positions, key_pool, table, context_len, begin, edge_end, window,
            raw_scale, soft_cap, exponent_scale, block_stride, True, HAS_WINDOW, HAS_SOFT_CAP, KV_STRIDE,
            BLOCK_SIZE, HEAD_DIM, PADDED_DIM, BLOCK_N, PRECISION,
        )  # fmt: skip
    accumulator, maximum, total = _attend_range(
        accumulator, maximum, total, queries, positions, key_pool, table, context_len, edge_end, diagonal_start, window,
        raw_scale, soft_cap, exponent_scale, block_stride, False, HAS_WINDOW, HAS_SOFT_CAP, KV_STRIDE,
        BLOCK_SIZE, HEAD_DIM, PADDED_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip
    accumulator, maximum, total = _attend_range(
        accumulator, maximum, total, queries, positions, key_pool, table, context_len, diagonal_start, end, window,
        raw_scale, soft_cap, exponent_scale, block_stride, True, HAS_WINDOW, HAS_SOFT_CAP, KV_STRIDE,
        BLOCK_SIZE, HEAD_DIM, PADDED_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip

    attended = accumulator / total[:, None]
    places = (tokens * (KV_HEADS * GROUP) + heads) * HEAD_DIM
    tl.store(output + places[:, None] + dims[None, :], attended.to(output.dtype.element_ty), mask=held)


@triton.jit
def _splits_of(context_len, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First visible key (a multiple of BLOCK_N), tokens per split and number of splits of a decoding sequence."""
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context_len - window, 0) // BLOCK_N * BLOCK_N
    span = context_len - begin
    least = (span + _MAX_SPLITS - 1) // _MAX_SPLITS
    tokens = (tl.maximum(least, 1) + _MIN_SPLIT_TOKENS - 1) // _MIN_SPLIT_TOKENS * _MIN_SPLIT_TOKENS
    return begin, tokens, (span + tokens - 1) // tokens


@triton.jit
def _finished(accumulator, maximum, total, sink, HAS_SINKS: tl.constexpr):
    """Attention of rows from their whole sums, [M, D]; zeros for a row that saw nothing."""
    if HAS_SINKS:
        highest = tl.maximum(maximum, sink)
        decay = tl.exp2(maximum - highest)
        total = tl.fma(total, decay, tl.exp2(sink - highest))
        accumulator = accumulator * decay[:, None]
    return accumulator / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["table_stride", "window"])
def _decode_kernel(
    output,
    partial_sums,  # [S, heads, splits, head_dim] float32
    partial_scales,  # [S, heads, splits, 2] float32: maximum, total
    query,
    pool,
    sequences,  # [S] int64: rows of the three below
    query_starts,
    context_lens,
    block_tables,
    sinks,
    layer_offset,
    block_stride,
    table_stride,
    query_head_stride,
    query_token_stride,
    window,
    raw_scale,
    soft_cap,
    exponent_scale,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of one sequence: the query heads of one KV head are the rows, so that each key is read once."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    place = tl.program_id(2).to(tl.int64)
    KV_STRIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    HEADS: tl.constexpr = KV_HEADS * GROUP

    sequence = tl.load(sequences + place)
    context_len = tl.load(context_lens + sequence).to(tl.int32)
    begin, split_tokens, num_splits = _splits_of(context_len, window, HAS_WINDOW, BLOCK_N)
    if split >= tl.maximum(num_splits, 1):
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + rows
    held_rows = rows < GROUP
    held = held_rows[:, None] & (dims[None, :] < HEAD_DIM)
    token = tl.load(query_starts + sequence)
    places = token * query_token_stride + heads.to(tl.int64) * query_head_stride
    queries = tl.load(query + places[:, None] + dims[None, :], mask=held, other=0.0)
    positions = tl.zeros([BLOCK_M], tl.int32) + (context_len - 1)

    accumulator = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = block_tables + sequence * table_stride
    key_pool = pool + layer_offset + kv_head * (BLOCK_SIZE * HEAD_DIM)
    first = begin + split * split_tokens
    last = tl.minimum(first + split_tokens, context_len)
    accumulator, maximum, total = _attend_range(
        accumulator, maximum, total, queries, positions, key_pool, table, context_len, first, last, window,
        raw_scale, soft_cap, exponent_scale, block_stride, True, HAS_WINDOW, HAS_SOFT_CAP, KV_STRIDE,
        BLOCK_SIZE, HEAD_DIM, PADDED_DIM, BLOCK_N, PRECISION,
    )  # fmt: skip

    if num_splits <= 1:
        sink = maximum
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=held_rows, other=0.0).to(tl.float32) * _LOG2_E
        attended = _finished(accumulator, maximum, total, sink, HAS_SINKS)
        places = (token * HEADS + heads) * HEAD_DIM
        tl.store(output + places[:, None] + dims[None, :], attended.to(output.dtype.element_ty), mask=held)
    else:
        places = (place * HEADS + heads) * tl.num_programs(1) + split
        tl.store(partial_sums + places[:, None] * HEAD_DIM + dims[None, :], accumulator, mask=held)
        tl.store(partial_scales + places * 2, maximum, mask=held_rows)
        tl.store(partial_scales + places * 2 + 1, total, mask=held_rows)


@triton.jit(do_not_specialize=["window", "grid_splits"])
def _reduce_kernel(
    output,
    partial_sums,
    partial_scales,
    sequences,
    query_starts,
    context_lens,
    sinks,
    window,
    grid_splits,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Joins the splits of one head of one sequence, in an order that does not depend on the size of the grid."""
    head = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    sequence = tl.load(sequences + place)
    context_len = tl.load(context_lens + sequence).to(tl.int32)
    _, _, num_splits = _splits_of(context_len, window, HAS_WINDOW, BLOCK_N)
    if num_splits <= 1:
        return

    splits = tl.arange(0, _MAX_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    used = splits < num_splits
    places = (place * HEADS + head) * grid_splits + splits
    maxima = tl.load(partial_scales + places * 2, mask=used, other=float("-inf"))
    totals = tl.load(partial_scales + places * 2 + 1, mask=used, other=0.0)
    held = used[:, None] & (dims[None, :] < HEAD_DIM)
    sums = tl.load(partial_sums + places[:, None] * HEAD_DIM + dims[None, :], mask=held, other=0.0)

    # Every split holds a visible key, so the maximum is finite.
    maximum = tl.max(maxima, 0)
    decays = tl.exp2(maxima - maximum)
    total = tl.sum(totals * decays, 0)
    accumulator = tl.sum(sums * decays[:, None], 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        highest = tl.maximum(maximum, sink)
        decay = tl.exp2(maximum - highest)
        total = total * decay + tl.exp2(sink - highest)
        accumulator = accumulator * decay
    token = tl.load(query_starts + sequence)
    attended = accumulator / total
    tl.store(output + (token * HEADS + head) * HEAD_DIM + dims, attended.to(output.dtype.element_ty), dims < HEAD_DIM)


@triton.jit
def _write_kernel(
    pool,
    key,
    value,
    slots,
    layer_offset,
    block_stride,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """K and V of one token, all heads. A slot below 0 is a padding token's: nothing is written."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_HEADS).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    held = (heads[:, None] < KV_HEADS) & (dims[None, :] < HEAD_DIM)
    keys = tl.load(key + token * key_token_stride + heads[:, None] * key_head_stride + dims[None, :], mask=held)
    values = tl.load(value + token * value_token_stride + heads[:, None] * value_head_stride + dims[None, :], mask=held)
    start = (slot // BLOCK_SIZE) * block_stride + layer_offset + (slot % BLOCK_SIZE) * HEAD_DIM
    target = pool + start + heads[:, None] * (BLOCK_SIZE * HEAD_DIM) + dims[None, :]
    tl.store(target, keys, mask=held)
    tl.store(target + KV_HEADS * BLOCK_SIZE * HEAD_DIM, values, mask=held)


# --------------------------------------------------------------------------------------------------------------- host


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a kernel cuts its work.

    Attributes:
        rows: least rows of queries in a tile.
        keys: keys in a tile.
        warps: of a program.
        stages: loads in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_shape(head_dim: int, dtype: torch.dtype) -> TileShape:
    """Tiles of the prefill kernel; they bind the bits of a result, so they follow from the model alone."""
    padded_dim = _padded(head_dim)
    if dtype == torch.float32:
        return TileShape(32, 32, 4, 1) if padded_dim <= 64 else TileShape(16, 16, 4, 1)
    if padded_dim <= 64:
        return TileShape(128, 64, 4, 3)
    if padded_dim == 128:
        return TileShape(128, 64, 8, 3)
    return TileShape(64, 32, 4, 3) if padded_dim == 256 else TileShape(32, 16, 4, 3)


def decode_shape(head_dim: int, dtype: torch.dtype) -> TileShape:
    """Tiles of the decode kernel, as in `prefill_shape`."""
    padded_dim = _padded(head_dim)
    if dtype == torch.float32:
        return TileShape(16, 32 if padded_dim <= 64 else 16, 4, 3)
    # Five stages are two tiles of keys and values in flight: block ids and what they point to are a stage apart each.
    if padded_dim <= 128:
        return TileShape(16, 64, 4, 5)
    return TileShape(16, 32 if padded_dim == 256 else 16, 4, 5)


class TritonPlan:
    """Where one batch reads and writes in the pool: computed once, used by every layer.

    Takes what `PagedPlan` takes. Sequences that compute one token are decoded, the others prefilled. A sequence of no
    tokens is allowed and computes nothing.

    Args:
        pool: `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`, contiguous.
        slots: [T] int64; below 0 nothing is written.
        query_starts: S + 1 host integers.
        context_lens: S host integers.
        block_tables: [S, longest] int64.

    Raises:
        ValueError: a shape, stride or dtype that the kernels do not take.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        *,
        slots: torch.Tensor,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        block_tables: torch.Tensor,
    ) -> None:
        device = pool.device
        starts = np.asarray(query_starts, dtype=np.int64)
        contexts = np.asarray(context_lens, dtype=np.int64)
        query_lens = np.diff(starts)
        singles = np.flatnonzero(query_lens == 1)
        self._fill(
            pool,
            slots=slots,
            query_starts=torch.from_numpy(starts).to(device),
            context_lens=torch.from_numpy(contexts).to(device),
            block_tables=block_tables,
            singles=torch.from_numpy(singles).to(device),
            longest_single=int(contexts[singles].max(initial=0)),
        )
        self._query_lens = query_lens
        self._contexts = contexts
        self._tiles: dict[int, torch.Tensor] = {}

    @classmethod
    def for_decode(
        cls,
        pool: torch.Tensor,
        *,
        slots: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        longest: int,
    ) -> TritonPlan:
        """A batch of one token per sequence, all of whose numbers are on the device and may change: for CUDA graphs.

        The grid follows from `longest` alone. A sequence whose context is 0 is padding: its output is zeros, and with
        a slot of -1 it writes nothing.

        Args:
            pool: as above.
            slots: [S] int64.
            query_starts: [S + 1] int64, 0, 1, 2...
            context_lens: [S] int64, none above `longest`.
            block_tables: [S, width] int64.
            longest: bound of the contexts in tokens.
        """
        plan = cls.__new__(cls)
        plan._fill(
            pool,
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            singles=torch.arange(context_lens.shape[0], device=pool.device),
            longest_single=longest,
        )
        plan._query_lens = plan._contexts = np.empty(0, dtype=np.int64)
        plan._tiles = {}
        return plan

    def _fill(
        self,
        pool: torch.Tensor,
        *,
        slots: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        singles: torch.Tensor,
        longest_single: int,
    ) -> None:
        if not pool.is_contiguous():
            raise ValueError("the pool must be contiguous")
        if pool.shape[5] % 16:
            raise ValueError(f"the Triton kernels take head dimensions that are multiples of 16, not {pool.shape[5]}")
        if pool.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"the Triton kernels take bfloat16, float16 and float32, not {pool.dtype}")
        for name, tensor in (("slots", slots), ("block_tables", block_tables)):
            if tensor.dtype != torch.int64 or tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be int64 and its rows contiguous")
        self.pool = pool
        self.slots = slots
        self.query_starts = query_starts
        self.context_lens = context_lens
        self.block_tables = block_tables
        self.singles = singles
        self.longest_single = longest_single

    @property
    def has_chunks(self) -> bool:
        """Whether a sequence computes more than one token."""
        return bool((self._query_lens > 1).any())

    @property
    def layer_elements(self) -> int:
        """Elements of one layer of one block."""
        return self.pool.stride(1)

    def tiles(self, tile_queries: int) -> torch.Tensor:
        """Tiles of the sequences with more than one token, `[num_tiles, 2]` int64, those with most keys first."""
        if tile_queries not in self._tiles:
            sequences = np.flatnonzero(self._query_lens > 1)
            counts = -(-self._query_lens[sequences] // tile_queries)
            owners = np.repeat(sequences, counts)
            firsts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_queries
            keys = self._contexts[owners] - self._query_lens[owners] + firsts
            order = np.argsort(-keys, kind="stable")
            tiles = np.stack([owners[order], firsts[order]], axis=1).astype(np.int64)
            self._tiles[tile_queries] = torch.from_numpy(tiles).to(self.pool.device)
        return self._tiles[tile_queries]


def write_kv(plan: TritonPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put the new tokens' K and V, `[kv_heads, T, head_dim]` each, into their slots of one layer."""
    _, _, _, kv_heads, block_size, head_dim = plan.pool.shape
    for name, tensor in (("key", key), ("value", value)):
        _check_operand(plan, name, tensor)
        if tensor.shape != (kv_heads, plan.slots.shape[0], head_dim):
            raise ValueError(f"{name} is {list(tensor.shape)}, not {[kv_heads, plan.slots.shape[0], head_dim]}")
    if plan.slots.shape[0] == 0:
        return
    _write_kernel[(plan.slots.shape[0],)](
        plan.pool,
        key,
        value,
        plan.slots,
        layer * plan.layer_elements,
        plan.pool.stride(0),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=kv_heads,
        PADDED_HEADS=triton.next_power_of_2(kv_heads),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=_padded(head_dim),
        num_warps=4,
    )


def paged_attention(
    plan: TritonPlan,
    layer: int,
    query: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over everything its sequences have in the pool.

    The new tokens must have been written already.

    Args:
        plan: of this batch.
        layer: which layer of the pool.
        query: [heads, T, head_dim]; heads is a multiple of kv_heads.
        scale: factor on the scores, above 0.
        window: how many tokens back a query sees, itself included; None is all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
        sinks: [heads], for each head a score without a value that joins the softmax; None is none.

    Returns:
        [T, heads, head_dim]
    """
    num_heads, num_tokens, head_dim = query.shape
    _check_operand(plan, "query", query)
    if head_dim != plan.pool.shape[5] or num_heads % plan.pool.shape[3] or num_tokens != plan.slots.shape[0]:
        raise ValueError(
            f"a query of {list(query.shape)} does not fit {plan.slots.shape[0]} tokens and a pool of "
            f"{list(plan.pool.shape)}"
        )
    if scale <= 0.0 or (window is not None and window < 1) or (soft_cap is not None and soft_cap <= 0.0):
        raise ValueError("scale, window and soft_cap must be above 0")
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be [{num_heads}] and contiguous")
    output = query.new_empty(num_tokens, num_heads, head_dim)
    attention = _Attention(plan, layer, query, output, scale, window, soft_cap, sinks)
    attention.prefill()
    attention.decode()
    return output


@dataclass(frozen=True, slots=True)
class _Attention:
    """One call of `paged_attention`, which see."""

    plan: TritonPlan
    layer: int
    query: torch.Tensor
    output: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None

    def prefill(self) -> None:
        shape = prefill_shape(self.query.shape[2], self.query.dtype)
        block_m = max(shape.rows, triton.next_power_of_2(self._group))
        if not self.plan.has_chunks:
            return
        tiles = self.plan.tiles(block_m // self._group)
        _prefill_kernel[(self.plan.pool.shape[3], len(tiles))](
            self.output,
            self.query,
            self.plan.pool,
            tiles,
            *self._runtime_arguments(),
            **self._constants(block_m, shape.keys),
            num_warps=shape.warps,
            num_stages=shape.stages,
        )

    def decode(self) -> None:
        num_heads, _, head_dim = self.query.shape
        num_sequences = len(self.plan.singles)
        if num_sequences == 0:
            return
        shape = decode_shape(head_dim, self.query.dtype)
        longest = self.plan.longest_single
        if self.window is not None:
            # A window starts inside a tile of keys, which is read whole.
            longest = min(longest, self.window + shape.keys - 1)
        num_splits = min(max(-(-longest // _MIN_SPLIT_TOKENS.value), 1), _MAX_SPLITS.value)
        sums = self.query.new_empty(num_sequences, num_heads, num_splits, head_dim, dtype=torch.float32)
        scales = self.query.new_empty(num_sequences, num_heads, num_splits, 2, dtype=torch.float32)
        _decode_kernel[(self.plan.pool.shape[3], num_splits, num_sequences)](
            self.output,
            sums,
            scales,
            self.query,
            self.plan.pool,
            self.plan.singles,
            *self._runtime_arguments(),
            **self._constants(max(shape.rows, triton.next_power_of_2(self._group)), shape.keys),
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        if num_splits == 1:
            return
        _reduce_kernel[(num_heads, num_sequences)](
            self.output,
            sums,
            scales,
            self.plan.singles,
            self.plan.query_starts,
            self.plan.context_lens,
            self._sinks,
            self.window or 0,
            num_splits,
            HAS_WINDOW=self.window is not None,
            HAS_SINKS=self.sinks is not None,
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=_padded(head_dim),
            BLOCK_N=shape.keys,
            num_warps=4,
        )

    @property
    def _group(self) -> int:
        return self.query.shape[0] // self.plan.pool.shape[3]

    @property
    def _sinks(self) -> torch.Tensor:
        # A pointer that is never read, where there are none.
        return self.query if self.sinks is None else self.sinks

    def _runtime_arguments(self) -> tuple[torch.Tensor | int | float, ...]:
        plan = self.plan
        # A capped score is soft_cap - 2 soft_cap / (1 + 2^(score * raw_scale)).
        raw_scale, exponent_scale = 1.0, self.scale * _LOG2_E.value
        if self.soft_cap is not None:
            raw_scale, exponent_scale = 2.0 * self.scale * _LOG2_E.value / self.soft_cap, _LOG2_E.value
        return (
            plan.query_starts,
            plan.context_lens,
            plan.block_tables,
            self._sinks,
            self.layer * plan.layer_elements,
            plan.pool.stride(0),
            plan.block_tables.stride(0),
            self.query.stride(0),
            self.query.stride(1),
            self.window or 0,
            raw_scale,
            self.soft_cap or 1.0,
            exponent_scale,
        )

    def _constants(self, block_m: int, block_n: int) -> dict[str, object]:
        _, _, _, kv_heads, block_size, head_dim = self.plan.pool.shape
        return {
            "HAS_WINDOW": self.window is not None,
            "HAS_SOFT_CAP": self.soft_cap is not None,
            "HAS_SINKS": self.sinks is not None,
            "KV_HEADS": kv_heads,
            "GROUP": self._group,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": _padded(head_dim),
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            # Products of float32 stay float32; halves are exact in either.
            "PRECISION": "ieee",
        }


def _padded(head_dim: int) -> int:
    return int(triton.next_power_of_2(head_dim))


def _check_operand(plan: TritonPlan, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != plan.pool.dtype or tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be {plan.pool.dtype}, as the pool is, with a last dimension of stride 1")
