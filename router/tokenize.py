"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from engine.errors import InvalidRequest
from router.inference_api import InferenceApi
from router.openai_job import Json
from router.openai_protocol import DetokenizeBody, TokenizeBody, chat_messages


async def tokenize(api: InferenceApi, value: Json) -> Json:
    """Token ids of a text, or of a chat as its template renders it."""
    body = TokenizeBody.parse(value)
    body.check()
    api.check_model(body.model)
    if body.messages is not None:
        ids = await api.tokenize_chat(
            chat_messages(body.messages),
            tools=body.tools or None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=bool(body.add_special_tokens),
            extra=body.chat_template_kwargs,
        )
    else:
        ids = await api.tokenize_text(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False, allow_empty=True
        )
    answer: Json = {"count": len(ids), "max_model_len": api.limits.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = [api.tokenizer.token_text(token_id) for token_id in ids]
    return answer


async def detokenize(api: InferenceApi, value: Json) -> Json:
    """The text of token ids, special tokens included."""
    body = DetokenizeBody.parse(value)
    api.check_model(body.model)
    limits = api.limits
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < limits.vocab_size):
        raise InvalidRequest(f"tokens has an id outside the vocabulary of {limits.vocab_size} tokens", param="tokens")
    if len(body.tokens) > limits.max_model_len:
        raise InvalidRequest(f"tokens may have at most {limits.max_model_len} entries", param="tokens")
    return {
        "prompt": await api.in_thread(lambda: api.tokenizer.decode(body.tokens, skip_special_tokens=False)),
    }
