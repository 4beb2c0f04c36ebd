"""A GGUF file becomes the model and the tokenizer that it was made from, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import regex
import torch
from transformers import AutoModelForCausalLM

from engine.errors import ConfigError
from engine.gguf_convert import convert
from engine.gguf_tokenizer import build_tokenizer
from engine.tokenizer import Tokenizer
from tests.engine.tiny_checkpoints import CORPUS, VOCABULARY, logits_of, random_model, tokenizer_metadata, write_gguf

CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
AWKWARD = [
    *CORPUS,
    "",
    " ",
    "   x",
    "x   ",
    "a1b22c333d4444 12345678 3.14 ²³½ ٣٤٥ Ⅷ",
    "I'M we'll THEY'VE it's 'sup don''t",
    "\n\n  \t if x:\r\n\t\treturn  1\n",
    "日本語テキスト123と絵文字👍🏽。",
    "👨‍👩‍👧‍👦e\u0301\u200b\u00a0x",
]


def converted(tmp_path: Path, model: Any, architecture: str, **changes: Any) -> Path:
    source = write_gguf(tmp_path / "tiny.gguf", model, architecture, **changes)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(source, folder)
    return folder


def loaded(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}),
        (
            "llama",
            {"tie_word_embeddings": False, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
        ),
        ("qwen2", {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    ],
)
def test_logits_survive_the_conversion(tmp_path: Path, architecture: str, settings: dict[str, Any]) -> None:
    model = random_model(architecture, **settings)
    folder = converted(tmp_path, model, architecture)
    assert torch.equal(logits_of(loaded(folder)), logits_of(model))
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is settings["tie_word_embeddings"]


def test_quantised_matrices_are_dequantised(tmp_path: Path) -> None:
    model = random_model("llama", hidden_size=64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # blocks of 32 whole numbers up to 127: exact in Q8_0
                parameter.copy_(torch.randint(-127, 128, parameter.shape).float())
                parameter[:, ::32] = 127.0
                parameter.mul_(2.0**-9)
    folder = converted(tmp_path, model, "llama", float_type="Q8_0")
    assert torch.equal(logits_of(loaded(folder)), logits_of(model))


def test_llama3_rope_factors_become_its_rope_type(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_model("llama", hidden_size=64, head_dim=16, rope_parameters=rope, max_position_embeddings=16384)
    plain = 1.0 / (500000.0 ** (numpy.arange(0, 16, 2) / 16))
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(numpy.float32)
    assert factors.max() == pytest.approx(32.0)
    folder = converted(tmp_path, model, "llama", extra={"rope_freqs.weight": factors})
    assert torch.equal(logits_of(loaded(folder)), logits_of(model))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"skip": {"blk.1.attn_v.weight"}}, "model.layers.1.self_attn.v_proj.weight"),
        ({"skip": {"token_embd.weight"}}, "token_embd.weight"),
        ({"extra": {"blk.0.attn_q.bias": numpy.zeros(48, numpy.float32)}}, "blk.0.attn_q.bias"),
        ({"extra": {"rope_freqs.weight": numpy.full(6, 3.0, numpy.float32)}}, "rope_freqs.weight"),
        ({"keys": [("add_sliding_window", 64)]}, "llama.attention.sliding_window"),
        ({"keys": [("add_expert_count", 8)]}, "llama.expert_count"),
        ({"keys": [("add_string", "llama.rope.scaling.type", "yarn")]}, "llama.rope.scaling.type"),
        ({"pre": "tekken"}, "tekken"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=regex.escape(named)):
        converted(tmp_path, random_model("llama"), "llama", **changes)


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mamba"):
        converted(tmp_path, random_model("llama"), "mamba")


@pytest.mark.parametrize("kept", [0, 3, 200, 5000, -1])
def test_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", random_model("llama"), "llama")
    source.write_bytes(source.read_bytes()[:kept])
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match="not a complete GGUF file"):
        convert(source, folder)


def reference_pieces(pre: str, text: str) -> list[str]:
    if pre == "smollm":  # llama.cpp splits off every digit first
        parts = regex.split(r"(\p{N})", text)
        return [piece for part in parts for piece in regex.findall(GPT2, part)]
    pattern = {"gpt-2": GPT2, "llama-bpe": LLAMA3, "qwen2": QWEN2}[pre]
    return regex.findall(pattern, text)


def metadata(pre: str, /, **more: Any) -> dict[str, Any]:
    return {**tokenizer_metadata(pre), **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_text_is_split_as_the_name_says(tmp_path: Path, pre: str) -> None:
    backend, _ = build_tokenizer(metadata(pre))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in AWKWARD:
        normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
        expected = [piece.encode() for piece in reference_pieces(pre, normal)]
        spelled = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
        assert [_bytes_of(piece) for piece in spelled] == expected
        assert tokenizer.decode(tokenizer.encode(text)) == normal


def _bytes_of(spelled: str) -> bytes:
    from engine.tokenizer import _BYTE_OF_CHARACTER

    return b"".join(_BYTE_OF_CHARACTER[character] for character in spelled)


def test_splits_differ_where_they_should() -> None:
    assert reference_pieces("gpt-2", "12345") == ["12345"]
    assert reference_pieces("smollm", "12345") == list("12345")
    assert reference_pieces("llama-bpe", "12345") == ["123", "45"]


def test_control_and_user_defined_tokens_are_found_whole() -> None:
    backend, config = build_tokenizer(metadata("smollm"))
    ids = backend.encode("<|im_start|>user<tool_call><|im_end|>").ids
    assert (ids[0], ids[-2], ids[-1]) == (1, VOCABULARY - 1, 2)
    added = backend.get_added_tokens_decoder()
    assert added[2].special and not added[VOCABULARY - 1].special
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("pre", "more", "expected"),
    [
        ("smollm", {}, []),
        ("smollm", {"add_bos_token": True}, [1]),
        ("llama-bpe", {}, [1]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [1, 2]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(pre: str, more: dict[str, Any], expected: list[int]) -> None:
    backend, _ = build_tokenizer(metadata(pre, **more))
    bare = backend.encode("hello", add_special_tokens=False).ids
    full = backend.encode("hello").ids
    assert [token_id for token_id in full if token_id in (1, 2)] == expected
    assert [token_id for token_id in full if token_id not in (1, 2)] == bare


def test_end_tokens_reach_the_generation_config(tmp_path: Path) -> None:
    folder = converted(tmp_path, random_model("llama"), "llama", keys=[("add_eot_token_id", 0)])
    assert Tokenizer.from_folder(folder).eos_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "llama"}, "'llama'"),
        ({"pre": None}, "None"),
        ({"merges": ["a"]}, "'a'"),
        ({"merges": ["qqqq zzzz"]}, "merges"),
        ({"eos_token_id": 10**6}, "eos_token_id"),
    ],
)
def test_a_tokenizer_that_makes_no_sense_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_tokenizer(metadata("smollm", **change))
