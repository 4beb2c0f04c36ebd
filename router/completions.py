"""POST /v1/completions: prompts as text or ids, echo, and log probabilities in that endpoint's own shape."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidRequest
from engine.tokens import PositionLogprobs
from router.detokenizer import text_offsets
from router.inference_api import InferenceApi
from router.logprob_text import CompletionLogprobs, completion_logprobs
from router.openai_job import Caller, CollectedChoice, Json, OpenAiJob, usage_json
from router.openai_protocol import CompletionBody
from router.request_builder import MAX_PROMPTS
from router.running_request import RunningRequest, Usage
from router.text_stream import TextDelta


class CompletionJob(OpenAiJob):
    """One request to /v1/completions.

    With echo and `max_tokens` 0 one token is generated, since prompt log probabilities come with it, and dropped.
    """

    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    body: CompletionBody

    def __init__(self, api: InferenceApi, body: Json, caller: Caller) -> None:
        super().__init__(api, CompletionBody.parse(body), caller)
        self._texts, self._ids = self.body.prompts()
        self._decoded: dict[int, str] = {}
        if len(self._texts) + len(self._ids) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt may hold at most {MAX_PROMPTS} prompts", param="prompt")

    async def submit(self) -> RunningRequest:
        body = self.body
        params = body.generate_params(
            max_tokens=1 if body.is_prompt_only else body.max_tokens,
            max_tokens_param="max_tokens",
            default_max_tokens=16,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            best_of=body.best_of,
        )
        if self._texts:
            prompts: Sequence[Sequence[int]] = await self.api.tokenize_texts(
                self._texts, add_special_tokens=body.add_special_tokens
            )
        else:
            prompts = self._ids
        return await self.api.submit(
            prompts,
            params,
            response_id=self.response_id,
            request_id=self.caller.request_id,
            model=self.model,
            tenant_salt=self.tenant_salt,
            started=self.caller.started,
        )

    def opening(self, running: RunningRequest) -> list[Json]:
        if not self.body.echo and not self.body.return_token_ids:
            return []
        choices = []
        for index in range(running.num_choices):
            choice = self._choice(index, "", None, None, None)
            prompt_index = index // self.body.n
            if self.body.echo:
                choice["text"] = self._prompt_text(running, prompt_index)
                choice["logprobs"] = self._prompt_logprobs(running, prompt_index)
            if self.body.return_token_ids:
                choice["prompt_token_ids"] = running.requests[prompt_index].prompt_token_ids
                choice["token_ids"] = []
            choices.append(choice)
        return choices

    def delta(self, running: RunningRequest, index: int, delta: TextDelta) -> Json | None:
        body = self.body
        reason = None if delta.finish_reason is None else delta.finish_reason.value
        if body.is_prompt_only:
            return None if reason is None else self._choice(index, "", None, "length", None)
        if not delta.text and reason is None and not (delta.token_ids and self._shows_tokens):
            return None
        logprobs = None
        if body.logprobs is not None and delta.token_ids:
            offset = len(self._prompt_text(running, index // body.n)) if body.echo else 0
            logprobs = self._logprobs(delta.token_ids, delta.logprobs, [offset + at for at in delta.text_offsets])
        choice = self._choice(index, delta.text, logprobs, reason, delta.stop_reason)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def whole(self, running: RunningRequest, choices: list[CollectedChoice]) -> Json:
        shown = [self._whole_choice(running, index, choice) for index, choice in enumerate(choices)]
        answer = self.chunk(running, shown)
        answer["usage"] = self.usage(running)
        return answer

    def usage(self, running: RunningRequest) -> Json:
        usage = running.usage
        if self.body.is_prompt_only:
            usage = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return usage_json(usage)

    @property
    def _shows_tokens(self) -> bool:
        return self.body.logprobs is not None or self.body.return_token_ids

    def _whole_choice(self, running: RunningRequest, index: int, collected: CollectedChoice) -> Json:
        body = self.body
        prompt_index = index // body.n
        text, offset = "", 0
        logprobs: CompletionLogprobs | None = None
        if body.echo:
            text = self._prompt_text(running, prompt_index)
            offset = len(text)
            logprobs = self._prompt_logprobs(running, prompt_index)
        if body.is_prompt_only:
            collected = CollectedChoice(finish_reason="length")
        text += "".join(collected.text)
        if body.logprobs is not None:
            offsets = [offset + at for at in collected.text_offsets]
            output = self._logprobs(collected.token_ids, collected.logprobs, offsets)
            logprobs = output if logprobs is None else _joined(logprobs, output)
        choice = self._choice(index, text, logprobs, collected.finish_reason, collected.stop_reason)
        if body.return_token_ids:
            choice["prompt_token_ids"] = running.requests[prompt_index].prompt_token_ids
            choice["token_ids"] = collected.token_ids
        return choice

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _prompt_text(self, running: RunningRequest, prompt_index: int) -> str:
        if self._texts:
            return self._texts[prompt_index]
        if prompt_index not in self._decoded:
            ids = running.requests[prompt_index].prompt_token_ids
            self._decoded[prompt_index] = self.api.tokenizer.decode(ids, skip_special_tokens=False)
        return self._decoded[prompt_index]

    def _prompt_logprobs(self, running: RunningRequest, prompt_index: int) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        facts = running.facts(prompt_index)
        prompt = running.requests[prompt_index].prompt_token_ids
        reported = facts.prompt_logprobs if facts is not None else []
        # The first token has no probability; the list holds a place for it or begins with the second token.
        positions: list[PositionLogprobs] = [(), *reported[len(reported) - len(prompt) + 1 :]]
        if len(positions) != len(prompt):
            raise RuntimeError(f"{len(reported)} prompt log probabilities for a prompt of {len(prompt)} tokens")
        offsets = text_offsets(self.api.tokenizer, prompt, skip_special_tokens=False)
        return self._logprobs(prompt, positions, offsets)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs], offsets: Sequence[int]
    ) -> CompletionLogprobs:
        return completion_logprobs(self.names, token_ids, logprobs, offsets, top=self.body.logprobs or 0)


def _joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }
