"""Completions: counts, finish reasons, stop strings, token ids, batches and seeds, on real nodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from tokenizers import Tokenizer

from tests.api.client import COMPLETIONS, Api, Json, check_error
from tests.api.conftest import BLOCK_SIZE, POOL_TOKENS
from tests.e2e.cluster_processes import ClusterProcesses, wait_until

pytestmark = pytest.mark.e2e


RAINBOW = "red orange yellow green red orange yellow"


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_counts_are_exact_at_the_limit_and_the_same_in_a_stream(
    api: Api, tokenizer: Tokenizer, max_tokens: int
) -> None:
    prompt, fields = "one two three four", {"max_tokens": max_tokens, "ignore_eos": True, "cache_salt": uuid4().hex}
    whole = api.complete(prompt, **fields)
    streamed = api.stream(prompt, **{**fields, "cache_salt": uuid4().hex})
    assert whole["usage"]["completion_tokens"] == max_tokens
    assert whole["usage"]["prompt_tokens"] == len(tokenizer.encode(prompt).ids)
    assert whole["choices"][0]["finish_reason"] == streamed.finish_reason == "length"
    assert streamed.usage == whole["usage"]
    assert streamed.events[-1]["choices"] == []


def test_max_tokens_defaults_to_16(api: Api) -> None:
    forced = api.complete("San Francisco is a", ignore_eos=True)
    assert forced["usage"]["completion_tokens"] == 16 and forced["choices"][0]["finish_reason"] == "length"
    free = api.complete("San Francisco is a")
    assert 1 < free["usage"]["completion_tokens"] <= 16
    assert free["choices"][0]["finish_reason"] in ("length", "stop")


def test_stop_string_complete_with_the_last_allowed_token_is_stop(api: Api, words_only: dict[str, int]) -> None:
    fields = {"max_tokens": 6, "logit_bias": words_only}
    reference = api.complete("Monday, Tuesday,", logprobs=0, **fields)["choices"][0]
    stop = "".join(reference["logprobs"]["tokens"][4:6])
    assert reference["text"].find(stop) == len(reference["text"]) - len(stop) > 0
    stopped = api.complete("Monday, Tuesday,", stop=[stop], **fields)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == reference["text"].removesuffix(stop)
    assert stopped["usage"]["completion_tokens"] == 6


def test_no_part_of_a_stop_string_inside_tokens_reaches_the_stream(api: Api, words_only: dict[str, int]) -> None:
    """The match begins and ends within tokens, which come one by one."""
    fields = {"max_tokens": 24, "logit_bias": words_only}
    reference = api.complete(RAINBOW, logprobs=0, **fields)["choices"][0]
    stop = "".join(reference["logprobs"]["tokens"][5:8])[1:-1]
    assert len(stop) >= 4
    expected = reference["text"].partition(stop)[0]
    streamed = api.stream(RAINBOW, stop=[stop], **fields)
    assert streamed.text == expected
    assert streamed.finish_reason == "stop"
    shown = ""
    for event in streamed.events[:-1]:
        shown += event["choices"][0]["text"]
        assert expected.startswith(shown)
    assert api.complete(RAINBOW, stop=stop, **fields)["choices"][0]["text"] == expected


def test_text_held_back_for_a_stop_string_is_flushed_at_the_end(api: Api, words_only: dict[str, int]) -> None:
    fields = {"max_tokens": 12, "logit_bias": words_only}
    reference = api.complete(RAINBOW, **fields)["choices"][0]
    streamed = api.stream(RAINBOW, stop=[reference["text"][-2:] + "zz"], **fields)
    assert streamed.text == reference["text"]
    assert streamed.finish_reason == reference["finish_reason"]


@pytest.mark.parametrize("straddles", [False, True], ids=["first token", "first and second token"])
def test_stop_string_at_the_hand_off_ends_the_request_everywhere(
    api: Api, cluster: ClusterProcesses, words_only: dict[str, int], straddles: bool
) -> None:
    """The first token comes from the prefill node, the second from the decode node."""
    prompt, fields = "The opposite of up is", {"max_tokens": 300, "logit_bias": words_only}
    tokens = api.complete(prompt, logprobs=0, **{**fields, "max_tokens": 8})["choices"][0]["logprobs"]["tokens"]
    stop = tokens[0][-1] + tokens[1][0] if straddles else tokens[0]
    expected = tokens[0][:-1] if straddles else ""
    streamed = api.stream(prompt, stop=[stop], **fields)
    cluster.assert_idle(timeout_s=1.0)
    assert streamed.text == expected and streamed.finish_reason == "stop"
    whole = api.complete(prompt, stop=[stop], **fields)
    cluster.assert_idle(timeout_s=1.0)
    assert whole["choices"][0]["text"] == expected and whole["choices"][0]["finish_reason"] == "stop"
    assert streamed.usage is not None
    assert whole["usage"]["completion_tokens"] == streamed.usage["completion_tokens"] == (2 if straddles else 1)


def test_empty_stop_string_is_refused(api: Api) -> None:
    for stop in ("", ["x", ""]):
        check_error(api.post(COMPLETIONS, {"prompt": "The sea is", "max_tokens": 4, "stop": stop}), 400, param="stop")


def test_lone_bytes_end_normally_as_replacement_characters(api: Api, tokenizer: Tokenizer) -> None:
    """Five bytes that each begin a character of four: text that never becomes complete."""
    lead_byte = tokenizer.token_to_id(chr(0xF0))
    fields = {"max_tokens": 5, "logit_bias": {str(lead_byte): 100}, "return_token_ids": True}
    streamed, whole = api.stream("x", **fields), api.complete("x", **fields)
    assert streamed.token_ids[0] == whole["choices"][0]["token_ids"] == [lead_byte] * 5
    assert streamed.finish_reason == whole["choices"][0]["finish_reason"] == "length"
    assert streamed.usage is not None and streamed.usage["completion_tokens"] == 5
    assert set(streamed.text) == {"\ufffd"}
    assert streamed.text == whole["choices"][0]["text"]


@pytest.mark.parametrize(
    "prompt",
    [
        "def f(x):\n    if x:\n        return",
        "  two leading spaces",
        "\n\n\ttabs\t",
        "日本語のテキスト",
        "👩‍👩‍👧 🇳🇴",
        "naïve café",
    ],
)
def test_streamed_text_is_the_whole_text_byte_for_byte(api: Api, tokenizer: Tokenizer, prompt: str) -> None:
    fields = {"max_tokens": 32, "return_token_ids": True}
    streamed, whole = api.stream(prompt, **fields), api.complete(prompt, **fields)["choices"][0]
    assert streamed.text == whole["text"]
    assert streamed.token_ids[0] == whole["token_ids"]
    assert streamed.text == tokenizer.decode(whole["token_ids"], skip_special_tokens=True)


def test_scoring_a_prompt_gives_the_same_numbers_cold_cached_and_on_one_node(
    api: Api, local_api: Api, tokenizer: Tokenizer, cluster: ClusterProcesses
) -> None:
    prompt, salt = "The sea is blue. " * 12, uuid4().hex
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "cache_salt": salt}
    before = cluster.node("decode-0")
    cold = api.complete(prompt, **fields)
    assert cluster.node("decode-0")["transfers"]["started"] == before["transfers"]["started"] + 1
    again = api.complete(prompt, **fields)
    cached = api.complete(prompt, cache_salt=salt, max_tokens=1)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    local = local_api.complete(prompt, **{**fields, "cache_salt": uuid4().hex})
    assert cluster.node("decode-0")["local_prefills"] == before["local_prefills"] + 1
    scores = cold["choices"][0]["logprobs"]
    assert cold["usage"]["prompt_tokens"] == len(tokenizer.encode(prompt).ids)
    lengths = {len(scores[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {cold["usage"]["prompt_tokens"] + 1}
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert all(score is not None and score <= 0 for score in scores["token_logprobs"][1:])
    assert cold["choices"][0]["text"].startswith(prompt)
    assert again["choices"] == cold["choices"]
    for name in ("tokens", "text_offset"):
        assert local["choices"][0]["logprobs"][name] == scores[name]
    assert local["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        scores["token_logprobs"][1:], abs=1e-4
    )


@pytest.mark.parametrize("prompt", [[], [[]], [[5, 6], []], ""], ids=repr)
def test_prompt_without_tokens_is_refused(api: Api, prompt: object) -> None:
    check_error(api.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}), 400, param="prompt")
    assert api.complete("alive", max_tokens=1)["usage"]["completion_tokens"] == 1


def nodes_work(cluster: ClusterProcesses) -> list[Json]:
    """What nodes have done so far, in numbers that only grow."""
    names = ("steps", "prefill_tokens_computed", "prefill_tokens_cached", "tokens_generated", "transfers")
    return [{name: node[name] for name in names} for node in cluster.describe()["nodes"]]


@pytest.mark.parametrize("bad", ["far beyond", "vocabulary size", "2**63", "negative"])
def test_token_id_outside_the_vocabulary_is_refused_before_any_node(
    api: Api, cluster: ClusterProcesses, tokenizer: Tokenizer, bad: str
) -> None:
    size = tokenizer.get_vocab_size()
    bad_id = {"far beyond": 10_000_000, "vocabulary size": size, "2**63": 2**63, "negative": -1}[bad]
    before, attempts = nodes_work(cluster), cluster.describe()["router"]["attempts"]
    error = check_error(api.post(COMPLETIONS, {"prompt": [5, bad_id, 7], "max_tokens": 2}), 400, param="prompt")
    assert "prompt" in error["message"] or "token" in error["message"]
    assert nodes_work(cluster) == before
    assert cluster.describe()["router"]["attempts"] == attempts
    assert api.complete([5, size - 1, 7], max_tokens=1)["usage"]["completion_tokens"] == 1


def test_other_fields_of_token_ids_are_checked_too(api: Api, tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    for field, value in (("logit_bias", {str(size): 1}), ("logit_bias", {"-1": 1}), ("stop_token_ids", [size])):
        check_error(api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, field: value}), 400, param=field)


def test_choices_of_a_batch_are_numbered_by_prompt_and_counted_once(api: Api, tokenizer: Tokenizer) -> None:
    prompts = ["One is", "Two is", "Three is"]
    fields = {"temperature": 0.8, "n": 2, "max_tokens": 4, "seed": 5, "return_token_ids": True}
    whole = api.complete(prompts, **fields)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    for index, choice in enumerate(whole["choices"]):
        assert choice["prompt_token_ids"] == tokenizer.encode(prompts[index // 2]).ids
    for number, prompt in enumerate(prompts):
        alone = api.complete(prompt, **fields)["choices"]
        assert [choice["text"] for choice in alone] == [
            choice["text"] for choice in whole["choices"][2 * number : 2 * number + 2]
        ]
    assert whole["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(prompt).ids) for prompt in prompts)
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    streamed = api.stream(prompts, **fields)
    assert sorted(streamed.finish_reasons) == list(range(6))
    for index, reasons in streamed.finish_reasons.items():
        assert reasons == [whole["choices"][index]["finish_reason"]]
        assert streamed.texts[index] == whole["choices"][index]["text"]
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_one_bad_prompt_fails_the_batch_before_any_work(
    api: Api, cluster: ClusterProcesses, tokenizer: Tokenizer
) -> None:
    before = nodes_work(cluster)
    check_error(api.post(COMPLETIONS, {"prompt": [[10, 11], [10_000_000]], "max_tokens": 3}), 400, param="prompt")
    assert nodes_work(cluster) == before
    assert cluster.violated_invariants() == []


def test_seed_decides_the_text_alone_in_company_and_on_one_node(api: Api, local_api: Api) -> None:
    fields = {"temperature": 0.9, "max_tokens": 12}
    alone = api.complete("Once upon", seed=42, **fields)["choices"][0]["text"]
    with ThreadPoolExecutor(2) as pool:
        seeded = pool.submit(api.complete, "Once upon", seed=42, **fields)
        pool.submit(api.complete, "A dog", **fields).result()
    assert seeded.result()["choices"][0]["text"] == alone
    assert local_api.complete("Once upon", seed=42, **fields)["choices"][0]["text"] == alone
    assert len({api.complete("Once upon", **fields)["choices"][0]["text"] for _ in range(5)}) > 1


def test_seeded_text_survives_preemption(api: Api, cluster: ClusterProcesses) -> None:
    """The prompts of four sequences fit into the pool, but what they grow to does not."""
    fields = {"temperature": 0.9, "seed": 42, "max_tokens": 80, "ignore_eos": True, "return_token_ids": True}
    prompts = [[10 + place] * 200 for place in range(4)]
    # What it has seen lately are outputs of one token, so that it lets in all four.
    for start in (0, 1, 2):
        api.complete([[start, place, 5] for place in range(16)], n=4, max_tokens=1)
    preemptions = cluster.node("decode-0")["preemptions"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: api.complete(prompt, **fields), prompts))
    assert cluster.node("decode-0")["preemptions"] > preemptions
    token_ids = [answer["choices"][0]["token_ids"] for answer in together]
    assert len({tuple(ids) for ids in token_ids}) == len(prompts)
    for prompt, ids in zip(prompts, token_ids, strict=True):
        assert api.complete(prompt, **fields)["choices"][0]["token_ids"] == ids


@pytest.mark.parametrize("way", ["handed over", "on one node"])
def test_forced_end_comes_right_after_min_tokens(
    api: Api, local_api: Api, end_ids: list[int], cluster: ClusterProcesses, way: str
) -> None:
    committed = cluster.node("decode-0")["transfers"]["committed"]
    server = api if way == "handed over" else local_api
    answer = server.complete(
        "Hello",
        min_tokens=4,
        max_tokens=32,
        logit_bias={str(end_id): 100 for end_id in end_ids},
        return_token_ids=True,
    )
    token_ids = answer["choices"][0]["token_ids"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(token_ids) == answer["usage"]["completion_tokens"] == 5
    assert token_ids[4] in end_ids and not set(token_ids[:4]) & set(end_ids)
    assert cluster.node("decode-0")["transfers"]["committed"] - committed == (way == "handed over")


def test_min_tokens_and_counts_through_the_hand_off(api: Api, cluster: ClusterProcesses, tokenizer: Tokenizer) -> None:
    prompt = "My favourite river is the one that flows"
    cached = cluster.node("prefill-0")["prefill_tokens_cached"]
    committed = cluster.node("decode-0")["transfers"]["committed"]
    fields = {"min_tokens": 20, "max_tokens": 40, "cache_salt": uuid4().hex}
    api.stream(prompt, **fields)
    streamed = api.stream(prompt, **fields)
    assert streamed.usage is not None
    assert 20 <= streamed.usage["completion_tokens"] <= 40
    num_tokens = len(tokenizer.encode(prompt).ids)
    assert streamed.usage["prompt_tokens"] == num_tokens
    cached_tokens = streamed.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    cluster.assert_idle()
    assert cluster.node("prefill-0")["prefill_tokens_cached"] - cached == cached_tokens
    assert cluster.node("decode-0")["transfers"]["committed"] == committed + 2


def test_what_can_never_fit_is_refused_at_once(api: Api, cluster: ClusterProcesses) -> None:
    before = nodes_work(cluster)
    for body in (
        {"prompt": "Hi", "max_tokens": POOL_TOKENS + 1},
        {"prompt": [5] * POOL_TOKENS, "max_tokens": 1},
    ):
        reply = api.post(COMPLETIONS, {"temperature": 0, "ignore_eos": True, **body})
        check_error(reply, 400)
        assert reply.elapsed.total_seconds() < 1.0
    assert nodes_work(cluster) == before
    assert api.complete("Hi", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_metrics_say_by_which_transport_kv_came(api: Api, cluster: ClusterProcesses) -> None:
    def sent() -> float:
        for line in api.http.get("/metrics").text.splitlines():
            if line.startswith("pdserve:kv_transfer_seconds_count{") and 'node_id="prefill-0"' in line:
                assert 'transport="shared_memory"' in line
                return float(line.split()[-1])
        return 0.0

    before = sent()
    api.complete([9, 8, 7] * 30, max_tokens=2, ignore_eos=True)
    wait_until(lambda: sent() > before, 5.0, "the transfer is counted")
    assert cluster.node("decode-0")["transports"]["shared_memory"]["seconds"] > 0
