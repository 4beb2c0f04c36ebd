"""The one door to everything that computes on the device: KV writes, paged attention, counter-based noise.

Callers use only this module; it picks the implementation by device. Here is the path in plain torch, which runs
anywhere; kernels for GPUs register behind the same functions. `reference.py` says what the results must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from kernels.reference import noise_key

_QUERY_CHUNK = 128
"""Queries per attention call where a mask is needed, which bounds the mask to this many rows."""


# ----------------------------------------------------------------------------------------------------------- paged KV


@dataclass(slots=True)
class _SequencePlan:
    """One sequence of a batch.

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


class PagedPlan:
    """Where one batch reads and writes in the pool: computed once, used by every layer.

    All offsets are int64. Results of a sequence do not depend on the others in the batch: each is computed on its own,
    in shapes that follow from its own lengths.

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
        heads = torch.arange(kv_heads, device=pool.device)
        # Places of the new tokens, in rows of head_dim elements counted from the layer's start: [kv_heads, T].
        blocks, offsets = slots // block_size, slots % block_size
        runs = blocks * (num_layers * 2 * kv_heads) + heads[:, None]
        self._key_rows = (runs * block_size + offsets).flatten()
        self._value_rows = ((runs + kv_heads) * block_size + offsets).flatten()
        self.sequences: list[_SequencePlan] = []
        keys_and_values = torch.arange(2 * kv_heads, device=pool.device)
        for sequence, context_len in enumerate(context_lens):
            first, last = query_starts[sequence], query_starts[sequence + 1]
            rows = None
            if context_len > last - first:
                table = block_tables[sequence, : -(-context_len // block_size)]
                rows = (table * (num_layers * 2 * kv_heads) + keys_and_values[:, None]).flatten()
            self.sequences.append(_SequencePlan(first, last, context_len, rows, {}))

    def layer_rows(self, layer: int, elements: int) -> torch.Tensor:
        """The pool from the start of `layer` in block 0, as rows of `elements`: indices are the same for each layer."""
        return self._flat[layer * self._layer_elements :][: self._rows_span(layer) // elements * elements].view(
            -1, elements
        )

    def _rows_span(self, layer: int) -> int:
        return self._flat.numel() - layer * self._layer_elements


def write_kv(plan: PagedPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put the new tokens' K and V, `[kv_heads, T, head_dim]` each, into their slots of one layer."""
    head_dim = plan.pool.shape[5]
    rows = plan.layer_rows(layer, head_dim)
    rows.index_copy_(0, plan._key_rows, key.reshape(-1, head_dim))
    rows.index_copy_(0, plan._value_rows, value.reshape(-1, head_dim))


def paged_attention(
    plan: PagedPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
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
        softcap: scores become `softcap * tanh(scores / softcap)`.

    Returns:
        [T, heads, head_dim]
    """
    num_heads, num_tokens, head_dim = query.shape
    kv_heads, block_size = plan.pool.shape[3], plan.pool.shape[4]
    output = query.new_empty(num_tokens, num_heads, head_dim)
    rows = plan.layer_rows(layer, block_size * head_dim)
    for sequence in plan.sequences:
        first, last, context_len = sequence.first, sequence.last, sequence.context_len
        if sequence.rows is None:
            keys, values = key[None, :, first:last], value[None, :, first:last]
        else:
            gathered = rows.index_select(0, sequence.rows).view(2, 1, kv_heads, -1, head_dim)
            keys, values = gathered[0, :, :, :context_len], gathered[1, :, :, :context_len]
        in_window = window is None or context_len <= window
        if last - first == 1 and softcap is None:
            if window is not None and not in_window:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            # Query heads of one KV head become rows of one product, so each key is read once.
            grouped = query[:, first].view(1, kv_heads, -1, head_dim)  # [1, kv_heads, group, head_dim]
            output[first] = functional.scaled_dot_product_attention(grouped, keys, values, scale=scale).view(
                num_heads, head_dim
            )
            continue
        queries = query[None, :, first:last]
        if sequence.rows is None and in_window and softcap is None:
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=num_heads != kv_heads
            )
        else:
            masks = _causal_masks(sequence, None if in_window else window, query)
            attended = _masked_attention(queries, keys, values, masks, scale=scale, softcap=softcap)
        output[first:last] = attended[0].transpose(0, 1)
    return output


def _causal_masks(sequence: _SequencePlan, window: int | None, like: torch.Tensor) -> list[torch.Tensor]:
    """Additive masks [queries, keys] for chunks of a sequence's queries; keys end with the chunk's last query."""
    if window not in sequence.masks:
        start = sequence.context_len - (sequence.last - sequence.first)
        masks = []
        for chunk in range(start, sequence.context_len, _QUERY_CHUNK):
            end = min(chunk + _QUERY_CHUNK, sequence.context_len)
            queries = torch.arange(chunk, end, device=like.device)[:, None]
            keys = torch.arange(end, device=like.device)
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            masks.append(
                torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
            )
        sequence.masks[window] = masks
    return sequence.masks[window]


def _masked_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    masks: list[torch.Tensor],
    *,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of [1, heads, queries, head_dim], chunk by chunk as the masks say."""
    num_heads, kv_heads = queries.shape[1], keys.shape[1]
    chunks = []
    first = 0
    for mask in masks:
        chunk = queries[:, :, first : first + mask.shape[0]]
        first += mask.shape[0]
        visible_keys, visible_values = keys[:, :, : mask.shape[1]], values[:, :, : mask.shape[1]]
        if softcap is None:
            chunks.append(
                functional.scaled_dot_product_attention(
                    chunk,
                    visible_keys,
                    visible_values,
                    attn_mask=mask[None, None],
                    scale=scale,
                    enable_gqa=num_heads != kv_heads,
                )
            )
            continue
        repeated_keys = visible_keys.repeat_interleave(num_heads // kv_heads, dim=1)
        repeated_values = visible_values.repeat_interleave(num_heads // kv_heads, dim=1)
        scores = chunk.float() @ repeated_keys.float().transpose(2, 3) * scale  # [1, heads, queries, keys]
        scores = torch.tanh(scores / softcap) * softcap + mask.float()
        chunks.append((scores.softmax(-1) @ repeated_values.float()).to(queries.dtype))
    return torch.cat(chunks, dim=2)


# ------------------------------------------------------------------------------------------------ counter-based noise

_LN_2 = 0.6931471805599453
_ONE_BITS = 0x3FF0000000000000
_MANTISSA = 0x000FFFFFFFFFFFFF
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


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, of 31 random bits each.

    Built from IEEE additions, products and quotients only, each rounded on its own, so that every device computes the
    same bits; a library's logarithm differs between devices.
    """
    # With 31 bits, 1 - uniform is exact.
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-31
    return -_natural_log(-_natural_log(1.0 - uniform))


def _natural_log(value: torch.Tensor) -> torch.Tensor:
    """ln of positive, normal float64 values: 2 artanh((m - 1) / (m + 1)) + e ln 2, with m in [sqrt(1/2), sqrt(2))."""
    bits = value.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & _MANTISSA) | _ONE_BITS).view(torch.float64)
    upper = mantissa > 1.4142135623730951
    mantissa = torch.where(upper, mantissa * 0.5, mantissa)
    exponent = exponent + upper
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.full_like(square, 1.0 / 25.0)
    for divisor in range(23, 0, -2):
        series = series * square
        series = series + 1.0 / divisor
    return exponent.to(torch.float64) * _LN_2 + (ratio * 2.0) * series


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
    # A first pass in float32 leaves the few that can win; only these get exact noise.
    uniform = (bits.to(torch.float32) + 0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    rough = scores - uniform.neg_().log1p_().neg_().log_()
    near = (rough >= rough.max() - _WINNERS_MARGIN).nonzero().flatten()
    exact = scores[near].to(torch.float64) + gumbel(bits[near])
    # Waits for the device: the drawn token is needed on the host anyway. Of equal scores the lowest id wins.
    pairs = zip(exact.tolist(), (-ids[near]).tolist(), strict=True)
    return int(-max(pairs)[1])
