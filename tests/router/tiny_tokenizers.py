"""Small tokenizers of the three kinds there are, built in memory, with the interface of engine.tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other one",
    "def f(x):\n    if x:\n        return x\n",
    "日本語のテキスト、日本の本 한국어 텍스트 👩‍👩‍👧‍👦 😀😃 Ünïcödé",
    "red orange yellow green red orange yellow green",
)


class TinyTokenizer:
    """What the text layer asks of a tokenizer, straight over the tokenizers library."""

    eos_token_ids = (0,)
    bos_token_id = None

    def __init__(self, backend: Tokenizer, *, is_byte_level: bool) -> None:
        self._backend = backend
        self._is_byte_level = is_byte_level
        self._specials = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.vocab_size = backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token_id in self._specials:
            return token.encode()
        if self._is_byte_level:
            return bytes(_byte_of()[character] for character in token)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._specials

    def id_of(self, token: str) -> int:
        """The id of a token spelled as in the vocabulary."""
        token_id = self._backend.token_to_id(token)
        assert token_id is not None, token
        return int(token_id)

    def byte_id(self, byte: int) -> int:
        """The id of the token that is this byte alone."""
        if not self._is_byte_level:
            return self.id_of(f"<0x{byte:02X}>")
        return self.id_of(next(character for character, value in _byte_of().items() if value == byte))


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes, read backwards."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


@cache
def byte_level(*, strip: bool = False) -> TinyTokenizer:
    """Like GPT-2, Llama 3, Qwen and SmolLM2: tokens are bytes, some of them joined.

    With `strip` the decoder drops a first space, so that the text is not the bytes alone.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps) if strip else steps[0]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return TinyTokenizer(backend, is_byte_level=True)


@cache
def byte_fallback(*, strip: bool = True) -> TinyTokenizer:
    """Like Llama 2 and Gemma: words begin with U+2581, what has no token is spelled in `<0xNN>` tokens."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += ["▁", *"abcdefghijklmnopqrstuvwxyz.,:()", "日", "本", "\n"]
    merges: list[tuple[str, str]] = []
    for word in ("▁the", "▁red", "▁dog", "▁a", "▁b", "hello"):
        joined = word[0]
        for character in word[1:]:
            if (joined, character) not in merges:
                merges.append((joined, character))
                vocabulary.append(joined + character)
            joined += character
    ids = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TinyTokenizer(backend, is_byte_level=False)


@cache
def metaspace() -> TinyTokenizer:
    """Like T5: no bytes at all, so what has no token is lost; the decoder drops the first space."""
    ids = {token: index for index, token in enumerate(["<unk>", "</s>", "▁", *"abcdefghij", "▁a", "▁b", "\ufffd"])}
    backend = Tokenizer(models.BPE(ids, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return TinyTokenizer(backend, is_byte_level=False)
