"""What both public doors (HTTP and gRPC) do with a request, written once. Knows neither HTTP nor gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from uuid import uuid4

from engine.chat_template import ChatTemplate
from engine.errors import InvalidRequest, ModelNotFound, Unavailable
from engine.ids import RequestId
from engine.tokenizer import Tokenizer
from router.config import RouterConfig
from router.generation import Cluster, ModelLimits
from router.metrics import RouterMetrics
from router.request_builder import GenerateParams, build_requests, too_long
from router.running_request import RunningRequest

_TENANT_LABEL = b"pdserve tenant salt v1"
_TOKENIZER_THREADS = 2
_ECHOED_NAME_CHARACTERS = 128
_LONG_TEXT_CHARACTERS = 4000
_INLINE_CHARACTERS = 1000
_MESSAGE_CHARACTERS = 50
_Result = TypeVar("_Result")


class InferenceApi:
    """Checks, tokenises and submits requests, and keeps count of them.

    Attributes:
        config: the router's settings.
        tokenizer: of the served model.
        chat_template: None when the model has none.
        cluster: who generates.
        metrics: counts of both doors.
        started_at: seconds since 1970, reported as the model's creation.
        is_draining: set by `start_draining`; nothing new is accepted any more.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        cluster: Cluster,
        metrics: RouterMetrics,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.cluster = cluster
        self.metrics = metrics
        self.started_at = int(time.time())
        self.is_draining = False
        self._running: set[RunningRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._random = random.Random(config.seed) if config.seed is not None else secrets.SystemRandom()
        # A token of a byte-level vocabulary stands for at most as many characters as it has bytes.
        self._longest_token = max(
            (len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)), default=1
        )

    # -- what is served ---------------------------------------------------------------------------------------------

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use, the reported one first."""
        return self.config.model_names

    @property
    def limits(self) -> ModelLimits:
        """The cluster's limits under the router's own. Raises Unavailable while no decode node was ever seen."""
        limits = self.cluster.limits
        own_len = self.config.max_model_len
        return ModelLimits(
            # Embeddings may be padded: rows beyond the tokenizer's ids mean nothing that a caller could ask for.
            vocab_size=min(limits.vocab_size, self.tokenizer.vocab_size),
            max_model_len=limits.max_model_len if own_len is None else min(own_len, limits.max_model_len),
            block_size=limits.block_size,
            max_request_blocks=limits.max_request_blocks,
            max_sequences=limits.max_sequences,
        )

    @property
    def max_model_len(self) -> int | None:
        """The context length; None while no decode node was ever seen."""
        try:
            return self.limits.max_model_len
        except Unavailable:
            return self.config.max_model_len

    def is_ready(self) -> bool:
        """Whether a request would be served now."""
        return not self.is_draining and self.cluster.is_ready()

    def explain_route(self, request_id: str) -> dict[str, object] | None:
        """Why a recent request went where it went; None when that is not known (any more)."""
        explain = getattr(self.cluster, "explain", None)
        return None if explain is None else explain(request_id)

    def check_model(self, name: str | None) -> str:
        """The name to report for `name`; empty or None is the served one. Raises ModelNotFound."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            shown = name if len(name) <= _ECHOED_NAME_CHARACTERS else name[:_ECHOED_NAME_CHARACTERS] + "..."
            raise ModelNotFound(f"The model `{shown}` does not exist.")
        return name

    # -- who asks ---------------------------------------------------------------------------------------------------

    def tenant_salt(self, api_key: str | None, cache_salt: str | None = None) -> bytes:
        """16 bytes that keep the prefix cache of one key apart from every other's; empty without keys.

        `cache_salt` is the caller's own further division. It is mixed in under the server's salt, so that knowing or
        guessing one never reaches another key's cache.
        """
        if not self.config.api_keys:
            salt = b""
        else:
            salt = hmac.digest(_TENANT_LABEL, (api_key or "").encode(), hashlib.sha256)[:16]
        if cache_salt:
            salt = hmac.digest(_TENANT_LABEL + b" cache_salt " + salt, cache_salt.encode(), hashlib.sha256)[:16]
        return salt

    # -- text to tokens ---------------------------------------------------------------------------------------------

    async def tokenize_text(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", allow_empty: bool = False
    ) -> list[int]:
        """Token ids of a text, made off the event loop if it is long; a text that cannot fit is refused before."""
        self.check_length(len(text), param=param)
        ids = await self._run(lambda: self._encode(text, add_special_tokens), len(text))
        if not ids and not allow_empty:
            raise InvalidRequest(f"{param} must hold at least one token", param=param)
        return ids

    async def tokenize_texts(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[list[int]]:
        """The same for several texts at once; a text that gives no token is left for `submit` to refuse."""
        for text in texts:
            self.check_length(len(text), param=param)
        if len(texts) == 1:
            return [await self.tokenize_text(texts[0], add_special_tokens=add_special_tokens, param=param)]
        return await self.in_thread(lambda: self.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens))

    async def tokenize_chat(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a rendered chat. `content` of each message is a string by now."""
        template = self.chat_template
        if template is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions", param="messages", reason="no_chat_template"
            )
        num_characters = sum(_content_length(message) for message in messages)
        self.check_length(num_characters, param="messages")

        def render_and_encode() -> list[int]:
            text = template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                extra=extra,
            )
            self.check_length(len(text), param="messages")
            return self._encode(text, add_special_tokens)

        # What a template makes of these is not known from the length of the messages.
        has_more = bool(tools) or bool(extra)
        cost = num_characters + _MESSAGE_CHARACTERS * len(messages)
        return await self._run(render_and_encode, _LONG_TEXT_CHARACTERS if has_more else cost)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Encoding a single text keeps the interpreter's lock, so that a long one would hold up every other request;
        # a batch gives it away.
        if len(text) > _LONG_TEXT_CHARACTERS:
            return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_length(self, num_characters: int, *, param: str) -> None:
        """Raise InvalidRequest when so much text cannot fit whatever its tokens are."""
        limits = self.limits
        if num_characters > limits.max_model_len * self._longest_token:
            raise too_long(None, limits, param=param)

    async def _run(self, work: Callable[[], _Result], num_characters: int) -> _Result:
        """A short text is done before a thread would have begun; a longer one must not hold up the event loop."""
        return work() if num_characters <= _INLINE_CHARACTERS else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Run something slow that is no coroutine on the tokeniser's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # -- generation -------------------------------------------------------------------------------------------------

    def next_seed(self) -> int:
        """64 random bits for a request that brought no seed."""
        return self._random.getrandbits(64)

    def new_id(self, prefix: str) -> str:
        """A response id that is ours alone, whatever the client calls its request."""
        return f"{prefix}{uuid4().hex}"

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: GenerateParams,
        *,
        response_id: str,
        request_id: str | None = None,
        model: str | None = None,
        tenant_salt: bytes = b"",
        prompt_param: str = "prompt",
        started: float | None = None,
        deadline_s: float | None = None,
    ) -> RunningRequest:
        """Check everything, admit the first prompt, and return what runs. The caller must `aclose` it.

        Args:
            prompts: token ids; each prompt gets `params.n` choices, numbered through.
            response_id: from `new_id`.
            request_id: a label for logs, `response_id` without one.
            model: the name to report, from `check_model`.
            tenant_salt: from `tenant_salt`.
            prompt_param: how the caller spelled the prompt, for messages.
            started: time.monotonic() at which the request came in.
            deadline_s: seconds from now that the caller will wait, where that is less than the router's own limit.

        Raises:
            InvalidRequest, Overloaded, Unavailable: nothing runs then.
        """
        if self.is_draining:
            raise Unavailable("the server is shutting down", retry_after_s=5.0, reason="draining")
        lowest = -self.config.max_priority_boost
        if params.priority < lowest:
            raise InvalidRequest(f"priority must be at least {lowest} on this server", param="priority")
        seed = params.seed
        requests = build_requests(
            prompts,
            params,
            self.limits,
            request_id=RequestId(request_id or response_id),
            seeds=[self.next_seed() if seed is None else seed for _ in prompts],
            eos_token_ids=self.tokenizer.eos_token_ids,
            tenant_salt=tenant_salt,
            deadline_s=min(self.config.request_timeout_s, math.inf if deadline_s is None else deadline_s),
            prompt_param=prompt_param,
        )
        running = RunningRequest(
            response_id,
            model or self.model_names[0],
            requests,
            params,
            cluster=self.cluster,
            tokenizer=self.tokenizer,
            metrics=self.metrics,
            on_close=self._forget,
            started=started,
        )
        self._running.add(running)
        self._idle.clear()
        try:
            await running.start()
        except BaseException:
            await running.aclose()
            raise
        return running

    def _forget(self, running: RunningRequest) -> None:
        self._running.discard(running)
        if not self._running:
            self._idle.set()

    @property
    def num_running(self) -> int:
        """Requests that are not closed yet."""
        return len(self._running)

    # -- the end ----------------------------------------------------------------------------------------------------

    def start_draining(self) -> None:
        """Accept nothing new from now on. Idempotent."""
        self.is_draining = True

    async def drain(self, timeout_s: float) -> int:
        """Wait for running requests, then fail the rest; returns how many those were."""
        self.start_draining()
        await self.wait_idle(timeout_s)
        return self.fail_running()

    def fail_running(self) -> int:
        """End what runs with an error for its client; returns how many requests that were."""
        rest = list(self._running)
        for running in rest:
            running.fail(Unavailable("the server shut down before the answer was complete", reason="draining"))
        return len(rest)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every request was closed within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop the tokeniser's threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _content_length(message: Mapping[str, object]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0
