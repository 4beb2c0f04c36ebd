"""Ids, text and bytes agree, whatever the tokenizer's kind, and every way of naming an end token counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.errors import ConfigError
from engine.tokenizer import Tokenizer
from tests.engine.tiny_checkpoints import CORPUS, byte_level_tokenizer

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading",
    "trailing  ",
    "12 345",
    "👩🏽‍🚀 ok",
    "日本語",
    "    if x:\n\t\ty = 1",
    "hello , world !",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def metaspace(folder: Path) -> Tokenizer:
    """A SentencePiece-like tokenizer: spaces become U+2581, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    merges = [("▁", "h"), ("▁h", "i")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def test_text_comes_back_unchanged(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    batch = tokenizer.encode_batch(TEXTS)
    for text, ids in zip(TEXTS, batch, strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_every_token_of_byte_level_has_its_exact_bytes(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    singles = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    assert {bytes([value]) for value in range(256)} <= singles
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.token_text(token_id) == tokenizer.token_bytes(token_id).decode(errors="replace")


def test_byte_fallback_and_metaspace(tmp_path: Path) -> None:
    tokenizer = metaspace(tmp_path)
    ids = tokenizer.encode("hi é hi")
    assert tokenizer.decode(ids) == "hi é hi"
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == " hi é hi".encode()
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.token_bytes(1) == b"<s>"


def test_special_tokens_are_whole_and_can_be_hidden(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert [tokenizer.is_special(token_id) for token_id in (0, 2, 3, 10**9)] == [True, True, False, False]


def test_an_id_that_no_token_has_is_nothing(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    beyond = tokenizer.vocab_size + 5
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.decode([beyond]) == ""


def test_truncation_and_padding_of_the_file_do_not_apply(folder: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    ids = Tokenizer.from_folder(folder).encode("The quick brown fox jumps over 13 lazy dogs")
    assert 4 < len(ids) < 64
    assert Tokenizer.from_folder(folder).encode_batch(["The", CORPUS[0]])[0] == ids[:1]


def test_spaces_are_not_cleaned_up(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": true}')
    tokenizer = Tokenizer.from_folder(folder)
    text = "hello , world ! do n't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_tokens_of_all_files_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (folder / "config.json").write_text('{"eos_token_id": 9, "bos_token_id": 4}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (2, 5, 7, 9)
    assert tokenizer.bos_token_id == 4


def test_bos_of_the_tokenizer_counts_first(folder: Path) -> None:
    (folder / "config.json").write_text('{"bos_token_id": 4, "eos_token_id": null}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": null}')
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, ())


def test_named_special_tokens_become_special_without_new_ids(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "<end>": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<end>", "pad_token": "<absent>", "additional_special_tokens": ["b"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 3
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("a<end>b") == [0, 2, 1]
    assert tokenizer.decode([0, 2, 1]) == "a"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", '{"version": "1.0"', "cannot be read as a tokenizer"),
        ("config.json", "{", "damaged"),
        ("tokenizer_config.json", "[]", "JSON object"),
    ],
)
def test_damaged_files_are_named(folder: Path, name: str, content: str | None, sentence: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        Tokenizer.from_folder(folder)
