"""The one door to everything that computes on the device: KV writes, paged attention, counter-based noise.

Callers use only this module. There is one implementation so far, in plain torch. `reference.py` says what the results
must be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from kernels.reference import noise_key

_QUERY_CHUNK = 128
"""Queries per attention call where a mask is needed, which bounds the mask to this many rows."""

_GATHER_BYTES = 2 * 1024 * 1024
"""K and V that single-token attention gathers at a time: what stays in the cache of a core until it is read."""


# ----------------------------------------------------------------------------------------------------------- paged KV


@dataclass(slots=True)
class _Chunk:
    """A sequence that computes several tokens at once.

    Attributes:
        first: its first row among the T queries.
        last: one past its last row.
        context_len: tokens to attend to, the last `last - first` of them new.
        rows: [2 * kv_heads * blocks] int64, runs of `block_size * head_dim` elements in a layer's view of the pool;
            None where nothing older than this pass is attended to.
        masks: additive masks by window, built at first need and reused by the other layers.
    """

    first: int
    last: int
    context_len: int
    rows: torch.Tensor | None
    masks: dict[int | None, list[torch.Tensor]]


@dataclass(slots=True)
class _Gather:
    """Sequences that compute one token each, whose blocks are gathered together.

    Attributes:
        sequences: which of the single-token sequences, first and one past the last.
        rows: [runs] int64, as in _Chunk, of all of them.
        workspace: [runs, block_size * head_dim]; gathers share its memory, each layer overwrites it.
        keys: per sequence its own part of the workspace, `[1, kv_heads, context, head_dim]`: no slot past the context.
        values: the same for values.
    """

    sequences: tuple[int, int]
    rows: torch.Tensor
    workspace: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class PagedPlan:
    """Where one batch reads and writes in the pool: computed once, used by every layer.

    All offsets are int64. Results of a sequence do not depend on the others in the batch: each is computed on its own,
    in shapes that follow from its own lengths. Slots past a sequence's context are never computed with, so what a block
    held before reaches nobody, NaN included.

    Args:
        pool: `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`, contiguous.
        slots: [T] int64.
        query_starts: S + 1 host integers.
        context_lens: S host integers.
        block_tables: [S, longest] int64.
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
        _, num_layers, _, kv_heads, block_size, head_dim = pool.shape
        if not pool.is_contiguous():
            raise ValueError("the pool must be contiguous")
        self.pool = pool
        self._flat = pool.view(-1)
        self._layer_elements = 2 * kv_heads * block_size * head_dim
        self._block_runs = num_layers * 2 * kv_heads
        heads = torch.arange(kv_heads, device=pool.device)
        # Places of the new tokens, in rows of head_dim elements counted from the layer's start: [kv_heads, T].
        runs = (slots // block_size) * self._block_runs + heads[:, None]
        self.key_rows = (runs * block_size + slots % block_size).flatten()
        self.value_rows = ((runs + kv_heads) * block_size + slots % block_size).flatten()

        self._keys_and_values = torch.arange(2 * kv_heads, device=pool.device)[:, None]
        self.chunks: list[_Chunk] = []
        singles: list[int] = []
        for sequence, context_len in enumerate(context_lens):
            first, last = query_starts[sequence], query_starts[sequence + 1]
            if last - first == 1:
                singles.append(sequence)
                continue
            rows = self._runs_of(block_tables[sequence], context_len) if context_len > last - first else None
            self.chunks.append(_Chunk(first, last, context_len, rows, {}))
        self.single_rows = torch.tensor([query_starts[i] for i in singles], dtype=torch.int64, device=pool.device)
        self.gathers = self._plan_gathers([(block_tables[i], context_lens[i]) for i in singles])

    def layer_rows(self, layer: int, elements: int) -> torch.Tensor:
        """The pool from the start of `layer` in block 0, as rows of `elements`: indices are the same for each layer."""
        offset = layer * self._layer_elements
        rows = (self._flat.numel() - offset) // elements
        return self._flat.as_strided((rows, elements), (elements, 1), self._flat.storage_offset() + offset)

    def _runs_of(self, table: torch.Tensor, context_len: int) -> torch.Tensor:
        """Keys then values of one sequence: [2 * kv_heads * blocks]."""
        blocks = table[: -(-context_len // self.pool.shape[4])]
        return (blocks * self._block_runs + self._keys_and_values).flatten()

    def _plan_gathers(self, sequences: list[tuple[torch.Tensor, int]]) -> list[_Gather]:
        _, _, _, kv_heads, block_size, head_dim = self.pool.shape
        all_rows = [self._runs_of(table, context_len) for table, context_len in sequences]
        # As many sequences at a time as the cache of a core holds, at least one.
        limit = _GATHER_BYTES // (block_size * head_dim * self.pool.element_size())
        groups: list[tuple[int, int]] = []
        start, size = 0, 0
        for index, rows in enumerate(all_rows):
            if size and size + rows.numel() > limit:
                groups.append((start, index))
                start, size = index, 0
            size += rows.numel()
        if all_rows:
            groups.append((start, len(all_rows)))
        joined = [torch.cat(all_rows[first:last]) for first, last in groups]
        longest = max((rows.numel() for rows in joined), default=0)
        memory = self._flat.new_empty(longest, block_size * head_dim)
        gathers = []
        for (first, last), rows in zip(groups, joined, strict=True):
            workspace = memory[: rows.numel()]
            keys, values, offset = [], [], 0
            for index in range(first, last):
                end = offset + all_rows[index].numel()
                both = workspace[offset:end].view(2, 1, kv_heads, -1, head_dim)[:, :, :, : sequences[index][1]]
                keys.append(both[0])
                values.append(both[1])
                offset = end
            gathers.append(_Gather((first, last), rows, workspace, keys, values))
        return gathers


def write_kv(plan: PagedPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put the new tokens' K and V, `[kv_heads, T, head_dim]` each, into their slots of one layer."""
    head_dim = plan.pool.shape[5]
    rows = plan.layer_rows(layer, head_dim)
    rows.index_copy_(0, plan.key_rows, key.reshape(-1, head_dim))
    rows.index_copy_(0, plan.value_rows, value.reshape(-1, head_dim))


def paged_attention(
    plan: PagedPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over everything its sequences have in the pool.

    The new tokens must have been written already. Softmax is in float32.

    Args:
        plan: of this batch.
        layer: which layer of the pool.
        query: [heads, T, head_dim]; heads is a multiple of kv_heads.
        key: [kv_heads, T, head_dim], the new tokens' own.
        value: the same for values.
        scale: factor on the scores.
        window: how many tokens back a query sees, itself included; None is all.

    Returns:
        [T, heads, head_dim]
    """
    num_heads, num_tokens, head_dim = query.shape
    block_size = plan.pool.shape[4]
    rows = plan.layer_rows(layer, block_size * head_dim)
    if not plan.chunks:
        return _attend_singles(plan, rows, query, scale=scale, window=window)
    output = query.new_empty(num_tokens, num_heads, head_dim)
    for chunk in plan.chunks:
        attended = _attend_chunk(plan, chunk, rows, query, key, value, scale=scale, window=window)
        output[chunk.first : chunk.last] = attended[0].transpose(0, 1)
    if plan.gathers:
        output[plan.single_rows] = _attend_singles(plan, rows, query[:, plan.single_rows], scale=scale, window=window)
    return output


def _attend_singles(
    plan: PagedPlan, rows: torch.Tensor, query: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """Attention of single queries, one per sequence: [heads, S, head_dim] in, [S, heads, head_dim] out."""
    num_heads, num_sequences, head_dim = query.shape
    kv_heads = plan.pool.shape[3]
    # Query heads of one KV head become rows of one product, so that each key is read once:
    # S times [1, kv_heads, group, head_dim].
    grouped = query.view(kv_heads, num_heads // kv_heads, num_sequences, head_dim).permute(2, 0, 1, 3)
    queries = grouped.unsqueeze(1).unbind(0)
    attended = []
    for gather in plan.gathers:
        torch.index_select(rows, 0, gather.rows, out=gather.workspace)
        for sequence, keys, values in zip(range(*gather.sequences), gather.keys, gather.values, strict=True):
            if window is not None and keys.shape[2] > window:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            attended.append(functional.scaled_dot_product_attention(queries[sequence], keys, values, scale=scale))
    return torch.cat(attended).view(num_sequences, num_heads, head_dim)


def _attend_chunk(
    plan: PagedPlan,
    chunk: _Chunk,
    rows: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of several queries of one sequence: [1, heads, queries, head_dim]."""
    num_heads, _, head_dim = query.shape
    kv_heads = key.shape[0]
    queries = query[None, :, chunk.first : chunk.last]
    if window is not None and chunk.context_len <= window:
        window = None
    if chunk.rows is None:
        keys, values = key[None, :, chunk.first : chunk.last], value[None, :, chunk.first : chunk.last]
        if window is None:
            return functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=num_heads != kv_heads
            )
    else:
        gathered = rows.index_select(0, chunk.rows).view(2, 1, kv_heads, -1, head_dim)
        keys, values = gathered[0], gathered[1]
    attended = []
    first = 0
    for mask in _causal_masks(chunk, window, query):
        last = first + mask.shape[0]
        attended.append(
            functional.scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, : mask.shape[1]],
                values[:, :, : mask.shape[1]],
                attn_mask=mask,
                scale=scale,
                enable_gqa=num_heads != kv_heads,
            )
        )
        first = last
    return torch.cat(attended, dim=2)


def _causal_masks(chunk: _Chunk, window: int | None, like: torch.Tensor) -> list[torch.Tensor]:
    """Additive masks [queries, keys] for runs of a sequence's queries; keys end with the last query of the run."""
    if window not in chunk.masks:
        start = chunk.context_len - (chunk.last - chunk.first)
        masks = []
        for first in range(start, chunk.context_len, _QUERY_CHUNK):
            last = min(first + _QUERY_CHUNK, chunk.context_len)
            queries = torch.arange(first, last, device=like.device)[:, None]
            keys = torch.arange(last, device=like.device)
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            visible = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            masks.append(visible.masked_fill_(hidden, -torch.inf))
        chunk.masks[window] = masks
    return chunk.masks[window]


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
