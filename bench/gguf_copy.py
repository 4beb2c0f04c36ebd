"""Copies a GGUF file with its weights in another type, so that llama.cpp computes in the type that the others do."""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

from engine.errors import ConfigError

TYPES = {
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
}
OWN_KEYS = ("general.architecture", "general.file_type", "general.quantization_version")


def copy_with_dtype(source: Path, target: Path, dtype: str) -> None:
    """Write `target` with every matrix of `source` in `dtype`; vectors stay float32, as llama.cpp wants them.

    Raises:
        ConfigError: `dtype` is none of float32, bfloat16 and float16, or `source` is no GGUF file.
    """
    if dtype not in TYPES:
        raise ConfigError(f"GGUF files can be written in {', '.join(TYPES)}, not {dtype}.")
    kind, file_type = TYPES[dtype]
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} is no GGUF file: {error}") from error
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, reader.fields["general.architecture"].contents())
    writer.add_file_type(file_type)
    for name, field in reader.fields.items():
        if name not in OWN_KEYS and not name.startswith("GGUF."):
            is_array = field.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)
