"""What a caller asks for, before defaults, and how it becomes GenerationRequests. Knows no HTTP, gRPC or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import InvalidRequest
from engine.ids import RequestId
from engine.sampling_params import SamplingParams
from router.beam_search import BeamSearch, check_fields
from router.generation import GenerationRequest, ModelLimits

MAX_CHOICES_PER_PROMPT = 128
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BATCH_TOKENS = 4_000_000
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What a caller asked for; None means that nothing was said.

    Attributes:
        max_tokens: output tokens of each choice.
        max_tokens_param: how the caller spelled that field, for messages.
        default_max_tokens: what applies without `max_tokens`; None is the rest of the context.
        top_k: 0 keeps all tokens.
        seed: any 64-bit number, signed or not; None draws one.
        n: choices for each prompt.
        best_of: choices to make for each prompt, of which the `n` best are shown; None makes `n`.
        beam_search: search instead of sampling; its width takes the place of `best_of`.
        priority: lower values go first; 0 is the usual one.
        stop: strings that end a choice.
        include_stop_str: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        prompt_logprobs: most likely tokens to report with each prompt token.
    """

    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_search: BeamSearch | None = None
    priority: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES_PER_PROMPT:
            raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES_PER_PROMPT}", param="n")
        if not self.n <= self.num_made <= MAX_CHOICES_PER_PROMPT:
            raise InvalidRequest(f"best_of must be between n and {MAX_CHOICES_PER_PROMPT}", param="best_of")
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest("priority must fit into 32 bits", param="priority")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"{self.max_tokens_param} must be at least 1", param=self.max_tokens_param)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidRequest("seed must fit into 64 bits", param="seed")
        check_stop_strings(self.stop)
        if self.beam_search is not None:
            check_fields(self)

    @property
    def num_made(self) -> int:
        """Sequences that run side by side for each prompt."""
        if self.beam_search is not None:
            return self.beam_search.width
        return self.n if self.best_of is None else self.best_of

    @property
    def num_sequences(self) -> int:
        """Those of them whose tokens come back; a search keeps the others to itself."""
        return self.n if self.beam_search is not None else self.num_made

    @property
    def chooses_best(self) -> bool:
        """Whether more tokens come back than are shown, so that the router has to choose."""
        return self.num_sequences > self.n


def check_stop_strings(stop: Sequence[str]) -> None:
    """Raise InvalidRequest when there are too many, or one is empty or too long."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may have at most {MAX_STOP_STRINGS} entries", param="stop")
    if any(not text for text in stop):
        raise InvalidRequest("stop must not hold an empty string", param="stop")
    if any(len(text) > MAX_STOP_CHARACTERS for text in stop):
        raise InvalidRequest(f"a stop string may have at most {MAX_STOP_CHARACTERS} characters", param="stop")


def check_prompt(prompt: Sequence[int], limits: ModelLimits, *, param: str) -> None:
    """Raise InvalidRequest unless the prompt has tokens, all of them exist, and room is left for one more."""
    if not prompt:
        raise InvalidRequest(f"{param} must hold at least one token", param=param)
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise InvalidRequest(
            f"{param} has a token id outside the vocabulary of {limits.vocab_size} tokens", param=param
        )
    if len(prompt) >= limits.max_model_len:
        raise too_long(len(prompt), limits, param=param)


def too_long(num_tokens: int | None, limits: ModelLimits, *, param: str) -> InvalidRequest:
    """The error for a prompt that leaves no room for an answer; without a count where none was made."""
    has = f"has {num_tokens} tokens" if num_tokens is not None else "is far too long"
    return InvalidRequest(
        f"This model's maximum context length is {limits.max_model_len} tokens, and {param} {has}",
        param=param,
        reason="context_length_exceeded",
    )


def build_requests(
    prompts: Sequence[Sequence[int]],
    params: GenerateParams,
    limits: ModelLimits,
    *,
    request_id: RequestId,
    seeds: Sequence[int],
    eos_token_ids: tuple[int, ...],
    tenant_salt: bytes,
    deadline_s: float,
    prompt_param: str = "prompt",
) -> tuple[GenerationRequest, ...]:
    """Check everything about every prompt, then build one request for each. `seeds` has one seed for each prompt."""
    if not prompts:
        raise InvalidRequest(f"{prompt_param} must hold at least one prompt", param=prompt_param)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"{prompt_param} may hold at most {MAX_PROMPTS} prompts", param=prompt_param)
    name = "n" if params.num_made == params.n else "best_of"
    if params.num_made > limits.max_sequences:
        raise InvalidRequest(
            f"{name} is {params.num_made}, but no decode node runs more than {limits.max_sequences} sequences at once",
            param=name,
        )
    if len(prompts) * params.num_made > MAX_CHOICES:
        raise InvalidRequest(f"{name} times the number of prompts must be at most {MAX_CHOICES}", param=name)
    for prompt in prompts:
        check_prompt(prompt, limits, param=prompt_param)
    requests = tuple(
        GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=_sampling(len(prompt), params, limits, seed=seed, eos_token_ids=eos_token_ids),
            num_sequences=params.num_sequences,
            beam_search=params.beam_search,
            priority=params.priority,
            tenant_salt=tenant_salt,
            deadline_s=deadline_s,
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    )
    if sum(request.sampling.max_tokens for request in requests) * params.num_made > MAX_BATCH_TOKENS:
        raise InvalidRequest(
            f"{name} times prompts times {params.max_tokens_param} must be at most {MAX_BATCH_TOKENS} tokens",
            param=params.max_tokens_param,
        )
    return requests


def _sampling(
    prompt_tokens: int, params: GenerateParams, limits: ModelLimits, *, seed: int, eos_token_ids: tuple[int, ...]
) -> SamplingParams:
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_tokens",
        )
        if (value := getattr(params, name)) is not None
    }
    if params.beam_search is not None:
        given["temperature"] = 0.0  # No noise for tokens that are not looked at.
    sampling = SamplingParams(
        **given,
        seed=seed & (2**64 - 1),
        logit_bias=params.logit_bias,
        max_tokens=_max_tokens(prompt_tokens, params, limits),
        stop_token_ids=params.stop_token_ids,
        eos_token_ids=eos_token_ids,
        ignore_eos=params.ignore_eos,
        # Without log probabilities nobody knows which are the best.
        logprobs=0 if params.chooses_best and params.logprobs is None else params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
    sampling.check_token_ids(limits.vocab_size)
    return sampling


def _max_tokens(prompt_tokens: int, params: GenerateParams, limits: ModelLimits) -> int:
    room = limits.max_model_len - prompt_tokens
    pool_room = limits.max_request_blocks * limits.block_size - prompt_tokens
    if params.max_tokens is None:
        if pool_room < 1:
            raise InvalidRequest("the prompt is longer than any decode node can hold", reason="pool_too_small")
        default = room if params.default_max_tokens is None else params.default_max_tokens
        return min(default, room, pool_room)
    if params.max_tokens > room:
        raise InvalidRequest(
            f"{params.max_tokens_param} is too large: the context length is {limits.max_model_len} tokens "
            f"and the prompt has {prompt_tokens}",
            param=params.max_tokens_param,
            reason="context_length_exceeded",
        )
    if params.max_tokens > pool_room:
        raise InvalidRequest(
            f"{params.max_tokens_param} is too large: prompt and output must fit into "
            f"{limits.max_request_blocks} KV blocks of {limits.block_size} tokens",
            param=params.max_tokens_param,
            reason="pool_too_small",
        )
    return params.max_tokens
