"""How one request wants its tokens chosen. Knows no tensors, no wire format and no HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked on construction; raises InvalidRequest naming the field.

    Attributes:
        temperature: 0 is greedy; values below 1e-5 count as 0.
        top_p: smallest set of tokens with at least this probability; 1 keeps all.
        top_k: most likely tokens kept; 0 keeps all.
        min_p: least probability kept, relative to the most likely token; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
        presence_penalty: subtracted once from the logit of each token in the output.
        frequency_penalty: subtracted from a logit once per occurrence in the output.
        seed: 64 bits; with sequence index and position it decides all noise.
        logit_bias: added to logits, by token id.
        max_tokens: output tokens, at least 1.
        min_tokens: output tokens before any end or stop token may come.
        stop_token_ids: tokens that end the sequence and are named as the stop reason.
        eos_token_ids: the model's own end tokens.
        ignore_eos: let `eos_token_ids` end nothing.
        logprobs: most likely tokens to report with each output token; None reports nothing.
        prompt_logprobs: the same for each prompt token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be greater than 0 and at most 1", param="top_p")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("seed", self.seed, 0, 2**64 - 1)
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias may have at most {MAX_LOGIT_BIAS} entries", param="logit_bias")
        for bias in self.logit_bias.values():
            _in_range("logit_bias", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"stop_token_ids may have at most {MAX_STOP_TOKENS} entries", param="stop_token_ids")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token always wins."""
        return self.temperature < 1e-5

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise InvalidRequest when a token id of the caller lies outside [0, vocab_size)."""
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(self, name):
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(f"{name} has a token id outside the vocabulary of {vocab_size}", param=name)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    # The comparison is written so that NaN fails it.
    if not (low <= value <= high) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}", param=name)
