"""What any model computes with: KV writes, paged attention, the choice of tokens, each by what is quickest here.

Attention on a CPU is the compiled kernels' where they are, else torch's; on a GPU, Triton's: the plan of a batch
decides. So with the choice of tokens, by where the logits are. Whole batches compiled for a CPU are `cpu_decoder.py`.
`reference.py` says what the results of all of them must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from kernels import cpu_operations, cpu_sampling, torch_attention, torch_sampling
from kernels.cpu_library import load_library
from kernels.paged_plan import PagedPlan as PagedPlan
from kernels.token_choice import RankedTokens as RankedTokens
from kernels.token_choice import TokenChoice as TokenChoice

if TYPE_CHECKING:
    from kernels.triton_attention import TritonPlan

    Plan: TypeAlias = PagedPlan | TritonPlan

# ----------------------------------------------------------------------------------------------------------- paged KV


def gpu_plans() -> type[TritonPlan]:
    """What PagedPlan is, for a pool on a GPU: Triton's kernels compute with it."""
    from kernels.triton_attention import TritonPlan  # Triton is there only where a GPU is.

    return TritonPlan


def write_kv(plan: Plan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put the new tokens' K and V, `[kv_heads, T, head_dim]` each, into their slots of one layer."""
    if not isinstance(plan, PagedPlan):
        from kernels import triton_attention

        triton_attention.write_kv(plan, layer, key, value)
        return
    head_dim = plan.pool.shape[5]
    rows = plan.layer_rows(layer, head_dim)
    rows.index_copy_(0, plan.key_rows, key.reshape(-1, head_dim).to(rows.dtype))
    rows.index_copy_(0, plan.value_rows, value.reshape(-1, head_dim).to(rows.dtype))


def paged_attention(
    plan: Plan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over everything its sequences have in the pool.

    The new tokens must have been written already. Softmax is in float32. Results of a sequence do not depend on the
    others in the batch. Slots past a sequence's context are never computed with, so what a block held before reaches
    nobody, NaN included.

    Args:
        plan: of this batch.
        layer: which layer of the pool.
        query: [heads, T, head_dim]; heads is a multiple of kv_heads.
        key: [kv_heads, T, head_dim], the new tokens' own.
        value: the same for values.
        scale: factor on the scores.
        window: how many tokens back a query sees, itself included; None is all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2, arXiv 2408.00118); None leaves them.
        sinks: [heads], a score per head that takes its share of the softmax and gives no value, as a learned key with
            a value of zero would (gpt-oss); None for none.

    Returns:
        [T, heads, head_dim]
    """
    if not isinstance(plan, PagedPlan):
        from kernels import triton_attention

        return triton_attention.paged_attention(
            plan, layer, query, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
    library = load_library() if plan.pool.device.type == "cpu" else None
    if library is not None and cpu_operations.can_attend(plan.pool):
        return cpu_operations.paged_attention(
            library,
            plan.pool,
            layer,
            query.transpose(0, 1),
            query_starts=plan.query_starts_tensor,
            context_lens=plan.context_lens_tensor,
            block_tables=plan.block_tables,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            num_threads=torch.get_num_threads(),
        )
    scoring = torch_attention.Scoring(scale, soft_cap, sinks)
    narrow = (tensor.to(plan.pool.dtype) for tensor in (query, key, value))
    return torch_attention.paged_attention(plan, layer, *narrow, window=window, scoring=scoring).to(query.dtype)


# ----------------------------------------------------------------------------------------------------------- sampling


def choose_tokens(rows: Sequence[torch.Tensor], choices: Sequence[TokenChoice]) -> list[int]:
    """One token for each row of logits [vocab] float32; -1 for a row with NaN, +inf, or nothing but -inf.

    The same tokens whatever computes them: the compiled kernels; Triton's, with one wait for the device, or a few where
    top_p is wanted; or torch.
    """
    if not rows:
        return []
    if rows[0].device.type == "cuda":
        from kernels import triton_sampling  # Triton is there only where a GPU is.

        with torch.cuda.device(rows[0].device):  # Which device is current is a matter of each thread.
            return torch_sampling.choose(torch.stack(list(rows)), choices, triton_sampling.draw)
    library = load_library()
    if library is not None:
        return cpu_sampling.choose(library, rows, choices, num_threads=torch.get_num_threads())
    # Row by row: what is computed on the way then stays in the cache.
    return [
        torch_sampling.choose(row[None], [choice], torch_sampling.draw_on_host)[0]
        for row, choice in zip(rows, choices, strict=True)
    ]


def rank_tokens(rows: Sequence[torch.Tensor], tokens: Sequence[int], top: Sequence[int]) -> list[RankedTokens | None]:
    """About one token of each row of logits [vocab] float32, and about the `top` most likely of each.

    None for a row with NaN, +inf, or nothing but -inf.
    """
    library = load_library() if rows and rows[0].device.type == "cpu" else None
    if library is not None:
        return cpu_sampling.rank(library, rows, tokens, top, num_threads=torch.get_num_threads())
    return [torch_sampling.rank(row, token, count) for row, token, count in zip(rows, tokens, top, strict=True)]
