"""Prompts of random tokens, of shared prefixes and of files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.datasets import PromptMaker, RandomLengths, file_work, random_work, shared_prefix_work
from bench.vocabulary import Vocabulary
from engine.errors import ConfigError
from tests.tiny_model import write_tokenizer

IDS = range(500, 900)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder, 320)
    return Vocabulary.of_tokenizer(str(folder / "tokenizer.json"))


def make_maker(seed: int = 0) -> PromptMaker:
    return PromptMaker(Vocabulary(IDS), np.random.default_rng(seed), as_text=False)


def test_random_lengths_cover_their_range_and_nothing_else() -> None:
    work = random_work(make_maker(), 500, RandomLengths(10, 4, 0.5, 0.25))
    assert {one.prompt_tokens for one in work} == set(range(5, 16))
    assert {one.output_tokens for one in work} == {3, 4, 5}
    assert all(len(one.prompt) == one.prompt_tokens and set(one.prompt) <= set(IDS) for one in work)


def test_random_prompts_repeat_with_the_seed_and_share_nothing_else() -> None:
    lengths = RandomLengths(32, 4)
    one, same, other = (random_work(make_maker(seed), 3, lengths) for seed in (0, 0, 1))
    assert one == same
    assert one != other
    assert len({tuple(work.prompt[:4]) for work in one}) == 3


def test_a_common_prefix_comes_before_random_prompts() -> None:
    one, other = random_work(make_maker(), 2, RandomLengths(8, 1), prefix_len=6)
    assert one.prompt[:6] == other.prompt[:6]
    assert one.prompt[6:] != other.prompt[6:]
    assert one.prompt_tokens == 14


def test_a_ratio_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="random_range_ratio"):
        RandomLengths(10, 10, 1.0, 0.0)


def test_each_prefix_is_shared_by_its_part_of_the_prompts() -> None:
    work = shared_prefix_work(make_maker(), 7, prefixes=3, prefix_len=20, suffix_len=5, output_len=2, shuffle=True)
    counts: dict[tuple[int, ...], int] = {}
    for one in work:
        assert isinstance(one.prompt, list)
        counts[tuple(one.prompt[:20])] = counts.get(tuple(one.prompt[:20]), 0) + 1
    assert sorted(counts.values()) == [2, 2, 3]
    assert {one.prompt_tokens for one in work} == {25}
    with pytest.raises(ConfigError, match="num-prefixes"):
        shared_prefix_work(make_maker(), 2, prefixes=3, prefix_len=1, suffix_len=1, output_len=1, shuffle=False)


def test_texts_have_as_many_tokens_as_asked_for(tiny: Vocabulary) -> None:
    maker = PromptMaker(tiny, np.random.default_rng(0), as_text=True)
    for one in random_work(maker, 5, RandomLengths(40, 4)):
        assert isinstance(one.prompt, str)
        assert len(tiny.encode(one.prompt)) == one.prompt_tokens
        assert abs(one.prompt_tokens - 40) <= 2  # bytes that are no text do not survive


def test_special_tokens_are_never_drawn(tiny: Vocabulary) -> None:
    assert min(tiny.draw(5000, np.random.default_rng(0))) >= 3


def test_texts_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        PromptMaker(Vocabulary(IDS), np.random.default_rng(0), as_text=True).work([501], 1)


def test_json_lines_hold_texts_or_ids_and_lengths(tmp_path: Path, tiny: Vocabulary) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "the fox", "output_tokens": 7}\n\n{"prompt": [5, 6, 7], "output_tokens": 2}\n')
    text, ids = file_work(path, tiny, None, output_len=None, rng=None)
    assert (text.prompt, text.prompt_tokens, text.output_tokens) == ("the fox", len(tiny.encode("the fox")), 7)
    assert (ids.prompt, ids.prompt_tokens, ids.output_tokens) == ([5, 6, 7], 3, 2)
    again = file_work(path, Vocabulary(IDS), 5, output_len=9, rng=None)
    assert [one.prompt for one in again] == [text.prompt, ids.prompt] * 2 + [text.prompt]
    assert {one.output_tokens for one in again} == {9}
    assert again[0].prompt_tokens == 0  # nobody can count it before the server does


def test_sharegpt_takes_the_first_exchange_and_leaves_out_extremes(tmp_path: Path, tiny: Vocabulary) -> None:
    def conversation(*texts: str) -> dict[str, object]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    path = tmp_path / "share.json"
    kept = conversation("the quick brown fox jumps", "over the lazy dog, twice", "more")
    path.write_text(
        json.dumps([conversation("alone"), kept, conversation("a", "b"), conversation("a fox " * 2000, "yes yes")])
    )
    [work] = file_work(path, tiny, None, output_len=None, rng=None)
    assert work.prompt == "the quick brown fox jumps"
    assert work.output_tokens == len(tiny.encode("over the lazy dog, twice"))
    with pytest.raises(ConfigError, match="--tokenizer"):
        file_work(path, Vocabulary(IDS), None, output_len=None, rng=None)


@pytest.mark.parametrize("content", ["{", "[]", '{"text": "a"}\n', '{"prompt": "a"}\n'])
def test_files_that_cannot_be_used_say_why(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"p\.jsonl"):
        file_work(path, Vocabulary(IDS), None, output_len=None, rng=np.random.default_rng(0))
