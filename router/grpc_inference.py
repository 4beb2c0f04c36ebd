"""The calls of pdserve.v1.Inference, translated to InferenceApi and back. Knows no keys' rules and no status codes.

Raises PdserveErrors; router/grpc_server.py makes statuses of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import InvalidRequest, Overloaded, Unavailable
from engine.tokens import PositionLogprobs, TokenLogprob
from proto import inference_pb2 as pb
from proto import inference_pb2_grpc as rpc
from router.auth import ApiKeys
from router.beam_search import requested_search
from router.http_edge import safe_request_id
from router.inference_api import InferenceApi
from router.logprob_text import LOWEST_LOGPROB, most_likely
from router.request_builder import DEFAULT_COMPLETION_TOKENS, GenerateParams
from router.running_request import RunningRequest
from router.text_stream import TextDelta

TOKENS_PER_MESSAGE = 256
"""With 20 log probabilities each, well below the 4 MiB that a client accepts by default."""


class Call:
    """What is used of one call's grpc.aio context.

    Attributes:
        metadata: what the client sent, text values only.
        has_begun: something was written.
    """

    def __init__(self, context: Any) -> None:
        self.metadata: Mapping[str, str] = {
            key: value for key, value in (context.invocation_metadata() or ()) if isinstance(value, str)
        }
        self.has_begun = False
        self._context = context

    def time_remaining(self) -> float | None:
        """Seconds that the client still waits; None without a deadline."""
        remaining: float | None = self._context.time_remaining()
        return remaining

    async def write(self, message: pb.GenerateResponse) -> None:
        """Send; waits while the client does not read."""
        self.has_begun = True
        await self._context.write(message)


class InferenceServicer(rpc.InferenceServicer):
    """Stateless: everything about a request hangs on its call."""

    def __init__(self, api: InferenceApi, keys: ApiKeys) -> None:
        self._api = api
        self._keys = keys

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> None:
        """Writes instead of yielding, so that a cancel arrives here and frees everything at once."""
        started = time.monotonic()
        api = self._api
        model = api.check_model(request.model)
        params = generate_params(request)
        prompt, param = await self._prompt_ids(request)
        running = await api.submit(
            [prompt],
            params,
            response_id=api.new_id("gen-"),
            request_id=safe_request_id(call.metadata.get("x-request-id")),
            model=model,
            tenant_salt=api.tenant_salt(self._keys.find(call.metadata.get("authorization"))),
            prompt_param=param,
            started=started,
            deadline_s=call.time_remaining(),
        )
        try:
            await self._write_all(running, call)
        finally:
            await running.aclose()

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        self._api.check_model(request.model)
        wants_special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        match request.WhichOneof("prompt"):
            case "text":
                ids = await self._api.tokenize_text(
                    request.text, add_special_tokens=wants_special is not False, param="text", allow_empty=True
                )
            case "chat":
                ids = await self._api.tokenize_chat(_messages(request.chat), add_special_tokens=bool(wants_special))
            case _:
                raise InvalidRequest("one of text and chat must be set", param="prompt")
        return pb.TokenizeResponse(ids=ids, max_model_len=self._api.limits.max_model_len)

    async def ListModels(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        try:
            longest = self._api.limits.max_model_len
        except Unavailable:
            longest = 0  # No node has said it yet; the names are known all the same.
        cards = [pb.ModelCard(id=name, max_model_len=longest) for name in self._api.model_names]
        return pb.ListModelsResponse(models=cards)

    async def _prompt_ids(self, request: pb.GenerateRequest) -> tuple[list[int], str]:
        """The prompt's tokens, and the field it was given in."""
        match request.WhichOneof("prompt"):
            case "text":
                return await self._api.tokenize_text(request.text, param="text"), "text"
            case "tokens":
                return list(request.tokens.ids), "tokens"
            case "chat":
                return await self._api.tokenize_chat(_messages(request.chat)), "chat"
            case _:
                raise InvalidRequest("one of text, tokens and chat must be set", param="prompt")

    async def _write_all(self, running: RunningRequest, call: Call) -> None:
        unfinished = running.num_choices
        async for batch in running.batches():
            for index, delta in batch:
                responses = list(self._responses(running, index, delta))
                unfinished -= delta.finish_reason is not None
                if unfinished == 0:
                    usage = running.usage
                    responses[-1].usage.CopyFrom(
                        pb.Usage(
                            prompt_tokens=usage.prompt_tokens,
                            completion_tokens=usage.completion_tokens,
                            cached_tokens=usage.cached_tokens,
                        )
                    )
                for response in responses:
                    await self._write(call, response)

    async def _write(self, call: Call, response: pb.GenerateResponse) -> None:
        patience_s = self._api.config.slow_client_s
        try:
            async with asyncio.timeout(patience_s):
                await call.write(response)
        except TimeoutError as error:
            raise Overloaded(f"the client read nothing for {patience_s:g} s", reason="slow_client") from error

    def _responses(self, running: RunningRequest, index: int, delta: TextDelta) -> Iterator[pb.GenerateResponse]:
        """The delta as messages of bounded size: text in the first, finish reason in the last."""
        starts = range(0, max(1, len(delta.token_ids)), TOKENS_PER_MESSAGE)
        for start in starts:
            end = start + TOKENS_PER_MESSAGE
            is_last = start == starts[-1]
            yield pb.GenerateResponse(
                id=running.response_id,
                model=running.model,
                index=index,
                text=delta.text if start == 0 else "",
                token_ids=delta.token_ids[start:end],
                logprobs=[self._position(running, position) for position in delta.logprobs[start:end]],
                finish_reason=delta.finish_reason.value if is_last and delta.finish_reason is not None else "",
            )

    def _position(self, running: RunningRequest, position: PositionLogprobs) -> pb.PositionLogprobs:
        top = running.params.logprobs or 0
        return pb.PositionLogprobs(
            chosen=self._logprob(position[0]) if position else None,
            top=[self._logprob(entry) for entry in most_likely(position, top)],
        )

    def _logprob(self, entry: TokenLogprob) -> pb.Logprob:
        text = self._api.tokenizer.token_text(entry.token_id)
        return pb.Logprob(token_id=entry.token_id, token=text, logprob=max(entry.logprob, LOWEST_LOGPROB))


def generate_params(request: pb.GenerateRequest) -> GenerateParams:
    """What the caller asked for; a field that is not set stays None."""

    def given(name: str) -> Any:
        return getattr(request, name) if request.HasField(name) else None

    def decimal(name: str) -> float | None:
        return None if (value := given(name)) is None else _decimal(value)

    n = request.n if request.HasField("n") else 1
    best_of = given("best_of")
    width = n if best_of is None else best_of
    return GenerateParams(
        max_tokens=given("max_tokens"),
        default_max_tokens=None if request.WhichOneof("prompt") == "chat" else DEFAULT_COMPLETION_TOKENS,
        temperature=decimal("temperature"),
        top_p=decimal("top_p"),
        top_k=given("top_k"),
        min_p=decimal("min_p"),
        repetition_penalty=decimal("repetition_penalty"),
        presence_penalty=decimal("presence_penalty"),
        frequency_penalty=decimal("frequency_penalty"),
        seed=given("seed"),
        logit_bias={token_id: _decimal(bias) for token_id, bias in request.logit_bias.items()},
        min_tokens=given("min_tokens"),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=given("logprobs"),
        n=n,
        best_of=best_of,
        beam_search=requested_search(request.use_beam_search, width, decimal("length_penalty")),
        priority=request.priority,
        stop=tuple(request.stop),
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
    )


def _decimal(value: float) -> float:
    """The number that the caller wrote: 0.1 as a float of 32 bits is 0.100000001 and may miss a limit by that much."""
    return float(f"{value:.7g}")


def _messages(chat: pb.ChatPrompt) -> list[dict[str, object]]:
    if not chat.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return [{"role": message.role, "content": message.content} for message in chat.messages]
