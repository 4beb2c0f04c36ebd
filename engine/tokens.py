"""What comes out of sampling: tokens, their log probabilities, and why a sequence ended. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its natural-log probability; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


PositionLogprobs = tuple[TokenLogprob, ...]
"""The chosen token first, then the most likely ones in descending order (the chosen one may repeat among them)."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for one row of logits; `logprobs` is empty when none were asked for."""

    token_id: int
    logprobs: PositionLogprobs = ()
