"""Text to token ids and back, for a model's folder. Knows no chat template and no torch.

Uses the folder's tokenizer.json as it is; transformers would give the same ids, at the price of importing it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import ConfigError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_METASPACE = "\u2581"


class Tokenizer:
    """Thread-safe: nothing changes after construction.

    Attributes:
        vocab_size: one more than the largest token id.
        eos_token_ids: every id that ends a sequence, as any of the folder's files says; ascending.
        bos_token_id: None when the model has none.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_token_ids: tuple[int, ...], bos_token_id: int | None
    ) -> None:
        self._backend = backend
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        decoders = set(_decoder_types(json.loads(backend.to_str())["decoder"]))
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """ConfigError when tokenizer.json is absent or damaged."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{folder} has no tokenizer.json.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise ConfigError(f"{path} cannot be read as a tokenizer: {str(error)[:200]}.") from error
        backend.no_truncation()
        backend.no_padding()
        configs = [read_optional_json(folder / name) for name in ("generation_config.json", "config.json")]
        own_config = read_optional_json(folder / "tokenizer_config.json")
        special = special_tokens(folder)
        _declare_special(backend, special, own_config)
        eos = [token_id for config in configs for token_id in _ids(config.get("eos_token_id"))]
        bos = [token_id for config in configs for token_id in _ids(config.get("bos_token_id"))]
        if (own_eos := _id_of(backend, special.get("eos_token"))) is not None:
            eos.append(own_eos)
        own_bos = _id_of(backend, special.get("bos_token"))
        return cls(
            backend,
            eos_token_ids=tuple(sorted(set(eos))),
            bos_token_id=own_bos if own_bos is not None else next(iter(bos), None),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for several texts, on several threads."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, with no clean-up of spaces; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; special tokens are shown."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, which need not be whole characters; empty for an id that no token has."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(_BYTE_OF_CHARACTER.get(character) or character.encode() for character in token)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_METASPACE, " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves it out."""
        return token_id in self._special


def read_optional_json(path: Path) -> dict[str, Any]:
    """A file's object, or {} when there is no such file. ConfigError when it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged or not readable.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object.")
    return content


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the named special tokens (`bos_token` and so on), where tokenizer_config.json counts first."""
    found: dict[str, str] = {}
    for config in (
        read_optional_json(folder / "special_tokens_map.json"),
        read_optional_json(folder / "tokenizer_config.json"),
    ):
        for name in SPECIAL_TOKEN_NAMES:
            if (text := _token_text(config.get(name))) is not None:
                found[name] = text
    return found


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _declare_special(backend: tokenizers.Tokenizer, special: dict[str, str], config: dict[str, Any]) -> None:
    """Mark as special what the configuration calls special, as transformers does; never grows the vocabulary."""
    already = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [*special.values(), *(_token_text(token) for token in (extra if isinstance(extra, list) else []))]
    for text in dict.fromkeys(named):
        if text and text not in already and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _decoder_types(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is None:
        return
    yield str(decoder.get("type"))
    for inner in decoder.get("decoders", []):
        yield from _decoder_types(inner)


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): bytes([value]) for value in printable}
    return alphabet | {chr(256 + index): bytes([value]) for index, value in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
