"""Builds tokenizer.json and tokenizer_config.json from what a GGUF file says about its tokenizer. Torch-free.

A GGUF names the split of text before BPE (`tokenizer.ggml.pre`) and does not carry it, so each name is spelled out
here; a name that is not here is refused, since a wrong split gives other tokens without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ConfigError

_TOKEN_UNKNOWN, _TOKEN_CONTROL, _TOKEN_USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _by_regex(_LLAMA3_SPLIT)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _by_regex(_QWEN2_SPLIT)


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "llama-bpe": _llama3,
    "llama-v3": _llama3,
    "llama3": _llama3,
    "qwen2": _qwen2,
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama-v3", "llama3"}
_NFC = {"qwen2"}
_ADD_BOS = {"llama-bpe", "llama-v3", "llama3"}


def build_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, object]]:
    """The tokenizer and the content of tokenizer_config.json. ConfigError names what is not supported."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ConfigError(
            f"The GGUF file's tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is supported."
        )
    if split not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"The GGUF file's tokenizer.ggml.pre is {split!r}, which is not supported; "
            f"known are {', '.join(sorted(_PRE_TOKENIZERS))}."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError("The GGUF file's tokenizer names the same token twice.")
    merges = [_merge(line) for line in metadata.get("tokenizer.ggml.merges", [])]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the binding raises bare Exception, for a merge that is not in the vocabulary
        raise ConfigError(f"The GGUF file's merges do not fit its tokens: {error}.") from error
    tokenizer = Tokenizer(model)
    if split in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata)
    config = _special_tokens(tokens, metadata)
    tokenizer.post_processor = _post_processor(tokens, metadata, add_bos_default=split in _ADD_BOS)
    return tokenizer, config


def _merge(line: str) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not separator or not left or not right:
        raise ConfigError(f"The GGUF file holds a merge that is not two tokens: {line!r}.")
    return left, right


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any]) -> None:
    """Control and user-defined tokens are found in text as a whole, before it is split."""
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, normalized=False, special=kind != _TOKEN_USER_DEFINED)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_TOKEN_UNKNOWN, _TOKEN_CONTROL, _TOKEN_USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)


def _special_tokens(tokens: list[str], metadata: Mapping[str, Any]) -> dict[str, object]:
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    for name, key in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ConfigError(f"The GGUF file's tokenizer.ggml.{key} is {token_id}, beyond its {len(tokens)} tokens.")
        config[name] = tokens[token_id]
    return config


def _post_processor(
    tokens: list[str], metadata: Mapping[str, Any], *, add_bos_default: bool
) -> processors.PostProcessor:
    single, pair, used = ["$A"], ["$B:1"], []
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos_default):
        bos = _required(metadata, "bos_token_id", "add_bos_token")
        single.insert(0, tokens[bos])
        pair.insert(0, f"{tokens[bos]}:1")
        used.append((tokens[bos], bos))
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = _required(metadata, "eos_token_id", "add_eos_token")
        single.append(tokens[eos])
        pair.append(f"{tokens[eos]}:1")
        used.append((tokens[eos], eos))
    if not used:
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(single=single, pair=single + pair, special_tokens=used)


def _required(metadata: Mapping[str, Any], key: str, because: str) -> int:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        raise ConfigError(f"The GGUF file asks for tokenizer.ggml.{because} and has no tokenizer.ggml.{key}.")
    return int(token_id)
