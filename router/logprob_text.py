"""Log probabilities as the two OpenAI endpoints show them: token strings, bytes, places in the text. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypedDict

from engine.tokens import PositionLogprobs, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenNames(Protocol):
    """What is asked of a tokenizer here; `engine.tokenizer.Tokenizer` fits."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class CompletionLogprobs(TypedDict):
    """`logprobs` of a choice of /v1/completions; the lists have equal lengths, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatTopLogprob(TypedDict):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatTopLogprob):
    """One entry of `logprobs.content` of /v1/chat/completions."""

    top_logprobs: list[ChatTopLogprob]


def completion_logprobs(
    tokenizer: TokenNames,
    token_ids: Sequence[int],
    logprobs: Sequence[PositionLogprobs],
    text_offsets: Sequence[int],
    *,
    top: int,
) -> CompletionLogprobs:
    """For the tokens of one delta, one choice, or the prompt when it is echoed.

    `top_logprobs` holds the chosen token and the `top` most likely ones, so up to `top + 1` entries. Two tokens that
    look alike (lone bytes of a character both show as U+FFFD) share the entry of the more likely one. A position
    without log probabilities, which is the first token of a prompt, has null in both lists.

    Args:
        tokenizer: names the tokens.
        token_ids: the tokens.
        logprobs: one for each token.
        text_offsets: where each token starts in the choice's text, in characters: `TextDelta.text_offsets`, for a
            prompt `router.detokenizer.text_offsets`; with echo, the length of the prompt's text is to be added.
        top: what the request asked for.
    """
    _check_lengths(token_ids, logprobs, text_offsets)
    shown = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(text_offsets))
    for token_id, position in zip(token_ids, logprobs, strict=True):
        shown["tokens"].append(tokenizer.token_text(token_id))
        shown["token_logprobs"].append(_finite(position[0].logprob) if position else None)
        shown["top_logprobs"].append(_by_text(tokenizer, position, top) if position else None)
    return shown


def chat_logprobs(
    tokenizer: TokenNames, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs], *, top: int
) -> list[ChatLogprob]:
    """The entries of `logprobs.content` for these tokens; `top_logprobs` is an empty list when `top` is 0."""
    _check_lengths(token_ids, logprobs)
    content: list[ChatLogprob] = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        content.append(
            ChatLogprob(
                token=tokenizer.token_text(token_id),
                logprob=_finite(position[0].logprob) if position else LOWEST_LOGPROB,
                bytes=list(tokenizer.token_bytes(token_id)),
                top_logprobs=[_chat_top(tokenizer, entry) for entry in most_likely(position, top)],
            )
        )
    return content


def most_likely(position: PositionLogprobs, top: int) -> PositionLogprobs:
    """The `top` most likely tokens, most likely first; the chosen one is among them only if it is one of them."""
    return position[1 : 1 + top]


def _chat_top(tokenizer: TokenNames, entry: TokenLogprob) -> ChatTopLogprob:
    return ChatTopLogprob(
        token=tokenizer.token_text(entry.token_id),
        logprob=_finite(entry.logprob),
        bytes=list(tokenizer.token_bytes(entry.token_id)),
    )


def _by_text(tokenizer: TokenNames, position: PositionLogprobs, top: int) -> dict[str, float]:
    shown: dict[str, float] = {}
    for entry in (*most_likely(position, top), position[0]):
        shown.setdefault(tokenizer.token_text(entry.token_id), _finite(entry.logprob))
    return shown


def _finite(logprob: float) -> float:
    """A log probability that JSON can hold; NaN is a bug of the node and shows as the lowest value."""
    return LOWEST_LOGPROB if math.isnan(logprob) else max(logprob, LOWEST_LOGPROB)


def _check_lengths(token_ids: Sequence[int], *others: Sequence[object]) -> None:
    assert all(len(other) == len(token_ids) for other in others), "one entry for each token"
