"""Builds a tiny random llama with a byte-level tokenizer in a folder, so that tests need no download."""

from __future__ import annotations

import json
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the other one",
    "a block holds the keys and values of sixteen tokens; a sequence holds blocks",
    "prefill computes the prompt and decode computes the answer, one token at a time",
)


def build_tiny_model(
    folder: Path,
    *,
    vocab_size: int = 320,
    num_layers: int = 2,
    hidden_size: int = 72,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    max_position: int = 2048,
    tie_word_embeddings: bool = True,
    seed: int = 0,
) -> Path:
    """Write config, tokenizer, ChatML template and float32 safetensors to `folder`.

    The same arguments give the same bytes. The weights are random, but wide enough that greedy output varies with the
    prompt. End of text (id 0) and end of message (id 2) both stop a generation. The smallest vocabulary is 259: three
    specials and every byte.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder, vocab_size)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=0)
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> int:
    """Train and write the tokenizer alone, without torch; return how many ids it really has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, IM_START, IM_END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    size: int = tokenizer.get_vocab_size()
    return size
