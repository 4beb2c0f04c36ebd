"""Beam search written down in the plainest way, to compare with: no blocks, no slots, no early end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels import torch_sampling

NextLogits = Callable[[Sequence[int]], torch.Tensor]
"""Logits [vocab] float32 of the token after a text."""


@dataclass(frozen=True)
class Found:
    """One result."""

    token_ids: list[int]
    score: float
    is_stopped: bool


def beam_search(
    next_logits: NextLogits,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    ends: Sequence[int] = (),
    ignored_ends: Sequence[int] = (),
) -> list[Found]:
    """The `width` best continuations as vLLM defines them; it has one end token, any of `ends` counts as that."""
    alive: list[tuple[list[int], float]] = [([], 0.0)]
    found: list[tuple[list[int], float, bool]] = []
    for _ in range(max_tokens):
        grown: list[tuple[list[int], float]] = []
        for tokens, total in alive:
            logits = next_logits([*prompt, *tokens])
            ranked = torch_sampling.rank(logits, 0, max(2 * width, width + len(ends)))
            assert ranked is not None
            for token, logprob in ranked.top:
                if token in ends:
                    found.append(([*tokens, token], total + logprob, True))
                else:
                    grown.append(([*tokens, token], total + logprob))
        alive = sorted(grown, key=lambda beam: -beam[1])[:width]
    found += [(tokens, total, False) for tokens, total in alive]
    results = []
    for tokens, total, is_stopped in found:
        length = len(prompt) + len(tokens) - (tokens[-1] in (*ends, *ignored_ends))
        results.append(Found(tokens, total / length**length_penalty, is_stopped))
    return sorted(results, key=lambda result: -result.score)[:width]
