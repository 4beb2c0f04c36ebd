"""Makes tiny random models, tokenizers and GGUF files for the tests of how models are found and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CORPUS = [
    "The quick brown fox jumps over 13 lazy dogs in 2024, doesn't it? I'll say so; they've left.",
    "def add(left, right):\n    total = left + right\n        return total\n\n\n# 3.14159 and 1000000\n",
    "Größe, naïve café; Москва и Санкт-Петербург; 東京は日本の首都です。 你好世界 العربية 123",
    "emoji 👍🏽 👨‍👩‍👧‍👦 🎉🎉 and   runs of   spaces\t\ttabs\r\nlines \n \n end",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 420
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_level_tokenizer(vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer trained on CORPUS with GPT-2's split; special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def random_model(model_type: str, **settings: Any) -> PreTrainedModel:
    """A random float32 model whose weights are exact in bfloat16, so that storing them loses nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**small, **settings}), attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn_like(parameter) * 0.2
            centre = 1.0 if parameter.ndim == 1 and not name.endswith("bias") else 0.0  # scales of norms, mostly
            parameter.copy_((spread + centre).to(torch.bfloat16).float())
    return model.float().eval()


def save_folder(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A Hugging Face folder of `model`, with a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = AutoModelForCausalLM.from_config(model.config).to(dtype)
    stored.load_state_dict(model.state_dict())
    stored.config.dtype = dtype
    stored.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def logits_of(model: torch.nn.Module, tokens: int = 40) -> torch.Tensor:
    """Logits [tokens, vocabulary] for a fixed input."""
    ids = torch.arange(tokens).remainder(VOCABULARY).mul(7).remainder(VOCABULARY)[None]
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0].float()


def write_gguf(path: Path, model: PreTrainedModel, architecture: str, *, pre: str = "gpt-2", **changes: Any) -> Path:
    """What llama.cpp's converter would write for `model`, with a trained tokenizer.

    Args:
        path: of the file.
        model: llama, qwen2 or qwen3.
        architecture: as GGUF names it.
        pre: tokenizer.ggml.pre.
        changes: `skip` leaves tensors out, `extra` adds tensors, `keys` adds (adder name, key, value),
            `float_type` is the dtype of matrices.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, pre)
    for adder, *arguments in changes.get("keys", ()):
        getattr(writer, adder)(*arguments)
    for name, tensor in model.state_dict().items():
        gguf_name = _gguf_name(name)
        if (name == "lm_head.weight" and config.tie_word_embeddings) or gguf_name in changes.get("skip", ()):
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = _permuted(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = _permuted(values, config.num_key_value_heads)
        _add_tensor(writer, gguf_name, values, changes.get("float_type", "F32"))
    for name, values in changes.get("extra", {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_metadata(pre: str) -> dict[str, Any]:
    """The trained tokenizer as a GGUF file tells it; its last token is user-defined."""
    tokenizer = byte_level_tokenizer(VOCABULARY - 1)
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    tokens = [by_id[token_id] for token_id in range(VOCABULARY - 1)] + ["<tool_call>"]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS) - 1) + [4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    for key, value in tokenizer_metadata(pre).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)


def _add_tensor(writer: GGUFWriter, name: str, values: numpy.ndarray, float_type: str) -> None:
    if values.ndim == 1 or float_type == "F32":
        writer.add_tensor(name, values)
    elif float_type == "F16":
        writer.add_tensor(name, values.astype(numpy.float16))
    else:
        from gguf import quantize

        kind = GGMLQuantizationType[float_type]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)


def _permuted(weights: numpy.ndarray, heads: int) -> numpy.ndarray:
    """llama.cpp's order of rows: pairs that rotate together lie side by side."""
    rows = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, rows, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _gguf_name(name: str) -> str:
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "lm_head": "output",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }.items():
        name = name.replace(ours, theirs)
    return name
