"""What a safetensors file holds and whether it is whole; also writes one tensor by tensor. Knows no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

DTYPE_OF_TORCH_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_NAME_OF_DTYPE = {value: key for key, value in DTYPE_OF_TORCH_NAME.items()}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its content."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def weight_files(folder: Path) -> list[Path]:
    """The files transformers would read. ConfigError when one is absent or only pickles are there."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ConfigError(
                f"{folder} holds its weights as pickles only, which are never loaded: safetensors needed."
            )
        raise ConfigError(f"{folder} has no model.safetensors and no model.safetensors.index.json.")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is damaged: it has no readable weight_map.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{index} names {name!r}, which is not a file of its own folder.")
        if not (folder / name).exists():
            raise ConfigError(f"{folder} lacks {name}, which its index names: the download is not complete.")
    return [folder / name for name in names]


def read_entries(path: Path) -> list[TensorEntry]:
    """The tensors of a file, in their order there. ConfigError when the file is not exactly as long as they need."""
    size = path.stat().st_size
    damaged = ConfigError(f"{path} is not a complete safetensors file: the download is truncated or damaged.")
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise damaged
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise damaged
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
            end = ordered[-1][1]["data_offsets"][1] if ordered else 0
            entries = [TensorEntry(name, item["dtype"], tuple(item["shape"])) for name, item in ordered]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise damaged from error
    if 8 + header_bytes + end != size:
        raise damaged
    return entries


def write_tensors(path: Path, entries: Sequence[TensorEntry], contents: Iterable[bytes | memoryview]) -> None:
    """Write `contents`, one per entry and in the same order, so that only one tensor is in memory at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 64)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for entry, content in zip(entries, contents, strict=True):
            written = file.write(content)
            if written != entry.num_bytes:
                raise ValueError(f"{entry.name} has {written} bytes, not {entry.num_bytes}")
