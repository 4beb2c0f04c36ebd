"""Chooses and ranks tokens by the compiled CPU kernels, many rows in one call: what torch_sampling.py says they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu_library import CpuLibrary, check_status
from kernels.token_choice import RankedTokens, TokenChoice
from kernels.torch_sampling import ranked


class _TokenChoice(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("noise_key", ctypes.c_uint64),
        ("scale", ctypes.c_float),
        ("least_score", ctypes.c_float),
        ("token", ctypes.c_int64),
    )


class _TokenRank(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("top", ctypes.c_int64),
        ("top_tokens", ctypes.c_void_p),
        ("top_logits", ctypes.c_void_p),
        ("total", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("largest", ctypes.c_float),
        ("chosen", ctypes.c_float),
    )


def choose(
    library: CpuLibrary, rows: Sequence[torch.Tensor], choices: Sequence[TokenChoice], *, num_threads: int = 1
) -> list[int]:
    """One token for each row of logits [vocab] float32, contiguous; -1 for one with NaN, +inf, or nothing but -inf.

    Args:
        library: the compiled kernels.
        rows: at least one, and all of one vocabulary.
        choices: one for each row.
        num_threads: that share the rows, the caller included.
    """
    vocab_size = _vocab_size_of(rows)
    given = (_TokenChoice * len(rows))()
    for entry, row, choice in zip(given, rows, choices, strict=True):
        entry.logits, entry.top_p, entry.top_k = row.data_ptr(), choice.top_p, choice.top_k
        entry.scale, entry.least_score = choice.scale, choice.least_score
        if entry.scale:
            first, second = choice.key
            entry.noise_key = first << 32 | second
    check_status(library.choose_tokens(given, len(rows), vocab_size, num_threads))
    return [entry.token for entry in given]


def rank(
    library: CpuLibrary,
    rows: Sequence[torch.Tensor],
    tokens: Sequence[int],
    top: Sequence[int],
    *,
    num_threads: int = 1,
) -> list[RankedTokens | None]:
    """About one token of each row of logits [vocab] float32, contiguous, and about the `top` most likely of each.

    None for a row with NaN, +inf, or nothing but -inf. Arguments as those of `choose`.
    """
    vocab_size = _vocab_size_of(rows)
    counts = [min(count, vocab_size) for count in top]
    given = (_TokenRank * len(rows))()
    top_tokens = (ctypes.c_int64 * max(1, sum(counts)))()
    top_logits = (ctypes.c_float * max(1, sum(counts)))()
    first = 0
    for entry, row, token, count in zip(given, rows, tokens, counts, strict=True):
        entry.logits, entry.token, entry.top = row.data_ptr(), token, count
        entry.top_tokens = ctypes.addressof(top_tokens) + first * ctypes.sizeof(ctypes.c_int64)
        entry.top_logits = ctypes.addressof(top_logits) + first * ctypes.sizeof(ctypes.c_float)
        first += count
    check_status(library.rank_tokens(given, len(rows), vocab_size, num_threads))
    results: list[RankedTokens | None] = []
    first = 0
    for entry, count in zip(given, counts, strict=True):
        best = list(zip(top_logits[first : first + count], top_tokens[first : first + count], strict=True))
        first += count
        is_good = entry.total > 0
        results.append(ranked(entry.largest, entry.total, entry.chosen, entry.rank, best) if is_good else None)
    return results


def _vocab_size_of(rows: Sequence[torch.Tensor]) -> int:
    vocab_size = rows[0].shape[0]
    for row in rows:
        if row.dtype != torch.float32 or row.shape != (vocab_size,) or not row.is_contiguous():
            raise ValueError(f"a row of logits is {row.dtype} {list(row.shape)}, not contiguous float32 [{vocab_size}]")
    return vocab_size
