"""Incremental text equals the tokenizer's own, whatever the tokens are."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from router.detokenizer import IncrementalDetokenizer, _Kind, _spelling_of, text_offsets
from tests.router.tiny_tokenizers import TinyTokenizer, byte_fallback, byte_level, metaspace

TOKENIZERS = {
    "byte_level": byte_level,
    "byte_level_stripped": lambda: byte_level(strip=True),
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> TinyTokenizer:
    return TOKENIZERS[request.param]()


def pieces(tokenizer: TinyTokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    """What each token brought, and last what was left."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push((token_id,)) for token_id in ids), detokenizer.finish()]


def test_the_kind_of_each_tokenizer_is_found_out() -> None:
    assert _spelling_of(byte_level()).kind is _Kind.BYTE_LEVEL
    assert _spelling_of(byte_fallback()).kind is _Kind.BYTE_FALLBACK
    assert _spelling_of(metaspace()).kind is _Kind.OTHER
    assert _spelling_of(byte_level(strip=True)).kind is _Kind.OTHER


@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_give_the_tokenizers_text(tokenizer: TinyTokenizer, skip: bool) -> None:
    chance = random.Random(7)
    for _ in range(300):
        # Padding rows of the model have ids beyond the tokenizer.
        ids = [chance.randrange(tokenizer.vocab_size + 2) for _ in range(chance.randrange(40))]
        known = [token_id for token_id in ids if token_id < tokenizer.vocab_size]
        assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(known, skip_special_tokens=skip)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_any_bytes_give_the_tokenizers_text(make: object) -> None:
    """Byte tokens only: the densest source of cut and invalid characters."""
    tokenizer: TinyTokenizer = make()  # type: ignore[operator]
    chance = random.Random(8)
    characters = "aé日😀 \n"
    for _ in range(400):
        spelled = "".join(chance.choices(characters, k=chance.randrange(6))).encode()
        noisy = [byte for byte in spelled if chance.random() > 0.05] + chance.choices(range(256), k=chance.randrange(3))
        ids = [tokenizer.byte_id(byte) for byte in noisy]
        # Now and then something that is no byte token.
        ids.insert(chance.randrange(len(ids) + 1), tokenizer.id_of("b"))
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_slice_of_tokens_equals_single_tokens(tokenizer: TinyTokenizer) -> None:
    ids = tokenizer.encode("  a b😀 a", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids) + detokenizer.finish() == "".join(pieces(tokenizer, ids))


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "日本語、日本", "a😀👩‍👩‍👧‍👦b", "a  two  spaces "])
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_text_is_whole_and_never_ends_in_a_cut_character(make: object, text: str) -> None:
    tokenizer: TinyTokenizer = make()  # type: ignore[operator]
    given = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(given) == text
    assert all("\ufffd" not in piece for piece in given)


@pytest.mark.parametrize("strip", [False, True])
def test_an_emoji_over_four_tokens_comes_with_the_last(strip: bool) -> None:
    tokenizer = byte_level(strip=strip)
    ids = [tokenizer.byte_id(byte) for byte in "😀".encode()]
    assert pieces(tokenizer, ids) == ["", "", "", "😀", ""]


def test_five_lone_bytes_are_five_replacement_characters() -> None:
    tokenizer = byte_level()
    given = pieces(tokenizer, [tokenizer.byte_id(0xF0)] * 5)
    assert given == ["", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]


def test_an_unfinished_character_is_shown_only_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a", add_special_tokens=False) + [tokenizer.byte_id(byte) for byte in "😀".encode()[:3]]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


def test_a_byte_fallback_run_waits_for_the_token_that_ends_it() -> None:
    """The tokenizer shows a run with one bad byte as U+FFFD throughout, so none of it is certain before its end."""
    tokenizer = byte_fallback()
    good = [tokenizer.byte_id(byte) for byte in "é\n".encode()]
    end = tokenizer.id_of("b")
    assert pieces(tokenizer, [*good, end]) == ["", "", "", "é\nb", ""]
    assert pieces(tokenizer, [*good, tokenizer.byte_id(0xFF), end])[-2] == "\ufffd" * 4 + "b"
    assert pieces(tokenizer, good)[-1] == "é\n"


def test_a_newline_token_of_its_own_does_not_wait() -> None:
    tokenizer = byte_fallback()
    assert pieces(tokenizer, [tokenizer.id_of("\n")]) == ["\n", ""]


def test_a_genuine_replacement_character_is_kept() -> None:
    tokenizer = metaspace()
    ids = [tokenizer.id_of("a"), tokenizer.id_of("\ufffd"), tokenizer.id_of("b")]
    assert "".join(pieces(tokenizer, ids)) == "a\ufffdb"


def test_the_first_space_goes_without_a_prompt_and_stays_with_one() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    prompt = tokenizer.encode("a red", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == "the dog"
    after = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
    assert after.push(ids) + after.finish() == " the dog"


def test_a_prompt_that_ends_within_a_character_is_no_context() -> None:
    tokenizer = byte_fallback()
    first, second, third, fourth = (tokenizer.byte_id(byte) for byte in "😀".encode())
    after = IncrementalDetokenizer(tokenizer, prompt_ids=[tokenizer.id_of("b"), first, second])
    assert after.push([third, fourth, tokenizer.id_of("a")]) + after.finish() == "\ufffd\ufffda"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level()
    ids = [
        tokenizer.id_of("<|start|>"),
        *tokenizer.encode("hi", add_special_tokens=False),
        tokenizer.id_of("<tool>"),
        0,
    ]
    assert "".join(pieces(tokenizer, ids)) == "hi<tool>"
    assert "".join(pieces(tokenizer, ids, skip=False)) == "<|start|>hi<tool><|end|>"


def test_offsets_are_where_tokens_start() -> None:
    tokenizer = byte_level()
    emoji = [tokenizer.byte_id(byte) for byte in "😀".encode()]
    ids = [tokenizer.id_of("a"), *emoji, tokenizer.id_of("b"), 0]
    assert text_offsets(tokenizer, ids) == [0, 1, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("garbage", ["byte", "special", "unknown"])
def test_long_garbage_costs_the_same_per_token(tokenizer: TinyTokenizer, garbage: str) -> None:
    if garbage == "byte" and tokenizer is metaspace():
        token_id = tokenizer.id_of("\ufffd")
    else:
        token_id = {"byte": lambda: tokenizer.byte_id(0xF0), "special": lambda: 1, "unknown": lambda: 10**6}[garbage]()

    def seconds(count: int) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer)
        start = time.process_time()
        for _ in range(count):
            detokenizer.push((token_id,))
        detokenizer.finish()
        return time.process_time() - start

    short = min(seconds(1_000) for _ in range(3))
    # Sixteen times the tokens: 16 when linear, 256 when quadratic.
    assert seconds(16_000) < 80 * short + 0.05
