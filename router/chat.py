"""POST /v1/chat/completions: messages through the model's chat template, one assistant message for each choice."""

from __future__ import annotations

from engine.tokens import PositionLogprobs
from router.inference_api import InferenceApi
from router.logprob_text import chat_logprobs
from router.openai_job import Caller, CollectedChoice, Json, OpenAiJob
from router.openai_protocol import ChatBody, chat_messages
from router.running_request import RunningRequest
from router.text_stream import TextDelta


class ChatJob(OpenAiJob):
    """One request to /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    body: ChatBody

    def __init__(self, api: InferenceApi, body: Json, caller: Caller) -> None:
        super().__init__(api, ChatBody.parse(body), caller)
        self._messages = chat_messages(self.body.messages)

    async def submit(self) -> RunningRequest:
        body = self.body
        has_newer_name = body.max_completion_tokens is not None
        params = body.generate_params(
            max_tokens=body.max_completion_tokens if has_newer_name else body.max_tokens,
            max_tokens_param="max_completion_tokens" if has_newer_name else "max_tokens",
            default_max_tokens=None,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        prompt = await self.api.tokenize_chat(
            self._messages,
            tools=body.tools or None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            extra=body.template_extra,
        )
        return await self.api.submit(
            [prompt],
            params,
            response_id=self.response_id,
            request_id=self.caller.request_id,
            model=self.model,
            tenant_salt=self.tenant_salt,
            prompt_param="messages",
            started=self.caller.started,
        )

    def opening(self, running: RunningRequest) -> list[Json]:
        return [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for index in range(running.num_choices)
        ]

    def chunk(self, running: RunningRequest, choices: list[Json]) -> Json:
        chunk = super().chunk(running, choices)
        if self.body.return_token_ids and choices and choices[0].get("delta", {}).get("role"):
            chunk["prompt_token_ids"] = running.requests[0].prompt_token_ids
        return chunk

    def delta(self, running: RunningRequest, index: int, delta: TextDelta) -> Json | None:
        body = self.body
        has_tokens = bool(delta.token_ids) and (body.logprobs or body.return_token_ids)
        if not delta.text and delta.finish_reason is None and not has_tokens:
            return None
        choice: Json = {
            "index": index,
            "delta": {"content": delta.text} if delta.text or delta.finish_reason is None else {},
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs) if delta.token_ids else None,
            "finish_reason": None if delta.finish_reason is None else delta.finish_reason.value,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def whole(self, running: RunningRequest, choices: list[CollectedChoice]) -> Json:
        shown = []
        for index, collected in enumerate(choices):
            choice: Json = {
                "index": index,
                "message": {"role": "assistant", "content": "".join(collected.text), "refusal": None},
                "logprobs": self._logprobs(tuple(collected.token_ids), tuple(collected.logprobs)),
                "finish_reason": collected.finish_reason,
                "stop_reason": collected.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = collected.token_ids
            shown.append(choice)
        answer: Json = {
            "id": self.response_id,
            "object": "chat.completion",
            "created": running.created_at,
            "model": self.model,
            "choices": shown,
            "usage": self.usage(running),
        }
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = running.requests[0].prompt_token_ids
        return answer

    def _logprobs(self, token_ids: tuple[int, ...], logprobs: tuple[PositionLogprobs, ...]) -> Json | None:
        if not self.body.logprobs:
            return None
        return {
            "content": chat_logprobs(self.names, token_ids, logprobs, top=self.body.top_logprobs or 0),
            "refusal": None,
        }
