"""The request bodies of the OpenAI endpoints: which fields there are, and what their values may be. Knows no model.

A field is either understood here, or listed as refused with the values that ask for nothing, or ignored. Null is the
same as absent, for every field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool, StrictStr, ValidationError

from engine.errors import InvalidRequest
from engine.sampling_params import MAX_LOGPROBS
from router.beam_search import requested_search
from router.limits import check_depth
from router.request_builder import GenerateParams

Int = Annotated[int, Strict()]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_ROLES_WITHOUT_CONTENT = frozenset({"assistant", "tool", "function"})
_MAX_SHOWN = 60
_ANY_BUT_NULL: tuple[object, ...] = ()
_EMPTY: tuple[object, ...] = ([], {}, "")
_RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template", "documents"}
)

_REFUSED_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "early_stopping": (False,),
    "guided_choice": _ANY_BUT_NULL,
    "guided_grammar": _ANY_BUT_NULL,
    "guided_json": _ANY_BUT_NULL,
    "guided_regex": _ANY_BUT_NULL,
    "logits_processors": _EMPTY,
    "prompt_logprobs": _ANY_BUT_NULL,
    "structured_outputs": _ANY_BUT_NULL,
    "truncate_prompt_tokens": _ANY_BUT_NULL,
}


class Body(BaseModel):
    """Base of all request bodies. `REFUSED` maps a field to the values that ask for nothing."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)
    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: StrictStr | None = None

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Check a JSON object. Raises InvalidRequest naming the first field that is wrong; never repeats the input."""
        given = {name: item for name, item in value.items() if item is not None}
        for name, neutral in cls.REFUSED.items():
            if name in given and not any(type(given[name]) is type(item) and given[name] == item for item in neutral):
                raise InvalidRequest(f"{name} is not supported", param=name)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            param = field_path(first["loc"])
            raise InvalidRequest(f"{param}: {first['msg']}", param=param) from None


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Int | None = None
    n: Int = 1
    use_beam_search: StrictBool = False
    length_penalty: Number | None = None
    priority: Int = 0
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: Any = None
    stop_token_ids: list[Int] = []
    ignore_eos: StrictBool = False
    logit_bias: dict[StrictStr, Number] = {}
    skip_special_tokens: StrictBool = True
    include_stop_str_in_output: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool = False
    return_tokens_as_token_ids: StrictBool = False
    include_timings: StrictBool = False
    cache_salt: StrictStr | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raise InvalidRequest for what no single field shows."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is allowed only with stream", param="stream_options")
        if self.use_beam_search and self.stream:
            raise InvalidRequest("stream is not supported with use_beam_search", param="stream")

    def generate_params(
        self,
        *,
        max_tokens: int | None,
        max_tokens_param: str,
        default_max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        best_of: int | None = None,
    ) -> GenerateParams:
        """The part of the body that says how to generate."""
        if self.top_k is not None and self.top_k < 1 and self.top_k != -1:
            raise InvalidRequest("top_k must be at least 1, or -1 for all tokens", param="top_k")
        return GenerateParams(
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            default_max_tokens=default_max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            logit_bias=_logit_bias(self.logit_bias),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=self.n,
            best_of=best_of,
            beam_search=requested_search(
                self.use_beam_search, self.n if best_of is None else best_of, self.length_penalty
            ),
            priority=self.priority,
            stop=_stop_strings(self.stop),
            include_stop_str=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_REFUSED_EVERYWHERE,
        "suffix": ("",),
        "prompt_embeds": _ANY_BUT_NULL,
        "response_format": ({"type": "text"},),
    }

    prompt: Any = None
    add_special_tokens: StrictBool = True
    best_of: Int | None = None
    echo: StrictBool = False
    logprobs: Int | None = None

    def check(self) -> None:
        super().check()
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise InvalidRequest(
                "with stream, best_of must equal n: the best are not known before the end", param="best_of"
            )
        _check_top("logprobs", self.logprobs)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1; 0 is allowed only with echo", param="max_tokens")

    @property
    def is_prompt_only(self) -> bool:
        """Whether nothing but the echoed prompt is wanted."""
        return self.echo and self.max_tokens == 0

    def prompts(self) -> tuple[list[str], list[list[int]]]:
        """The prompts, as texts or as token ids: one of the two lists is empty."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt], []
        if isinstance(prompt, list) and prompt:
            kinds = set(map(type, prompt))
            if kinds == {str}:
                return prompt, []
            if kinds == {int}:
                return [], [prompt]
            if kinds == {list} and all(item and set(map(type, item)) == {int} for item in prompt):
                return [], prompt
        raise InvalidRequest(
            "prompt must be a text, a list of token ids, or a list of either, and none of them empty", param="prompt"
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_REFUSED_EVERYWHERE,
        "audio": _ANY_BUT_NULL,
        "best_of": (1,),
        "chat_template": _ANY_BUT_NULL,
        "documents": _EMPTY,
        "echo": (False,),
        "function_call": ("none",),
        "functions": _EMPTY,
        "modalities": (["text"],),
        "moderation": _ANY_BUT_NULL,
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "verbosity": ("medium",),
        "web_search_options": _ANY_BUT_NULL,
    }

    messages: Any = None
    max_completion_tokens: Int | None = None
    logprobs: StrictBool = False
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    reasoning_effort: StrictStr | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool = False
    chat_template_kwargs: dict[str, Any] = {}

    def check(self) -> None:
        super().check()
        _check_top("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is allowed only with logprobs", param="top_logprobs")
        check_template_options(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        check_depth(self.tools, param="tools")
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest('tools are not supported yet, except with tool_choice "none"', param="tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is allowed only with tools", param="tool_choice")

    @property
    def template_extra(self) -> dict[str, object]:
        """What the chat template gets besides messages and tools."""
        extra: dict[str, object] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return extra | self.chat_template_kwargs


class TokenizeBody(Body):
    """POST /tokenize: `prompt`, or `messages` with the fields that a chat has for its template."""

    prompt: StrictStr | None = None
    messages: Any = None
    tools: list[dict[str, Any]] = []
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: StrictBool = False

    def check(self) -> None:
        """Raise InvalidRequest for what no single field shows."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        check_template_options(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        check_depth(self.tools, param="tools")


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[Int]


def field_path(location: Sequence[int | str]) -> str:
    """`messages[0].role` for ("messages", 0, "role"); only the first two names, and those cut short."""
    path = ""
    for part in location[:3]:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_SHOWN]}" if path else part[:_MAX_SHOWN]
    return path


def check_template_options(
    add_generation_prompt: bool, continue_final_message: bool, template_kwargs: Mapping[str, object]
) -> None:
    """Raise InvalidRequest when they contradict each other or reach for what the server sets."""
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false", param="continue_final_message"
        )
    if reserved := _RESERVED_TEMPLATE_NAMES & template_kwargs.keys():
        raise InvalidRequest(
            f"chat_template_kwargs must not hold {min(reserved)}; it is set by the server", param="chat_template_kwargs"
        )
    check_depth(template_kwargs, param="chat_template_kwargs")


def chat_messages(messages: object) -> list[dict[str, object]]:
    """Messages as a chat template likes them: `content` a string, tool-call arguments parsed, `developer` as `system`.

    Raises InvalidRequest for anything that is no message, and for parts that are not text.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    check_depth(messages, param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, path: str) -> dict[str, object]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(sorted(ROLES))}", param=f"{path}.role")
    shown: dict[str, object] = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), role, f"{path}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidRequest(f"{path}.{name} must be a string", param=f"{path}.{name}")
        shown[name] = value
    if message.get("tool_calls") is not None:
        shown["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    return shown


def _content(content: object, role: str, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role in _ROLES_WITHOUT_CONTENT:
            return ""
        raise InvalidRequest(f"{path} is missing", param=path)
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or a list of parts", param=path)
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        shown = kind[:_MAX_SHOWN] if isinstance(kind, str) else "without a type"
        raise InvalidRequest(f"{path} is {shown}, but this model reads text parts only", param=path)
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{kind} must be a string", param=f"{path}.{kind}")
    return text


def _tool_calls(calls: object, path: str) -> list[dict[str, object]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path} must be a list", param=path)
    shown: list[dict[str, object]] = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{path}[{index}] must have a function with a name", param=f"{path}[{index}]")
        shown.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return shown


def _arguments(arguments: object) -> object:
    """Templates expect an object; text that is none stays what the model wrote."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
        check_depth(parsed, param="messages")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        return tuple(stop)
    raise InvalidRequest("stop must be a string or a list of strings", param="stop")


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest("logit_bias must have token ids as its keys", param="logit_bias")
        by_id[int(key)] = value
    return by_id


def _check_top(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_LOGPROBS}", param=name)
