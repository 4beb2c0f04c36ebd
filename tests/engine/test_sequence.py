"""Why a sequence ends: stop beats length, end tokens can be ignored, nothing stops before min_tokens."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from engine.sequence import finish_reason
from engine.tokens import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 5, "eos_token_ids": (2, 3), "stop_token_ids": (9,), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "changes", "expected"),
    [
        ([], {}, None),
        ([1, 1], {}, None),
        ([1, 2], {}, (STOP, None)),
        ([3], {}, (STOP, None)),
        ([1, 9], {}, (STOP, 9)),
        ([2], {"ignore_eos": True}, None),
        ([9], {"ignore_eos": True}, (STOP, 9)),
        ([2], {"ignore_eos": True, "stop_token_ids": (2,)}, (STOP, 2)),
        ([1, 1, 1, 1, 1], {}, (LENGTH, None)),
        ([1, 1, 1, 1, 2], {}, (STOP, None)),
        ([1, 1, 1, 1, 9], {}, (STOP, 9)),
        ([1, 1, 1, 1, 2], {"ignore_eos": True}, (LENGTH, None)),
        ([1, 2], {"min_tokens": 3}, None),
        ([1, 1, 1, 2], {"min_tokens": 3}, (STOP, None)),
        ([1, 1, 1, 1, 1], {"min_tokens": 5}, (LENGTH, None)),
        ([2, 1], {}, None),
    ],
)
def test_finish_reason(output: list[int], changes: dict[str, object], expected: object) -> None:
    assert finish_reason(params(**changes), 10, output, 1000) == expected


def test_model_length_limits_prompt_and_output_together() -> None:
    assert finish_reason(params(), 10, [1, 1], 13) is None
    assert finish_reason(params(), 10, [1, 1, 1], 13) == (LENGTH, None)
    assert finish_reason(params(), 10, [1, 1, 2], 13) == (STOP, None)
