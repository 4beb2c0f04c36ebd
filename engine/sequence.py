"""When a sequence of tokens ends, and why. Knows no text, no tensors; stop strings are the router's job."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sampling_params import SamplingParams
from engine.tokens import FinishReason


def finish_reason(
    params: SamplingParams, prompt_length: int, output_token_ids: Sequence[int], max_model_len: int
) -> tuple[FinishReason, int | None] | None:
    """Whether the last output token ends the sequence: the reason, and the stop token that is named as the cause.

    A stop token beats a length limit reached by the same token. The model's own end tokens are not named.
    """
    num_output = len(output_token_ids)
    if num_output == 0:
        return None
    last = output_token_ids[-1]
    if num_output >= params.min_tokens:
        if not params.ignore_eos and last in params.eos_token_ids:
            return FinishReason.STOP, None
        if last in params.stop_token_ids:
            return FinishReason.STOP, last
    if num_output >= params.max_tokens or prompt_length + num_output >= max_model_len:
        return FinishReason.LENGTH, None
    return None
