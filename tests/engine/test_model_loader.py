"""A model is loaded exactly, mapped rather than copied, or refused with the name of what stands in the way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from engine import model_loader
from engine.errors import ConfigError
from engine.model_loader import SUPPORTED_FAMILIES, LoadedModel, load_model, resolve_dtype
from engine.model_store import ModelFiles, cache_root
from kernels import ops
from tests.engine.tiny_checkpoints import VOCABULARY, byte_level_tokenizer, logits_of, random_model, save_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))


def load(folder: Path, *, dtype: str = "float32", attention: str = "eager") -> LoadedModel:
    files = ModelFiles("tiny", folder)
    return load_model(files, dtype=dtype, device="cpu", block_size=16, attention=attention)


NINE_ON_THREE = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": False, **NINE_ON_THREE}),
    ("llama", {"rope_parameters": YARN, "num_key_value_heads": 1}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"tie_word_embeddings": False, "head_dim": 20}),
    ("gemma", {"head_dim": 16}),
    ("mistral", {"sliding_window": None}),
    ("smollm3", {"no_rope_layers": [1, 0]}),
    ("phi3", {"sliding_window": None}),
    ("olmo2", {}),
    ("granite", {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12}),
    ("gpt2", {"n_positions": 256, "num_key_value_heads": 4, "scale_attn_by_inverse_layer_idx": True}),
]


@pytest.mark.parametrize(("model_type", "settings"), FAMILIES)
def test_families_load_exactly(tmp_path: Path, model_type: str, settings: dict[str, Any]) -> None:
    model = random_model(model_type, **settings)
    loaded = load(save_folder(model, tmp_path / "model"))
    assert torch.equal(logits_of(loaded.model), logits_of(model))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    config = model.config
    heads = config.num_attention_heads
    assert loaded.layout.num_layers == 2
    assert loaded.layout.kv_heads == getattr(config, "num_key_value_heads", heads)
    assert loaded.layout.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // heads)
    assert (loaded.layout.block_size, loaded.layout.dtype) == (16, "float32")
    assert (loaded.vocab_size, loaded.max_position) == (VOCABULARY, 256)


def test_attention_implementation_is_passed_on(tmp_path: Path) -> None:
    folder = save_folder(random_model("llama"), tmp_path / "model")
    loaded = load(folder, attention="sdpa")
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.allclose(logits_of(loaded.model), logits_of(load(folder).model), atol=1e-4)
    with pytest.raises(ConfigError, match="no_such_attention"):
        load(folder, attention="no_such_attention")


def test_wanted_dtype_is_cast_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(random_model("llama"), tmp_path / "model")
    first = load(folder)
    copies = [path for path in (cache_root() / "models").iterdir() if path.is_dir()]
    assert len(copies) == 1
    stored = load_file(copies[0] / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    monkeypatch.setattr(model_loader, "_cast", lambda *_: pytest.fail("cast a second time"))
    again = load(folder)
    assert again.fingerprint == first.fingerprint
    assert torch.equal(logits_of(again.model), logits_of(first.model))
    native = load(folder, dtype="bfloat16")
    assert native.model.dtype == torch.bfloat16
    assert native.fingerprint.weights_digest == first.fingerprint.weights_digest
    assert native.fingerprint.difference(first.fingerprint) == "kv_dtype is 'bfloat16' here and 'float32' there"


def test_sharded_checkpoint_is_cast_shard_by_shard(tmp_path: Path) -> None:
    model = random_model("llama")
    folder = save_folder(model, tmp_path / "model")
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    files = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, keys in files.items():
        save_file({key: whole[key] for key in keys}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits_of(load(folder).model), logits_of(model))


def mapped_file(address: int) -> str:
    """The file behind an address of this process; empty for anonymous memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_mapped_not_copied(tmp_path: Path, stored: torch.dtype) -> None:
    """Pages of a mapped file are shared by all processes that map it; this holds for the cast copy too."""
    folder = save_folder(random_model("llama", tie_word_embeddings=False), tmp_path / "model", stored)
    loaded = load(folder)
    files = {mapped_file(parameter.data_ptr()) for parameter in loaded.model.parameters()}
    assert len(files) == 1
    file = Path(files.pop())
    assert file.name == "model.safetensors"
    assert file.is_relative_to(folder if stored == torch.float32 else cache_root())


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))
    return folder


def rewritten(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), "embed_tokens.weight|lm_head.weight"),
        (lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(2)}), "model.layers.0.extra"),
        (lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}), "layers.2"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}), "model.norm.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}), "I32"),
        (lambda tensors: tensors["model.norm.weight"].fill_(torch.nan), "not finite"),
    ],
)
def test_every_weight_finds_its_parameter_or_is_named(tmp_path: Path, change: Any, named: str) -> None:
    folder = rewritten(save_folder(random_model("llama", tie_word_embeddings=True), tmp_path / "model"), change)
    with pytest.raises(ConfigError, match=named):
        load(folder)


def test_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = save_folder(random_model("llama", tie_word_embeddings=True), tmp_path / "model")
    with pytest.raises(ConfigError, match=re.escape("lm_head.weight")):
        load(edited(folder, tie_word_embeddings=False))


def test_old_rotary_buffers_in_the_file_are_no_obstacle(tmp_path: Path) -> None:
    model = random_model("llama")
    folder = save_folder(model, tmp_path / "model")
    rewritten(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    assert torch.equal(logits_of(load(folder).model), logits_of(model))


LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
}
CHUNKED = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 16, "head_dim": 16}
FAMILIES_THAT_RUN = f"families that run: {', '.join(SUPPORTED_FAMILIES)}"
ROPE_TYPES_THAT_RUN = "rope types that run: default, dynamic, linear, llama3, longrope, proportional, yarn"
WEIGHTS_THAT_RUN = "dtypes of weights that run: float32, bfloat16, float16"
OTHER_VALUES = {"layer_types": ["full_attention"] * 2, "head_dim": 12, "v_head_dim": 16, "n_routed_experts": 4}


@pytest.mark.parametrize(
    ("model_type", "settings", "named"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "attention or a cache of its own"),
        ("deepseek_v3", LATENT, "latent attention"),
        ("diffllama", {}, "4 of its 2 layers"),
        ("doge", {"num_experts": 4}, "mask of its own"),
        ("falcon", {"alibi": True}, "ALiBi positions"),
        ("falcon", {"alibi": False}, "attention or a cache of its own"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("llama", {"sliding_window": 64}, "window of None in layer 0, configured as 64"),
        ("llama4_text", CHUNKED, "chunks of 16 tokens"),
        ("mamba", {}, "linear_attention|recurrent"),
        ("mimo_v2_flash", OTHER_VALUES, "head sizes that differ"),
        ("openai-gpt", {"n_layer": 2, "n_head": 4}, "0 of its 2 layers"),
        ("roberta", {"is_decoder": False}, "looks ahead"),
        ("rwkv", {}, "recurrent state"),
    ],
)
def test_what_cannot_run_is_refused_by_name_with_the_list_of_what_can(
    tmp_path: Path, model_type: str, settings: dict[str, Any], named: str
) -> None:
    folder = save_folder(random_model(model_type, **settings), tmp_path / "model")
    with pytest.raises(ConfigError, match=named) as caught:
        load(folder)
    message = str(caught.value)
    assert message.endswith(f"; {FAMILIES_THAT_RUN}.")
    assert "\n" not in message and message.count(". ") == 0


def test_attention_that_does_more_than_it_tells_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(random_model("llama"), tmp_path / "model")
    original = modeling_llama.eager_attention_forward

    def louder(*arguments: Any, **words: Any) -> Any:
        output, weights = original(*arguments, **words)
        return output * 1.1, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", louder)
    with pytest.raises(ConfigError, match="other logits"):
        load(folder)


def test_a_model_that_counts_positions_by_itself_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(random_model("llama"), tmp_path / "model")
    original = modeling_llama.LlamaRotaryEmbedding.forward

    def counting(self: Any, states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return original(self, states, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", counting)
    with pytest.raises(ConfigError, match="other logits"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "settings", "lost"),
    [
        ("mistral", {"sliding_window": 32}, "window"),
        ("gemma2", {"attn_logit_softcapping": 2.0, "head_dim": 12}, "soft_cap"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 12}, "sinks"),
    ],
)
def test_the_probe_sees_windows_soft_caps_and_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, settings: dict[str, Any], lost: str
) -> None:
    folder = save_folder(random_model(model_type, **settings), tmp_path / "model")
    load(folder)
    whole = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", lambda *given, **words: whole(*given, **{**words, lost: None}))
    with pytest.raises(ConfigError, match="other logits"):
        load(folder)


def test_a_family_that_no_test_holds_is_loaded_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_folder(random_model("cwm", sliding_window=8), tmp_path / "model")
    with caplog.at_level("WARNING", logger="engine.model_loader"):
        load(folder)
    assert "model_family_untested model_type=cwm" in caplog.text


def test_longrope_is_served_up_to_where_its_frequencies_change(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    settings = {"rope_parameters": {**rope, "rope_theta": 1e4}, "original_max_position_embeddings": 64}
    model = random_model("phi3", sliding_window=None, **settings)
    assert load(save_folder(model, tmp_path / "model")).max_position == 64


@pytest.mark.parametrize("settings", [{"sliding_window": 256}, {"sliding_window": 4096}])
def test_window_that_no_sequence_can_leave_is_no_obstacle(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = random_model("mistral", **settings)
    assert torch.equal(logits_of(load(save_folder(model, tmp_path / "model")).model), logits_of(model))


def test_switched_off_window_is_no_obstacle(tmp_path: Path) -> None:
    model = random_model("qwen2", sliding_window=32, use_sliding_window=False)
    assert torch.equal(logits_of(load(save_folder(model, tmp_path / "model")).model), logits_of(model))


@pytest.mark.parametrize(
    ("changes", "named", "what_runs"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised .gptq", WEIGHTS_THAT_RUN),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral'", ROPE_TYPES_THAT_RUN),
        ({"model_type": "no_such_model"}, "no_such_model", FAMILIES_THAT_RUN),
        ({"model_type": "no_such_model", "auto_map": {"AutoConfig": "evil.Config"}}, "its repo", FAMILIES_THAT_RUN),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder", FAMILIES_THAT_RUN),
        ({"add_cross_attention": True}, "cross attention", FAMILIES_THAT_RUN),
        ({"model_type": "llava"}, "multimodal", FAMILIES_THAT_RUN),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, changes: dict[str, Any], named: str, what_runs: str) -> None:
    folder = save_folder(random_model("llama"), tmp_path / "model")
    (folder / "evil.py").write_text("raise SystemExit(9)\n")
    with pytest.raises(ConfigError, match=named) as caught:
        load(edited(folder, **changes))
    assert str(caught.value).endswith(f"which is not supported; {what_runs}.")


def test_weights_of_another_dtype_are_refused(tmp_path: Path) -> None:
    folder = save_folder(random_model("llama"), tmp_path / "model")
    rewritten(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].double()}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is stored as F64") as caught:
        load(folder)
    assert str(caught.value).endswith(f"which is not supported; {WEIGHTS_THAT_RUN}.")


def test_digest_follows_weights_and_configuration_not_places(tmp_path: Path) -> None:
    model = random_model("llama")
    first = load(save_folder(model, tmp_path / "a" / "model")).fingerprint
    assert load(save_folder(model, tmp_path / "b" / "other")).fingerprint == first
    changed = rewritten(save_folder(model, tmp_path / "c"), lambda tensors: tensors["model.norm.weight"][5:6].mul_(2))
    assert load(changed).fingerprint.weights_digest != first.weights_digest
    configured = load(edited(save_folder(model, tmp_path / "d"), rms_norm_eps=0.5)).fingerprint
    assert configured.weights_digest != first.weights_digest
    assert configured.rope_digest == first.rope_digest
    turned = {"rope_type": "default", "rope_theta": 500.0}
    assert load(edited(save_folder(model, tmp_path / "e"), rope_parameters=turned)).fingerprint.rope_digest != (
        first.rope_digest
    )


@pytest.mark.parametrize(
    ("family", "stored", "flags", "has_kernels", "expected"),
    [
        ("llama", torch.bfloat16, set(), False, "float32"),
        ("llama", torch.bfloat16, set(), True, "bfloat16"),
        ("gpt2", torch.bfloat16, set(), True, "bfloat16"),
        ("llama", torch.bfloat16, {"avx512_bf16"}, False, "bfloat16"),
        ("llama", torch.bfloat16, {"amx_bf16"}, False, "bfloat16"),
        ("llama", torch.float16, {"avx512_bf16"}, True, "float32"),
        ("llama", torch.float16, {"avx512_fp16"}, False, "float16"),
        ("llama", torch.float32, {"avx512_bf16"}, True, "float32"),
    ],
)
def test_auto_dtype(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    stored: torch.dtype,
    flags: set[str],
    has_kernels: bool,
    expected: str,
) -> None:
    folder = save_folder(random_model(family), tmp_path / "model", stored)
    monkeypatch.setattr(model_loader, "cpu_flags", lambda: flags)
    monkeypatch.setattr(model_loader, "load_library", lambda: object() if has_kernels else None)
    assert resolve_dtype(folder, "auto", "cpu") == expected
    assert resolve_dtype(folder, "auto", "cuda:0") == str(stored).removeprefix("torch.")
    assert resolve_dtype(folder, "bfloat16", "cpu") == "bfloat16"
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype(folder, "int8", "cpu")


def test_tokenizer_of_the_tests_fits_the_models() -> None:
    assert byte_level_tokenizer().get_vocab_size() == VOCABULARY
