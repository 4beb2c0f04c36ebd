"""Log probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

import json
import math

import pytest

from engine.tokens import TokenLogprob
from router.logprob_text import LOWEST_LOGPROB, chat_logprobs, completion_logprobs
from router.testing import fake_logprobs
from tests.router.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
A, B, C = (TOKENIZER.id_of(token) for token in "abc")
END = 0


def position(chosen: tuple[int, float, int], *top: tuple[int, float]) -> tuple[TokenLogprob, ...]:
    return (TokenLogprob(*chosen), *(TokenLogprob(*entry, rank) for rank, entry in enumerate(top, 1)))


def test_completions_have_lists_of_equal_length() -> None:
    logprobs = [position((A, -0.1, 1), (A, -0.1), (B, -2.5)), position((C, -4.0, 9), (A, -0.5), (B, -1.5))]
    assert completion_logprobs(TOKENIZER, [A, C], logprobs, [0, 1], top=2) == {
        "tokens": ["a", "c"],
        "token_logprobs": [-0.1, -4.0],
        "top_logprobs": [{"a": -0.1, "b": -2.5}, {"a": -0.5, "b": -1.5, "c": -4.0}],
        "text_offset": [0, 1],
    }


def test_completions_without_top_show_the_chosen_token() -> None:
    shown = completion_logprobs(TOKENIZER, [A], [position((A, -0.1, 1), (B, -0.05))], [7], top=0)
    assert shown["top_logprobs"] == [{"a": -0.1}]
    assert shown["text_offset"] == [7]


def test_the_first_token_of_a_prompt_has_none() -> None:
    shown = completion_logprobs(TOKENIZER, [A, B], [(), position((B, -1.0, 1))], [0, 1], top=1)
    assert shown["token_logprobs"] == [None, -1.0]
    assert shown["top_logprobs"] == [None, {"b": -1.0}]


def test_tokens_that_look_alike_share_the_likelier_entry() -> None:
    first, second = TOKENIZER.byte_id(0xF0), TOKENIZER.byte_id(0xE6)
    logprobs = [position((second, -3.0, 2), (first, -0.5), (second, -3.0))]
    shown = completion_logprobs(TOKENIZER, [second], logprobs, [0], top=2)
    assert shown["top_logprobs"] == [{"\ufffd": -0.5}]
    assert shown["token_logprobs"] == [-3.0]


def test_chat_entries_have_exact_bytes() -> None:
    half = TOKENIZER.byte_id(0xF0)
    (entry,) = chat_logprobs(TOKENIZER, [half], [position((half, -0.1, 1), (half, -0.1), (A, -2.0), (B, -3.0))], top=2)
    assert entry == {
        "token": "\ufffd",
        "logprob": -0.1,
        "bytes": [0xF0],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.1, "bytes": [0xF0]},
            {"token": "a", "logprob": -2.0, "bytes": [97]},
        ],
    }


def test_chat_without_top_has_an_empty_list() -> None:
    (entry,) = chat_logprobs(TOKENIZER, [A], [fake_logprobs(A, 0, 400)], top=0)
    assert entry["top_logprobs"] == []


def test_special_tokens_are_shown() -> None:
    (entry,) = chat_logprobs(TOKENIZER, [END], [fake_logprobs(END, 0, 400)], top=0)
    assert (entry["token"], bytes(entry["bytes"])) == ("<|end|>", b"<|end|>")


@pytest.mark.parametrize("impossible", [-math.inf, math.nan])
def test_what_json_cannot_say_becomes_the_lowest_value(impossible: float) -> None:
    logprobs = [position((A, impossible, 3), (B, impossible))]
    shown = completion_logprobs(TOKENIZER, [A], logprobs, [0], top=1)
    assert shown["token_logprobs"] == [LOWEST_LOGPROB]
    assert json.loads(json.dumps(shown, allow_nan=False))["top_logprobs"] == [
        {"a": LOWEST_LOGPROB, "b": LOWEST_LOGPROB}
    ]
    json.dumps(chat_logprobs(TOKENIZER, [A], logprobs, top=1), allow_nan=False)


def test_lists_that_do_not_fit_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="one entry for each token"):
        chat_logprobs(TOKENIZER, [A, B], [fake_logprobs(A, 0, 400)], top=0)
