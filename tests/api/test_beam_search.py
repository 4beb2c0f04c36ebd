"""Beam search and the best of many, on real nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from tokenizers import Tokenizer

from tests.api.client import CHAT, COMPLETIONS, Api, check_error
from tests.api.conftest import POOL_TOKENS
from tests.e2e.cluster_processes import ClusterProcesses

pytestmark = pytest.mark.e2e

PROMPT = "the quick brown fox and then"


def test_beams_are_those_of_a_plain_search_over_the_model(
    api: Api, local_api: Api, tiny_model: Path, tokenizer: Tokenizer, end_ids: list[int]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.decode_node.beam_reference import beam_search

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def next_logits(text: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([list(text)])).logits[0, -1]
        return logits

    prompt = tokenizer.encode(PROMPT).ids
    for length_penalty in (1.0, 0.0):
        plain = beam_search(next_logits, prompt, width=3, max_tokens=10, length_penalty=length_penalty, ends=end_ids)
        fields = {"n": 3, "use_beam_search": True, "length_penalty": length_penalty, "max_tokens": 10, "logprobs": 1}
        for where in (api, local_api):
            answer = where.complete(PROMPT, return_token_ids=True, cache_salt=uuid4().hex, **fields)
            assert [choice["token_ids"] for choice in answer["choices"]] == [each.token_ids for each in plain]
            assert answer["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in plain)
            for choice, each in zip(answer["choices"], plain, strict=True):
                assert choice["finish_reason"] == ("stop" if each.is_stopped else "length")
                text_ids = each.token_ids[:-1] if each.is_stopped else each.token_ids
                assert choice["text"] == tokenizer.decode(text_ids)
                length = len(prompt) + len(text_ids)
                score = sum(choice["logprobs"]["token_logprobs"]) / length**length_penalty
                assert score == pytest.approx(each.score, abs=1e-4)


def test_beams_in_a_chat(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "Name a colour."}], "n": 2, "max_tokens": 6}
    answer = api.post(CHAT, {**body, "use_beam_search": True}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 2
    check_error(api.post(CHAT, {**body, "use_beam_search": True, "stream": True}), 400, param="stream")


def test_a_search_too_large_for_any_node_is_refused_by_name(api: Api) -> None:
    body = {"prompt": PROMPT, "n": 4, "use_beam_search": True, "max_tokens": POOL_TOKENS // 2}
    check_error(api.post(COMPLETIONS, body), 400, param="n")


def test_a_search_whose_client_leaves_frees_everything(api: Api, cluster: ClusterProcesses) -> None:
    body = {"prompt": PROMPT, "n": 4, "use_beam_search": True, "max_tokens": 200, "ignore_eos": True}
    for patience_s in (0.02, 0.1, 0.3):
        with contextlib.suppress(httpx.ReadTimeout):  # It may have been quick.
            api.http.post(COMPLETIONS, json=body, timeout=httpx.Timeout(10.0, read=patience_s))
    # Until the last one has gone, others are served; that nothing is left is checked after every test.
    assert len(api.complete(PROMPT, n=2, use_beam_search=True, max_tokens=3)["choices"]) == 2


def test_the_best_of_many_is_the_one_with_the_highest_mean_log_probability(api: Api) -> None:
    fields = {"max_tokens": 8, "seed": 11, "temperature": 1.5, "ignore_eos": True}
    every = api.complete(PROMPT, n=4, logprobs=0, **fields)["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 8 for choice in every]
    order = sorted(range(4), key=lambda index: -means[index])
    best = api.complete(PROMPT, n=2, best_of=4, **fields)
    assert [choice["text"] for choice in best["choices"]] == [every[index]["text"] for index in order[:2]]
    assert best["usage"]["completion_tokens"] == 4 * 8
