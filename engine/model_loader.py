"""Loads a causal language model with its weights mapped from disk, and refuses what this engine would compute wrongly.

What a model needs is found out by looking: its configuration, the weights that were and were not used, and a short
forward pass over a pool of a few blocks, which must give the logits of the model's own attention.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from engine.forward_batch import ForwardBatch, SequenceSlice, build_batch
from engine.ids import BlockId
from engine.kv_layout import DTYPE_BYTES, KvLayout
from engine.model_store import ModelFiles, check_folder
from engine.paged_cache import PagedCache, UnsupportedModel, host_plan, paged_attention
from engine.safetensors_file import (
    DTYPE_OF_TORCH_NAME,
    TORCH_NAME_OF_DTYPE,
    TensorEntry,
    read_entries,
    weight_files,
    write_tensors,
)
from kernels.cpu_library import cpu_flags, load_library

logger = logging.getLogger(__name__)

SUPPORTED_FAMILIES = (
    "apertus",
    "arcee",
    "biogpt",
    "codegen",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "minimax_m2",
    "ministral",
    "mistral",
    "mixtral",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
)
"""Model types whose tokens the tests hold to transformers' own. Others run when they pass the probe, with a warning."""

_PROBE = "pdserve_probe"
_PROBE_TOKENS = 7
_PROBE_BLOCK = 4
_PROBE_LONGEST_WINDOW = 32
"""A window up to this long is probed beyond its end; longer ones would make every start slow."""

_CAST_VERSION = 1
_NATIVE_CPU_FLAGS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: transformers' causal language model, in eval mode, with the wanted attention implementation.
        config: its configuration.
        layout: of its KV blocks.
        fingerprint: what its KV means.
        vocab_size: columns of its logits, which may be more than the tokenizer has tokens.
        max_position: tokens that its configuration allows and that are computed as it says.
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
    if config.model_type not in SUPPORTED_FAMILIES:
        logger.warning("model_family_untested model_type=%s", config.model_type)
    logger.info("model_loaded model_id=%s class=%s dtype=%s device=%s", files.model_id, type(model), wanted, device)
    return LoadedModel(model, model.config, layout, fingerprint, shape.vocab_size, _max_position(config))


def resolve_dtype(folder: Path, dtype: str, device: str) -> str:
    """`auto` becomes the checkpoint's dtype, or float32 on a CPU that computes it only by emulation.

    The compiled kernels widen bfloat16 as they read it, so with them it is the quicker one on every CPU.
    """
    if dtype != "auto":
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPE_BYTES)}, not {dtype!r}.")
        return dtype
    weights: dict[str, int] = {}
    for file in weight_files(folder):
        for entry in read_entries(file):
            weights[entry.dtype] = weights.get(entry.dtype, 0) + entry.num_bytes
    stored = TORCH_NAME_OF_DTYPE.get(max(weights, key=lambda name: weights[name], default=""), "float32")
    if torch.device(device).type != "cpu" or stored == "float32" or _NATIVE_CPU_FLAGS[stored] & cpu_flags():
        return stored
    return stored if stored == "bfloat16" and load_library() is not None else "float32"


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if "trust_remote_code" in str(error):
            raise _not_supported(f"The model type {kind!r} needs code from its repository") from error
        raise _not_supported(f"{folder}/config.json is of model type {kind!r} ({_first_line(error)})") from error


def _not_supported(subject: str, what: str = "families", that_run: Iterable[str] = SUPPORTED_FAMILIES) -> ConfigError:
    return ConfigError(f"{subject}, which is not supported; {what} that run: {', '.join(that_run)}.")


def _refuse_by_config(config: PretrainedConfig) -> None:
    """Raise ConfigError naming a feature that the engine does not run."""

    def get(name: str) -> Any:
        return getattr(config, name, None)

    kind = config.model_type
    if get("quantization_config") is not None:
        method = get("quantization_config")
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", method)
        raise _not_supported(f"The checkpoint is quantised ({method})", "dtypes of weights", DTYPE_BYTES)
    if get("is_encoder_decoder"):
        raise _not_supported(f"{kind} is an encoder-decoder model")
    if get("add_cross_attention"):
        raise _not_supported(f"{kind} uses cross attention")
    if config.get_text_config() is not config or get("vision_config") is not None or get("audio_config") is not None:
        raise _not_supported(f"{kind} is a multimodal model")
    for name, words in {
        "kv_lora_rank": "latent attention (MLA)",
        "alibi": "ALiBi positions",
        "num_kv_shared_layers": "KV shared between layers",
        "use_bidirectional_attention": "attention that looks ahead",
    }.items():
        if get(name):
            raise _not_supported(f"{kind} uses {words} ({name}={get(name)!r})")
    for layer_type in sorted(set(get("layer_types") or ()) - {"full_attention", "sliding_attention"}):
        if layer_type != "chunked_attention":
            raise _not_supported(
                f"{kind} has layers of type {layer_type}, with another state than K and V of each token"
            )
        if (get("attention_chunk_size") or 0) < _max_position(config):
            raise _not_supported(f"{kind} attends in chunks of {get('attention_chunk_size')} tokens ({layer_type})")
    for parameters in _rope_parameters(config):
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        known = sorted({"default", *ROPE_INIT_FUNCTIONS})
        if rope_type not in known:
            raise _not_supported(f"{kind} uses the rope_type {rope_type!r}", "rope types", known)


def _windows(config: PretrainedConfig, num_layers: int) -> list[int | None]:
    """How many tokens back each layer sees by its configuration; None is all."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return [window if layer_type == "sliding_attention" else None for layer_type in layer_types[:num_layers]]
    return [window if getattr(config, "use_sliding_window", None) is not False else None] * num_layers


def _rope_parameters(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """One mapping, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if isinstance(parameters, Mapping):
            nested = [value for value in parameters.values() if isinstance(value, Mapping)]
            yield from nested or [parameters]


def _max_position(config: PretrainedConfig) -> int:
    """The longest sequence whose rotary frequencies do not depend on how long a sequence, or a batch, is.

    Beyond it, `longrope` turns to other frequencies, so that cached K/V of a prefix would be wrong. (`dynamic` does so
    beyond `max_position_embeddings`.)
    """
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            break
    else:
        raise ConfigError(f"{config.model_type}'s configuration does not say how many positions it allows.")
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type", parameters.get("type")) == "longrope":
            value = min(value, int(parameters.get("original_max_position_embeddings", value)))
    return value


def _folder_of_dtype(files: ModelFiles, dtype: str) -> Path:
    """The folder itself when its weights are of `dtype`, else a copy in the cache whose weights are."""
    stored = DTYPE_OF_TORCH_NAME[dtype]
    entries = [entry for file in weight_files(files.folder) for entry in read_entries(file)]
    if unknown := next((entry for entry in entries if entry.dtype not in TORCH_NAME_OF_DTYPE), None):
        stored_as = f"The weight {unknown.name} is stored as {unknown.dtype}"
        raise _not_supported(stored_as, "dtypes of weights", DTYPE_BYTES)
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
    if getattr(model, "_is_stateful", False):
        raise _not_supported(f"{config.model_type} keeps a recurrent state")
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


class _Probe:
    """Stands where a PagedCache does, over a pool that it makes from the first keys it is given."""

    def __init__(self, batch: ForwardBatch, num_layers: int) -> None:
        self._batch = batch
        self._num_layers = num_layers
        self.cache: PagedCache | None = None
        self.windows: list[int | None] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PagedCache."""
        if self.cache is None:
            kv_heads, head_dim = key_states.shape[1], key_states.shape[3]
            num_blocks = self._batch.max_block_id + 1
            pool = key_states.new_zeros(num_blocks, self._num_layers, 2, kv_heads, _PROBE_BLOCK, head_dim)
            self.cache = PagedCache(host_plan(pool, self._batch), layers_done=None)
        return self.cache.update(key_states, value_states, layer_idx)

    def get_seq_length(self) -> int:
        """See PagedCache."""
        return 0


def _probe_attention(
    module: torch.nn.Module,
    *tensors: Any,
    sliding_window: int | None = None,
    paged_cache: _Probe | None = None,
    **words: Any,
) -> tuple[torch.Tensor, None]:
    if paged_cache is None or paged_cache.cache is None:
        raise UnsupportedModel("an attention that is not handed `paged_cache`")
    paged_cache.windows.append(sliding_window)
    return paged_attention(module, *tensors, sliding_window=sliding_window, paged_cache=paged_cache.cache, **words)


ALL_ATTENTION_FUNCTIONS.register(_PROBE, _probe_attention)


def _probe(model: Any, config: PretrainedConfig) -> _Shape:
    """Run a few tokens on a small pool, past the end of a short window, and compare with the model's own attention."""
    name = type(model).__name__
    num_layers = int(getattr(config, "num_hidden_layers", None) or 0)
    windows, limit = _windows(config, num_layers), _max_position(config)
    shortest = min((window for window in windows if window is not None), default=_PROBE_LONGEST_WINDOW + 1)
    length = _PROBE_TOKENS if shortest > _PROBE_LONGEST_WINDOW else max(_PROBE_TOKENS, shortest + 4)
    vocabulary = min(int(model.get_input_embeddings().weight.shape[0]), 1000)
    token_ids = [(place * 7 + 3) % vocabulary for place in range(length)]
    batch = _probe_batch(token_ids)
    probe = _Probe(batch, num_layers)
    try:
        model.set_attn_implementation(_PROBE)
        logits = _probe_logits(
            model,
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            cache=probe,
            paged_cache=probe,
            logits_to_keep=batch.logits_rows,
        )
        model.set_attn_implementation("eager")
        own = _probe_logits(model, input_ids=torch.tensor([token_ids]), cache=DynamicCache(config=config))
    except UnsupportedModel as error:
        raise _not_supported(f"{name} needs {error}") from error
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        raise _not_supported(f"{name} needs an attention or a cache of its own ({_first_line(error)})") from error
    if probe.cache is None or len(probe.windows) != num_layers or probe.cache.num_written != num_layers:
        raise _not_supported(f"{name} attends in {len(probe.windows)} of its {num_layers} layers as it is told to")
    if logits.shape[0] != len(batch.logits_rows):
        raise _not_supported(f"{name} computes the logits of every token, for want of logits_to_keep")
    for layer, (asked, configured) in enumerate(zip(probe.windows, windows, strict=True)):
        if asked != configured and min(asked or limit, configured or limit) < limit:
            raise _not_supported(f"{name} asks for a window of {asked} in layer {layer}, configured as {configured}")
    own = own[batch.positions[batch.logits_rows]]
    if not bool(torch.isfinite(own).all()):
        raise ConfigError(f"{name} gives logits that are not finite in {model.dtype}: its weights are damaged.")
    # Deep models of random weights in bfloat16 differ by up to 0.09, and by about 1 with other positions or masks.
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.25
    if float((own - logits).norm()) > tolerance * float(own.norm()):
        raise _not_supported(f"{name} gives other logits on paged attention, so its own does more than it says")
    _, _, _, kv_heads, _, head_dim = probe.cache.plan.pool.shape
    return _Shape(num_layers, kv_heads, head_dim, int(logits.shape[-1]))


def _probe_batch(token_ids: list[int]) -> ForwardBatch:
    """One sequence in three slices, which can share a pass because a layer writes before it reads.

    A single token, new tokens after old ones, new tokens alone: not in the order of their positions, so that a model
    that counts positions by itself is found out.
    """
    length = len(token_ids)
    blocks = [BlockId(block) for block in range(-(-length // _PROBE_BLOCK))]
    slices = [
        SequenceSlice(token_ids[-1:], length - 1, blocks, "last"),
        SequenceSlice(token_ids[length - 4 : -1], length - 4, blocks, "all"),
        SequenceSlice(token_ids[: length - 4], 0, blocks, "last"),
    ]
    return build_batch(slices, block_size=_PROBE_BLOCK)


def _probe_logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs, use_cache=True).logits[0].float()  # [rows, vocabulary]
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
