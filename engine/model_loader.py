"""Loads a causal language model with its weights mapped from disk, and refuses what this engine would compute wrongly.

What a model needs is found out by looking: its configuration, the weights that were and were not used, and a short
forward pass through a plain attention function, which notes what it is asked for and must give the model's own logits.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from engine.cache_folder import build_once, cache_root, file_digest, require_space
from engine.errors import ConfigError
from engine.fingerprint import Fingerprint
from engine.kv_layout import DTYPE_BYTES, KvLayout
from engine.model_store import ModelFiles, check_folder
from engine.safetensors_file import (
    DTYPE_OF_TORCH_NAME,
    TORCH_NAME_OF_DTYPE,
    TensorEntry,
    read_entries,
    weight_files,
    write_tensors,
)

logger = logging.getLogger(__name__)

_PROBE = "pdserve_probe"
_PROBE_TOKENS = 6
_PROBE_ROWS = (1, 5)
_CAST_VERSION = 1
_NATIVE_CPU_FLAGS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
_ATTENTION_WORDS_HANDLED = {
    "scaling",
    "dropout",
    "is_causal",
    "position_ids",
    "cache_position",
    "sliding_window",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "cache",
    "past_key_values",
    "layer_idx",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: transformers' causal language model, in eval mode, with the wanted attention implementation.
        config: its configuration.
        layout: of its KV blocks.
        fingerprint: what its KV means.
        vocab_size: columns of its logits, which may be more than the tokenizer has tokens.
        max_position: tokens that its configuration allows.
    """

    model: torch.nn.Module
    config: PretrainedConfig
    layout: KvLayout
    fingerprint: Fingerprint
    vocab_size: int
    max_position: int


def load_model(files: ModelFiles, *, dtype: str, device: str, block_size: int, attention: str) -> LoadedModel:
    """Load, check and describe. Parameters on the CPU are views of the mapped file, so nodes share one copy of them.

    Args:
        files: a complete folder.
        dtype: as `EngineConfig.dtype`.
        device: torch device.
        block_size: tokens of a KV block.
        attention: name of a registered attention function.

    Raises:
        ConfigError: naming the feature, weight or setting that stands in the way.
    """
    check_folder(files.folder, weights=True)
    wanted = resolve_dtype(files.folder, dtype, device)
    config = _read_config(files.folder)
    _refuse_by_config(config)
    folder = _folder_of_dtype(files, wanted)
    model = _load(folder, config, wanted)
    _check_filled(model)
    _check_rotary(model)
    shape = _probe(model, config)
    if device != "cpu":
        model = model.to(device)
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"The attention implementation {attention!r} cannot be used: {_first_line(error)}") from error
    model.requires_grad_(False)
    layout = KvLayout(
        num_layers=shape.num_layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        dtype=wanted,
    )
    fingerprint = Fingerprint.of(
        layout,
        model_id=files.model_id,
        weights_digest=_weights_digest(files.folder),
        rope_digest=_rope_digest(model, config),
    )
    logger.info("model_loaded model_id=%s class=%s dtype=%s device=%s", files.model_id, type(model), wanted, device)
    return LoadedModel(model, model.config, layout, fingerprint, shape.vocab_size, _max_position(config))


def resolve_dtype(folder: Path, dtype: str, device: str) -> str:
    """`auto` becomes the checkpoint's dtype, or float32 on a CPU that computes it only by emulation."""
    if dtype != "auto":
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPE_BYTES)}, not {dtype!r}.")
        return dtype
    weights: dict[str, int] = {}
    for file in weight_files(folder):
        for entry in read_entries(file):
            weights[entry.dtype] = weights.get(entry.dtype, 0) + entry.num_bytes
    stored = TORCH_NAME_OF_DTYPE.get(max(weights, key=lambda name: weights[name], default=""), "float32")
    if torch.device(device).type == "cpu" and stored != "float32" and not (_NATIVE_CPU_FLAGS[stored] & _cpu_flags()):
        return "float32"
    return stored


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        logger.info("cpu_flags_unknown system=%s", platform.system())
        return set()
    lines = (line.partition(":") for line in text.splitlines())
    return {word for name, _, value in lines if name.strip() in ("flags", "Features") for word in value.split()}


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if "trust_remote_code" in str(error):
            raise ConfigError(f"The model type {kind!r} needs code from its repository, which is never run.") from error
        raise ConfigError(
            f"{folder}/config.json (model type {kind!r}) is not supported: {_first_line(error)}"
        ) from error


def _refuse_by_config(config: PretrainedConfig) -> None:
    """Raise ConfigError naming a feature that the engine does not run."""

    def get(name: str) -> Any:
        return getattr(config, name, None)

    max_position = _max_position(config)
    kind = config.model_type
    if get("quantization_config") is not None:
        method = get("quantization_config")
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", method)
        raise ConfigError(f"The checkpoint is quantised ({method}), which is not supported.")
    if get("is_encoder_decoder"):
        raise ConfigError(f"{kind} is an encoder-decoder model, which is not supported.")
    if get("add_cross_attention"):
        raise ConfigError(f"{kind} uses cross attention, which is not supported.")
    if config.get_text_config() is not config or get("vision_config") is not None or get("audio_config") is not None:
        raise ConfigError(f"{kind} is a multimodal model, which is not supported.")
    for name, words in {
        "kv_lora_rank": "latent attention (MLA)",
        "attn_logit_softcapping": "a soft cap on attention scores",
        "attn_logit_softcap": "a soft cap on attention scores",
        "alibi": "ALiBi positions",
        "num_kv_shared_layers": "KV shared between layers",
        "attention_sinks": "attention sinks",
    }.items():
        if get(name):
            raise ConfigError(f"{kind} uses {words} ({name}={get(name)!r}), which is not supported.")
    window = get("sliding_window") if get("use_sliding_window") is not False else None
    layer_types = get("layer_types")
    for layer_type in set(layer_types or ()):
        limit = {"sliding_attention": get("sliding_window"), "chunked_attention": get("attention_chunk_size")}
        if layer_type != "full_attention" and (limit.get(layer_type) or 0) < max_position:
            raise ConfigError(f"{kind} has layers of type {layer_type}, which is not supported.")
    if layer_types is None and window is not None and window < max_position:
        raise ConfigError(f"{kind} uses a sliding window of {window} tokens, which is not supported.")
    for parameters in _rope_parameters(config):
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ConfigError(f"{kind} uses the rope_type {rope_type!r}, which is not known.")
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise ConfigError(
                f"{kind} uses the rope_type {rope_type!r}, which is not supported: its frequencies depend on "
                "the longest sequence of a batch."
            )


def _rope_parameters(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """One mapping, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if isinstance(parameters, Mapping):
            nested = [value for value in parameters.values() if isinstance(value, Mapping)]
            yield from nested or [parameters]


def _max_position(config: PretrainedConfig) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(f"{config.model_type}'s configuration does not say how many positions it allows.")


def _folder_of_dtype(files: ModelFiles, dtype: str) -> Path:
    """The folder itself when its weights are of `dtype`, else a copy in the cache whose weights are."""
    stored = DTYPE_OF_TORCH_NAME[dtype]
    entries = [entry for file in weight_files(files.folder) for entry in read_entries(file)]
    if unknown := next((entry for entry in entries if entry.dtype not in TORCH_NAME_OF_DTYPE), None):
        raise ConfigError(f"The weight {unknown.name} is stored as {unknown.dtype}, which is not supported.")
    if all(entry.dtype == stored for entry in entries):
        return files.folder
    digest = xxhash.xxh3_128_hexdigest(_weights_digest(files.folder).encode())
    name = f"{files.folder.name[:80]}-{dtype}-{digest[:16]}-v{_CAST_VERSION}"
    copy = cache_root() / "models" / name
    build_once(copy, lambda partial: _cast(files.folder, partial, dtype), report=lambda text: logger.info("%s", text))
    return copy


def _cast(source: Path, folder: Path, dtype: str) -> None:
    from safetensors import safe_open

    files = weight_files(source)
    old = {file: read_entries(file) for file in files}
    stored = DTYPE_OF_TORCH_NAME[dtype]
    require_space(folder, sum(TensorEntry(e.name, stored, e.shape).num_bytes for es in old.values() for e in es))
    logger.info("casting_weights folder=%s dtype=%s", source, dtype)
    for file, entries in old.items():
        with safe_open(file, framework="pt") as tensors:
            contents = (_as_bytes(tensors.get_tensor(entry.name), dtype) for entry in entries)
            write_tensors(folder / file.name, [TensorEntry(e.name, stored, e.shape) for e in entries], contents)
    index = source / "model.safetensors.index.json"
    if len(files) > 1 or not (folder / "model.safetensors").exists():
        shutil.copyfile(index, folder / index.name)
    shutil.copyfile(source / "config.json", folder / "config.json")


def _as_bytes(tensor: torch.Tensor, dtype: str) -> memoryview:
    cast = tensor.to(getattr(torch, dtype)).contiguous()
    return cast.reshape(-1).view(torch.uint8).numpy().data


def _load(folder: Path, config: PretrainedConfig, dtype: str) -> Any:
    """The model on the CPU. ConfigError names a weight that was not used, or a parameter that none filled."""
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are in the report, with names
        )
    except (ValueError, RuntimeError, KeyError, TypeError, OSError, ImportError, AttributeError) as error:
        raise ConfigError(f"{folder.name} ({config.model_type}) cannot be loaded: {_first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    for key, words in {
        "missing_keys": "no weight in the files fills the parameter",
        "unexpected_keys": "the model has no place for the weight",
        "mismatched_keys": "the shape in the files differs for the weight",
        "error_msgs": "loading said",
    }.items():
        if found := sorted(report.get(key) or (), key=str):
            name = found[0][0] if isinstance(found[0], tuple) else found[0]
            raise ConfigError(f"{folder.name} does not fit {type(model).__name__}: {words} {name} ({len(found)} such).")
    if not getattr(type(model), "_supports_attention_backend", False):
        raise ConfigError(f"{type(model).__name__} does not let its attention be replaced, so it cannot be served.")
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"{type(model).__name__} keeps a recurrent state, which is not supported.")
    return model.eval()


def _check_filled(model: torch.nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise ConfigError(f"{type(model).__name__} left {name} unfilled.")
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not bool(torch.isfinite(buffer).all()):
            raise ConfigError(f"{type(model).__name__} left the buffer {name} unfilled.")


def _rotary_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False)):
            yield name, module


def _check_rotary(model: torch.nn.Module) -> None:
    """Rotary frequencies are in no file: compare them with a module made from the configuration just now."""
    for name, module in _rotary_modules(model):
        fresh = type(module)(module.config)
        expected = dict(fresh.named_buffers(recurse=False))
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if not torch.equal(buffer.float(), expected[buffer_name].float()):
                raise ConfigError(f"{type(model).__name__} holds wrong rotary frequencies in {name}.{buffer_name}.")


@dataclass(frozen=True, slots=True)
class _Shape:
    num_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(slots=True)
class _Recorder:
    """A plain attention function, causal and with grouped heads, that notes what else it was asked for."""

    layers: list[int] = field(default_factory=list)
    shapes: set[tuple[int, int, int, int]] = field(default_factory=set)
    unsupported: dict[str, object] = field(default_factory=dict)
    max_position: int = 0

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **words: Any,
    ) -> tuple[torch.Tensor, None]:
        self.layers.append(int(getattr(module, "layer_idx", -1)))
        self.shapes.add((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
        for word, given in words.items():
            if word == "sliding_window" and given is not None and given < self.max_position:
                self.unsupported[word] = given
            elif word not in _ATTENTION_WORDS_HANDLED and given is not None and given is not False:
                self.unsupported[word] = type(given).__name__ if isinstance(given, torch.Tensor) else given
        if attention_mask is not None:
            self.unsupported["attention_mask"] = tuple(attention_mask.shape)
        groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
        scaling = words.get("scaling")
        scores = (query @ key.repeat_interleave(groups, 1).transpose(2, 3)).float()  # [batch, heads, tokens, tokens]
        scores *= query.shape[3] ** -0.5 if scaling is None else scaling
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1).to(value.dtype)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


def _probe(model: Any, config: PretrainedConfig) -> _Shape:
    """Run a few tokens with a plain attention, learn what that is asked for, and compare with the model's own."""
    recorder = _Recorder(max_position=_max_position(config))
    ALL_ATTENTION_FUNCTIONS.register(_PROBE, recorder)
    name = type(model).__name__
    try:
        model.set_attn_implementation(_PROBE)
        logits = _probe_logits(model, logits_to_keep=torch.tensor(_PROBE_ROWS))
        model.set_attn_implementation("eager")
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{name} does not run with a replaced attention and a plain KV cache: {error}.") from error
    if recorder.unsupported:
        word, given = next(iter(recorder.unsupported.items()))
        raise ConfigError(f"{name}'s attention needs {word} ({given}), which is not supported.")
    if logits.shape[1] != len(_PROBE_ROWS):
        raise ConfigError(
            f"{name} computes the logits of every token, which is not supported: it has no logits_to_keep."
        )
    own = _probe_logits(model)[:, list(_PROBE_ROWS)]
    if not bool(torch.isfinite(own).all()):
        raise ConfigError(f"{name} gives logits that are not finite in {model.dtype}: its weights are damaged.")
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    if float((own - logits).abs().max()) > tolerance * max(1.0, float(own.abs().max())):
        raise ConfigError(
            f"{name} gives other logits when its attention is replaced, so it does more than plain attention."
        )
    num_layers = getattr(config, "num_hidden_layers", None)
    if recorder.layers != list(range(len(recorder.layers))) or len(recorder.layers) != num_layers:
        raise ConfigError(
            f"{name} called attention for {len(recorder.layers)} of its {num_layers} layers, or not in order: "
            "models with layers of other kinds are not supported."
        )
    if len(recorder.shapes) != 1:
        raise ConfigError(f"{name}'s layers differ in heads or head size, which is not supported.")
    ((heads, kv_heads, head_dim, value_dim),) = recorder.shapes
    if head_dim != value_dim or heads % kv_heads:
        raise ConfigError(f"{name} has heads that are not supported: {heads} x {head_dim} on {kv_heads} x {value_dim}.")
    return _Shape(num_layers, kv_heads, head_dim, int(logits.shape[-1]))


def _probe_logits(model: Any, **words: Any) -> torch.Tensor:
    ids = torch.arange(_PROBE_TOKENS)[None]
    rows = min(int(model.get_input_embeddings().weight.shape[0]), 1000)
    with torch.inference_mode():
        output = model(input_ids=(ids * 7 + 3) % rows, position_ids=ids, cache=DynamicCache(), use_cache=True, **words)
    logits: torch.Tensor = output.logits.float()  # [1, tokens, vocabulary]
    return logits


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _NOT_IDENTITY}


def _weights_digest(folder: Path) -> str:
    """Of the content of the weight files and of the configuration; the same wherever they lie."""
    state = xxhash.xxh3_128()
    for file in weight_files(folder):
        state.update(f"{file.name}:{file_digest(file)};".encode())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    state.update(json.dumps(_identity(config), sort_keys=True).encode())
    return state.hexdigest()


def _rope_digest(model: torch.nn.Module, config: PretrainedConfig) -> str:
    """Of the frequencies and factors in use, as float32 on the CPU."""
    state = xxhash.xxh3_128()
    parameters = [dict(mapping) for mapping in _rope_parameters(config)]
    state.update(json.dumps(parameters, sort_keys=True, default=str).encode())
    for name, module in _rotary_modules(model):
        for buffer_name, buffer in sorted(module.named_buffers(recurse=False)):
            state.update(f"{name}.{buffer_name}:{getattr(module, 'attention_scaling', 1.0)!r};".encode())
            state.update(buffer.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return state.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:300]
