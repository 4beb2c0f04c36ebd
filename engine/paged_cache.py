"""Where transformers' models meet the paged pool: their cache writes into slots, their attention reads the pool.

Importing this module registers the attention function under ATTENTION_NAME; models loaded with that name build no
attention masks at all. Everything about one forward pass travels in its PagedCache, which is passed twice: as `cache`
(models write K and V through it) and as the keyword `paged_cache` (models hand it on to the attention function).
"""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from engine.forward_batch import ForwardBatch
from kernels import ops

ATTENTION_NAME = "pdserve_paged"

_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Keywords that reach the attention function and change nothing here."""


class UnsupportedModel(Exception):
    """What the model asks of its cache or its attention and they do not do, as a noun phrase. Found at start."""


def host_plan(pool: torch.Tensor, batch: ForwardBatch) -> ops.PagedPlan:
    """Where `batch` reads and writes in a pool on the host."""
    return ops.PagedPlan(
        pool,
        slots=batch.slots,
        query_starts=batch.query_start_list,
        context_lens=batch.context_len_list,
        block_tables=batch.block_tables,
    )


class PagedCache:
    """One forward pass over a batch. Made for it, used once, in one thread; lends the pool, owns nothing.

    Args:
        plan: of the batch.
        layers_done: counted up for each layer whose K and V have been written; on a GPU, once that is enqueued.
    """

    def __init__(self, plan: ops.Plan, *, layers_done: c_int64 | None) -> None:
        self.plan = plan
        _, self._num_layers, _, kv_heads, _, head_dim = plan.pool.shape
        self._expected = (1, kv_heads, plan.slots.shape[0], head_dim)
        self._layers_done = layers_done
        self.num_written = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer, in order, with the new tokens' `[1, kv_heads, T, head_dim]`; returns them."""
        if layer_idx != self.num_written or layer_idx >= self._num_layers:
            raise UnsupportedModel(f"layers that write K/V out of turn (layer {layer_idx})")
        for name, states in (("keys", key_states), ("values", value_states)):
            if states.shape != self._expected:
                raise UnsupportedModel(
                    f"KV heads or head sizes that differ (the {name} of layer {layer_idx} are {list(states.shape)}, "
                    f"not {list(self._expected)})"
                )
        ops.write_kv(self.plan, layer_idx, key_states[0], value_states[0])
        self.num_written += 1
        if self._layers_done is not None:
            self._layers_done.value += 1
        return key_states, value_states

    def get_seq_length(self) -> int:
        """0, since sequences of a batch share no length. Some models ask, and then use the positions they are given."""
        return 0


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_cache: PagedCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' models call: `[1, heads, T, head_dim]` in, `[1, T, heads, head_dim]` out.

    The keywords are theirs: `softcap` bounds the scores, `s_aux` holds a sink per head.
    """
    if paged_cache is None:
        raise UnsupportedModel("an attention that is not handed `paged_cache`")
    for name, argument in kwargs.items():
        if argument is not None and argument is not False and name not in _HARMLESS:
            raise UnsupportedModel(f"attention with {name}")
    if attention_mask is not None or dropout != 0.0:
        raise UnsupportedModel("attention with a mask of its own or with dropout")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModel("attention that looks ahead")
    layer = paged_cache.num_written - 1
    if getattr(module, "layer_idx", None) != layer:
        raise UnsupportedModel("layers that share the K/V of another layer")
    num_heads, kv_heads = query.shape[1], key.shape[1]
    if num_heads % kv_heads:
        raise UnsupportedModel(f"{num_heads} query heads on {kv_heads} KV heads")
    attended = ops.paged_attention(
        paged_cache.plan,
        layer,
        query[0],
        key[0],
        value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return attended[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
