"""Turns a GGUF file into a Hugging Face folder with bf16 safetensors; run as a process of its own.

    python -m engine.gguf_convert FILE FOLDER

Lines on stdout are progress; a refusal is one sentence on stderr and exit code 2. Names of weights, and the order of
rows that llama.cpp changes for rotary embeddings, come from transformers; a key or a tensor of the file that would not
reach the model is refused by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cache_folder import require_space
from engine.errors import ConfigError
from engine.gguf_tokenizer import build_tokenizer
from engine.safetensors_file import TensorEntry, write_tensors

if TYPE_CHECKING:
    from gguf import GGUFReader

_MODEL_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
_MEANS_NOTHING = (0, 0.0, False, None, "none")
_ROPE_FACTORS = "rope_freqs.weight"


def convert(source: Path, folder: Path) -> None:
    """Fill the empty `folder`. ConfigError names what the file holds that cannot be served."""
    reader = open_gguf(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(metadata, reader)
    tokenizer, tokenizer_config = build_tokenizer(metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write(folder / "tokenizer_config.json", tokenizer_config)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", _generation_config(metadata))
    _write_weights(reader, config, folder)


def open_gguf(source: Path) -> GGUFReader:
    """The file's header. ConfigError when it is no GGUF file or ends too early."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except FileNotFoundError as error:
        raise ConfigError(f"There is no file {source}.") from error
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not a complete GGUF file: the download is truncated or damaged.") from error
    size = source.stat().st_size
    if any(tensor.data_offset + tensor.n_bytes > size for tensor in reader.tensors):
        raise ConfigError(f"{source} is not a complete GGUF file: the download is truncated.")
    return reader


def model_config(metadata: Mapping[str, Any], reader: GGUFReader) -> dict[str, object]:
    """The content of config.json."""
    architecture = metadata.get("general.architecture")
    if architecture not in _MODEL_CLASSES:
        raise ConfigError(
            f"The GGUF file's architecture {architecture!r} is not supported; "
            f"supported are {', '.join(sorted(_MODEL_CLASSES))}."
        )
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, value in values.items():
        if key not in _KNOWN_KEYS and value not in _MEANS_NOTHING:
            raise ConfigError(f"The GGUF file sets {prefix}{key} to {value!r}, which is not supported.")

    def number(key: str) -> int:
        value = values.get(key)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"The GGUF file's {prefix}{key} must be a positive integer, not {value!r}.")
        return value

    hidden_size, heads = number("embedding_length"), number("attention.head_count")
    values.setdefault("attention.head_count_kv", heads)
    values.setdefault("attention.key_length", values.get("rope.dimension_count", hidden_size // heads))
    head_dim = number("attention.key_length")
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise ConfigError(f"The GGUF file's {prefix}{key} is {values[key]}, not the head size {head_dim}.")
    if architecture == "qwen2" and head_dim * heads != hidden_size:
        raise ConfigError(f"The GGUF file's {prefix}attention.key_length is {head_dim}, which qwen2 cannot have.")
    names = {tensor.name for tensor in reader.tensors}
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": _short(values.get("rope.freq_base", 10000.0))}
    if _ROPE_FACTORS in names:
        rope |= _llama3_rope(reader, head_dim, float(values.get("rope.freq_base", 10000.0)))
    config: dict[str, object] = {
        "architectures": [_MODEL_CLASSES[architecture]],
        "model_type": architecture,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": number("block_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": _short(values.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": _vocabulary_size(metadata, values, reader),
    }
    if architecture != "qwen2":
        config |= {"head_dim": head_dim, "attention_bias": False}
    for name in ("bos_token_id", "eos_token_id"):
        if (token_id := metadata.get(f"tokenizer.ggml.{name}")) is not None:
            config[name] = token_id
    return config


def _vocabulary_size(metadata: Mapping[str, Any], values: Mapping[str, Any], reader: GGUFReader) -> int:
    """Rows of the embedding, which may be more than there are tokens."""
    rows = next((int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if rows is None:
        raise ConfigError("The GGUF file has no tensor token_embd.weight.")
    tokens = len(metadata.get("tokenizer.ggml.tokens", []))
    if rows < tokens or values.get("vocab_size", rows) != rows:
        raise ConfigError(f"The GGUF file's embedding has {rows} rows for {values.get('vocab_size', tokens)} tokens.")
    return rows


def _llama3_rope(reader: GGUFReader, head_dim: int, theta: float) -> dict[str, object]:
    """Llama 3's scaling of rotary frequencies, recognised by the factors that the file holds instead of its terms."""
    import numpy

    factors = numpy.asarray(next(tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS).data, dtype="f8")
    scale, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * numpy.pi * theta ** (numpy.arange(0, head_dim, 2) / head_dim)
    smooth = numpy.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scale + smooth)
    if factors.shape != expected.shape or not numpy.allclose(factors, expected, rtol=1e-3):
        raise ConfigError(f"The GGUF file's {_ROPE_FACTORS} is not the scaling of Llama 3, the only one supported.")
    return {
        "rope_type": "llama3",
        "factor": scale,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _short(value: float) -> float:
    """The shortest number with this float32 value: 1e-05 rather than 9.999999747378752e-06."""
    import numpy

    return float(str(numpy.float32(value)))


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, object]:
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config: dict[str, object] = {"eos_token_id": sorted({token_id for token_id in ends if token_id is not None})}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            config[name] = token_id
    return config


def _write_weights(reader: GGUFReader, config: dict[str, object], folder: Path) -> None:
    """Write model.safetensors tensor by tensor, and refuse a tensor without a parameter or the reverse."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = str(config["model_type"])
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)
    details = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "dtype")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **details))
    names = get_gguf_hf_weights_map(model, processor)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected = set(shapes)
    if config["tie_word_embeddings"]:
        expected -= set(model.all_tied_weights_keys)
    tensors = [tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS]
    entries: list[TensorEntry] = []
    for tensor in tensors:
        name = names.get(tensor.name)
        if name not in expected:
            raise ConfigError(f"The GGUF file's tensor {tensor.name} has no place in {config['architectures']}.")
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != shapes[name]:
            raise ConfigError(f"The GGUF file's tensor {tensor.name} is {shape}, and {name} is {shapes[name]}.")
        entries.append(TensorEntry(name, "BF16", shape))
    found = {entry.name for entry in entries}
    if len(found) != len(entries):
        raise ConfigError("The GGUF file names a tensor twice.")
    if missing := sorted(expected - found):
        raise ConfigError(f"The GGUF file lacks the tensor for {missing[0]} ({len(missing)} missing).")
    require_space(folder, sum(entry.num_bytes for entry in entries) + 64_000_000)
    write_tensors(folder / "model.safetensors", entries, _bf16_contents(tensors, processor))


def _bf16_contents(tensors: list[Any], processor: Any) -> Iterator[memoryview]:
    import numpy
    import torch
    from gguf import dequantize

    for index, tensor in enumerate(tensors):
        if index % max(1, len(tensors) // 10) == 0:
            print(f"converting weights: {100 * index // len(tensors)}%", flush=True)
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ConfigError(
                f"The GGUF file's {tensor.name} is quantised as {kind}, which is not supported."
            ) from error
        processed = processor.process(weights=values, name=tensor.name, tensor_key_mapping={}, parsed_parameters={})
        rows = torch.from_numpy(numpy.array(processed.weights, dtype=numpy.float32, order="C")).to(torch.bfloat16)
        if not bool(torch.isfinite(rows).all()):
            raise ConfigError(f"The GGUF file's tensor {tensor.name} holds values that are not finite.")
        yield rows.reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Entry point of the process."""
    source, folder = (Path(argument) for argument in arguments)
    try:
        convert(source, folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
