"""How many tokens of a step each prompt gets. Knows no blocks, no priorities and no clock.

1. the oldest prompt, however long, gets at least a quarter of the step, so that none starves
2. those with the least left get what they need to end, while there is room
3. what is left goes to those that do not end in this step, and to the oldest: all of it, or a quarter when some
   prompt does end, so that a long prompt does not hold up the first tokens of others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

PromptT = TypeVar("PromptT")

SHARES = 4
"""One of so many parts of a step belongs to the oldest prompt."""


def share_out(
    prompts: Sequence[PromptT],
    oldest: PromptT,
    *,
    budget: int,
    places: int,
    work: Callable[[PromptT], int],
    begin: Callable[[PromptT], bool] = lambda prompt: True,
    in_order: bool = False,
) -> dict[PromptT, int]:
    """Tokens for each prompt that is in the step.

    Args:
        prompts: in the order in which they are to end; the least work first, unless something else counts for it too.
        oldest: need not be among them, and has begun.
        budget: tokens of the step, at least 1.
        places: prompts in it.
        work: tokens that a prompt has left.
        begin: makes a prompt ready to be computed, after which its work may be another; False where that cannot be.
        in_order: fill the step in the order given instead.

    Returns:
        Nothing where none of `prompts` can begin, even if the oldest could.
    """
    left = budget
    quarter = left if in_order else max(1, left // SHARES)
    kept = min(quarter, work(oldest))
    lengths: dict[PromptT, int] = {}
    longer: list[PromptT] = []
    for prompt in prompts:
        is_kept = prompt is not oldest and oldest not in lengths
        room = left - kept * is_kept
        has_place = len(lengths) + is_kept < places
        # Looked at again after it has begun.
        if has_place and work(prompt) <= room and begin(prompt) and work(prompt) <= room:
            lengths[prompt] = work(prompt)
            left -= lengths[prompt]
        else:
            longer.append(prompt)
            if in_order:
                break
    if lengths:
        left = min(left, quarter)
    # Of those that do not end in this step: the oldest gets its part, and the one nearest to its end the rest.
    is_oldest_left = oldest not in lengths
    if not (lengths and is_oldest_left):
        for prompt in longer:
            limit = left if prompt is oldest or not is_oldest_left else left - kept
            if limit < 1 or len(lengths) + (is_oldest_left and prompt is not oldest) >= places:
                break
            if begin(prompt):
                lengths[prompt] = min(limit, work(prompt))
                left -= lengths[prompt]
                break
    if not lengths and oldest not in prompts:
        return {}
    if is_oldest_left and oldest not in lengths:
        lengths[oldest] = min(left, work(oldest))
    return lengths
