"""How much memory running sequences will need: learned output lengths, and the peak of what they add up to.

The peak follows the Past-Future scheduler (Gong et al., ASPLOS 2025, https://arxiv.org/abs/2507.10150): lengths that
were seen say how long each sequence goes on, and as each gives its blocks back at its end, the most that is ever needed
is needed just before one of these ends. Where that paper draws lengths at random, means are used here, so that the same
state always leads to the same decision.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PRIOR_LENGTH = 256
"""What the first sequences of a node are expected to say."""

_WINDOW = 512


class OutputLengths:
    """Lengths of the outputs that ended here lately, and what they tell of those that have not ended yet."""

    def __init__(self, *, prior: int = PRIOR_LENGTH, window: int = _WINDOW) -> None:
        self._recent = deque([prior])
        self._window = window
        self._sorted = [prior]
        self._tail_sums = [prior, 0]

    @property
    def mean(self) -> float:
        """Of what is known."""
        return self._tail_sums[0] / len(self._sorted)

    def record(self, length: int) -> None:
        """An output ended after so many tokens."""
        self._recent.append(length)
        bisect.insort(self._sorted, length)
        if len(self._recent) > self._window:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        # _tail_sums[i]: sum of _sorted[i:].
        self._tail_sums = [0, *itertools.accumulate(reversed(self._sorted))][::-1]

    def remaining(self, generated: int, max_tokens: int) -> int:
        """Tokens still expected of an output that has `generated`: 1 to `max_tokens - generated`.

        The mean over those known outputs that were longer. One that has outlived all of them is expected to go on for
        as long again.
        """
        longer = bisect.bisect_right(self._sorted, generated)
        count = len(self._sorted) - longer
        expected = -(-self._tail_sums[longer] // count) - generated if count else generated
        return max(1, min(expected, max_tokens - generated))


@dataclass(frozen=True, slots=True)
class Demand:
    """What one sequence has and will need.

    Attributes:
        num_tokens: tokens it has.
        held: blocks it holds or is promised.
        own: those of them that nobody shares, which its end gives back.
        remaining: tokens it is expected to add before it ends.
    """

    num_tokens: int
    held: int
    own: int
    remaining: int


def peak_growth(demands: Sequence[Demand], block_size: int) -> int:
    """Most blocks beyond those held now that the sequences need at any time, if each adds one token per step.

    O(n²) in vector operations: some 20 µs for 10 sequences, 500 µs for 256.
    """
    if not demands:
        return 0
    columns = np.array([(each.num_tokens, each.held, each.own, each.remaining) for each in demands], dtype=np.int64)
    num_tokens, held, own, remaining = columns.T
    ends = np.unique(remaining)[:, None]  # [ends, 1], against [n]
    grown = -(-(num_tokens + ends) // block_size) - held
    return int(np.where(remaining >= ends, grown, -own).sum(axis=1).max())
