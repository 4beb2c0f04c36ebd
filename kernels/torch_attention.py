"""Paged attention in plain torch: every device, every kind of scores. Each sequence is computed on its own, in shapes
that follow from its own lengths, so that its results do not depend on the others in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from kernels.paged_plan import PagedPlan

_TILE_QUERIES = 128
"""Queries per attention call where a mask is needed, which bounds the mask to this many rows."""

_GATHER_BYTES = 2 * 1024 * 1024
"""K and V that single-token attention gathers at a time: what stays in the cache of a core until it is read."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How weights come from queries and keys: softmax over `cap(scale * q k)`, with a sink beside the keys.

    Attributes:
        scale: factor on the products.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
        sinks: [heads], the score of a key per head that takes weight and gives no value; None for none.
    """

    scale: float
    soft_cap: float | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Tile:
    """A run of a chunk's queries and the keys that it sees, both counted from the first that the chunk has.

    Attributes:
        queries: first and one past the last.
        keys: the same.
        mask: [queries, keys], 0 where visible and -inf elsewhere.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence that computes several tokens at once.

    Attributes:
        first: its first row among the T queries.
        last: one past its last row.
        runs: where its keys and values lie, see `PagedPlan.runs_of`; None where the new ones are all that is seen.
        tiles: None where every query sees all new tokens up to itself.
    """

    first: int
    last: int
    runs: torch.Tensor | None
    tiles: list[_Tile] | None


@dataclass(frozen=True, slots=True)
class _Gather:
    """Sequences that compute one token each, whose blocks are gathered together.

    Attributes:
        first: the first of them among the single-token sequences.
        runs: of all of them, see `PagedPlan.runs_of`.
        workspace: [runs, block_size * head_dim]; gathers share its memory, each layer overwrites it.
        keys: per sequence its own part of the workspace, `[1, kv_heads, visible, head_dim]`: exactly what is seen.
        values: the same for values.
    """

    first: int
    runs: torch.Tensor
    workspace: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Work:
    """What layers with the same window do for a batch.

    Attributes:
        chunks: sequences of several queries.
        single_rows: [singles] int64, rows of the others among the T queries.
        gathers: the others, in the order of `single_rows`.
    """

    chunks: list[_Chunk]
    single_rows: torch.Tensor
    gathers: list[_Gather]


def paged_attention(
    plan: PagedPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None,
    scoring: Scoring,
) -> torch.Tensor:
    """See `ops.paged_attention`."""
    num_heads, num_tokens, head_dim = query.shape
    rows = plan.layer_rows(layer, plan.pool.shape[4] * head_dim)
    work = _work_of(plan, window)
    if not work.chunks:
        return _attend_singles(plan, work, rows, query, scoring)
    output = query.new_empty(num_tokens, num_heads, head_dim)
    for chunk in work.chunks:
        attended = _attend_chunk(chunk, rows, query, key, value, scoring)
        output[chunk.first : chunk.last] = attended[0].transpose(0, 1)
    if work.gathers:
        output[work.single_rows] = _attend_singles(plan, work, rows, query[:, work.single_rows], scoring)
    return output


def _work_of(plan: PagedPlan, window: int | None) -> _Work:
    key = ("torch_attention", window)
    work = plan.derived.get(key)
    if not isinstance(work, _Work):
        work = plan.derived[key] = _plan_work(plan, window)
    return work


def _plan_work(plan: PagedPlan, window: int | None) -> _Work:
    chunks: list[_Chunk] = []
    singles: list[int] = []
    for sequence in range(len(plan.context_lens)):
        if plan.query_starts[sequence + 1] - plan.query_starts[sequence] == 1:
            singles.append(sequence)
        else:
            chunks.append(_plan_chunk(plan, sequence, window))
    single_rows = torch.tensor([plan.query_starts[i] for i in singles], dtype=torch.int64, device=plan.pool.device)
    return _Work(chunks, single_rows, _plan_gathers(plan, singles, window))


def _plan_chunk(plan: PagedPlan, sequence: int, window: int | None) -> _Chunk:
    """Lay out the tiles of one sequence.

    |<- not seen ->|<- seen by some query ->|<--- new tokens --->|
    0              base (of a block)        start                context_len
    """
    first, last = plan.query_starts[sequence], plan.query_starts[sequence + 1]
    context_len = plan.context_lens[sequence]
    start = context_len - (last - first)
    if window is None or window >= context_len:
        window = context_len
    seen_from = max(0, start - window + 1)
    if seen_from >= start:
        base, runs = start, None
    else:
        first_block = seen_from // plan.pool.shape[4]
        base, runs = first_block * plan.pool.shape[4], plan.runs_of(sequence, first_block)
    if runs is None and window >= context_len:
        return _Chunk(first, last, None, None)
    return _Chunk(first, last, runs, list(_tiles(start, context_len, base, window, plan.pool)))


def _tiles(start: int, context_len: int, base: int, window: int, like: torch.Tensor) -> Iterator[_Tile]:
    for first in range(start, context_len, _TILE_QUERIES):
        last = min(first + _TILE_QUERIES, context_len)
        key_first = max(base, first - window + 1)
        queries = torch.arange(first, last, device=like.device)[:, None]
        keys = torch.arange(key_first, last, device=like.device)
        hidden = (keys > queries) | (keys <= queries - window)
        visible = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        yield _Tile(
            (first - start, last - start), (key_first - base, last - base), visible.masked_fill_(hidden, -torch.inf)
        )


def _plan_gathers(plan: PagedPlan, singles: list[int], window: int | None) -> list[_Gather]:
    _, _, _, kv_heads, block_size, head_dim = plan.pool.shape
    seen: list[tuple[int, int]] = []  # of each: first and one past the last key, from the start of the first run
    all_runs: list[torch.Tensor] = []
    for sequence in singles:
        context_len = plan.context_lens[sequence]
        seen_from = 0 if window is None else max(0, context_len - window)
        first_block = seen_from // block_size
        seen.append((seen_from - first_block * block_size, context_len - first_block * block_size))
        all_runs.append(plan.runs_of(sequence, first_block))
    # As many sequences at a time as the cache of a core holds, at least one.
    limit = _GATHER_BYTES // (block_size * head_dim * plan.pool.element_size())
    groups: list[tuple[int, int]] = []
    start, size = 0, 0
    for index, runs in enumerate(all_runs):
        if size and size + runs.numel() > limit:
            groups.append((start, index))
            start, size = index, 0
        size += runs.numel()
    if all_runs:
        groups.append((start, len(all_runs)))
    joined = [torch.cat(all_runs[first:last]) for first, last in groups]
    longest = max((runs.numel() for runs in joined), default=0)
    memory = plan.pool.new_empty(longest, block_size * head_dim)
    gathers = []
    for (first, last), runs in zip(groups, joined, strict=True):
        workspace = memory[: runs.numel()]
        keys, values, offset = [], [], 0
        for index in range(first, last):
            end = offset + all_runs[index].numel()
            both = workspace[offset:end].view(2, 1, kv_heads, -1, head_dim)[:, :, :, slice(*seen[index])]
            keys.append(both[0])
            values.append(both[1])
            offset = end
        gathers.append(_Gather(first, runs, workspace, keys, values))
    return gathers


def _attend_singles(
    plan: PagedPlan, work: _Work, rows: torch.Tensor, query: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attention of single queries, one per sequence: [heads, S, head_dim] in, [S, heads, head_dim] out."""
    num_heads, num_sequences, head_dim = query.shape
    kv_heads = plan.pool.shape[3]
    # Query heads of one KV head become rows of one product, so that each key is read once:
    # S times [1, kv_heads, group, head_dim].
    grouped = query.view(kv_heads, num_heads // kv_heads, num_sequences, head_dim).permute(2, 0, 1, 3)
    queries = grouped.unsqueeze(1).unbind(0)
    plain = scoring.soft_cap is None and scoring.sinks is None
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, kv_heads, -1, 1)
    attended = []
    for gather in work.gathers:
        torch.index_select(rows, 0, gather.runs, out=gather.workspace)
        for sequence, (keys, values) in enumerate(zip(gather.keys, gather.values, strict=True), gather.first):
            if plain:
                result = functional.scaled_dot_product_attention(queries[sequence], keys, values, scale=scoring.scale)
            else:
                result = _attend_by_hand(queries[sequence], keys, values, None, scoring, sinks)
            attended.append(result)
    return torch.cat(attended).view(num_sequences, num_heads, head_dim)


def _attend_chunk(
    chunk: _Chunk, rows: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attention of several queries of one sequence: [1, heads, queries, head_dim]."""
    num_heads, _, head_dim = query.shape
    kv_heads = key.shape[0]
    queries = query[None, :, chunk.first : chunk.last]
    if chunk.runs is None:
        keys, values = key[None, :, chunk.first : chunk.last], value[None, :, chunk.first : chunk.last]
    else:
        gathered = rows.index_select(0, chunk.runs).view(2, 1, kv_heads, -1, head_dim)
        keys, values = gathered[0], gathered[1]
    plain = scoring.soft_cap is None and scoring.sinks is None
    if plain and chunk.tiles is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scoring.scale, enable_gqa=num_heads != kv_heads
        )
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, num_heads, 1, 1)
    length = chunk.last - chunk.first
    tiles = chunk.tiles if chunk.tiles is not None else _tiles(0, length, 0, length, query)
    attended = []
    for tile in tiles:
        parts = queries[:, :, slice(*tile.queries)], keys[:, :, slice(*tile.keys)], values[:, :, slice(*tile.keys)]
        if plain:
            result = functional.scaled_dot_product_attention(
                *parts, attn_mask=tile.mask, scale=scoring.scale, enable_gqa=num_heads != kv_heads
            )
        else:
            result = _attend_by_hand(*parts, tile.mask, scoring, sinks)
        attended.append(result)
    return torch.cat(attended, dim=2)


def _attend_by_hand(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What torch's own attention cannot: soft caps and sinks. Softmax in float32.

    Args:
        queries: [1, heads, queries, head_dim].
        keys: [1, kv_heads, keys, head_dim].
        values: the same.
        mask: [queries, keys], added to the scores.
        scoring: its `sinks` are not looked at.
        sinks: of a shape that spreads over [1, heads, queries, 1].

    Returns:
        [1, heads, queries, head_dim]
    """
    _, num_heads, num_queries, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(grouped, keys[0].transpose(1, 2)).float().mul_(scoring.scale)
    if scoring.soft_cap is not None:
        scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    scores = scores.view(1, num_heads, num_queries, -1)
    if mask is not None:
        scores += mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        highest = torch.maximum(scores.amax(-1, keepdim=True), sinks.float())
        weights = scores.sub_(highest).exp_()
        weights /= weights.sum(-1, keepdim=True) + (sinks - highest).exp()
    weights = weights.to(values.dtype).view(kv_heads, -1, weights.shape[-1])
    return torch.bmm(weights, values[0]).view(1, num_heads, num_queries, head_dim)
