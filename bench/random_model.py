"""Writes a GGUF file with random weights in the shape of a known model: `python -m bench.random_model NAME FILE`.

Speed depends on shapes and not on values, so engines can be compared at a size whose weights are not at hand. GGUF,
because every engine of `pdserve bench peers` takes that: llama.cpp as it is, the others as pdserve converts it.
"""

from __future__ import annotations

import argparse
import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel

END_OF_TEXT = "<|endoftext|>"
SPACE = "\u0120"
"""As byte-level vocabularies write it."""

_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model in the manner of Qwen 2: biases for queries, keys and values, and the embedding as output matrix."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int = 32768
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-6

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names as llama.cpp knows them, with rows first."""
        keys = self.hidden // self.heads * self.kv_heads
        yield "token_embd.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, outputs in (("attn_q", self.hidden), ("attn_k", keys), ("attn_v", keys)):
                yield f"blk.{layer}.{name}.weight", (outputs, self.hidden)
                yield f"blk.{layer}.{name}.bias", (outputs,)
            yield f"blk.{layer}.attn_output.weight", (self.hidden, self.hidden)
            yield f"blk.{layer}.ffn_gate.weight", (self.intermediate, self.hidden)
            yield f"blk.{layer}.ffn_up.weight", (self.intermediate, self.hidden)
            yield f"blk.{layer}.ffn_down.weight", (self.hidden, self.intermediate)
            yield f"blk.{layer}.attn_norm.weight", (self.hidden,)
            yield f"blk.{layer}.ffn_norm.weight", (self.hidden,)
        yield "output_norm.weight", (self.hidden,)


SHAPES = {
    "qwen2.5-0.5b": Shape(layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, vocabulary=151936),
    "qwen2.5-1.5b": Shape(layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, vocabulary=151936),
}


def write_model(shape: Shape, target: Path, *, seed: int = 0) -> None:
    """Write weights in bfloat16, vectors in float32, and a tokenizer; the same seed gives the same bytes."""
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, "qwen2", use_temp_file=True)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    tokens, merges = vocabulary(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token == END_OF_TEXT else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index(END_OF_TEXT))
    draw = np.random.default_rng(seed)
    for name, size in shape.tensors():
        if name.endswith("norm.weight"):
            writer.add_tensor(name, np.ones(size, np.float32))
            continue
        values = draw.standard_normal(size, np.float32) * np.float32(_DEVIATION)
        kind = GGMLQuantizationType.BF16 if len(size) > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: every byte, one control token, then longer and longer strings of letters.

    Any answer is then plain text, and any number of tokens can be asked for as text.
    """
    tokens, merges = [*sorted(ByteLevel.alphabet()), END_OF_TEXT], list[str]()
    starts = [*string.ascii_letters, SPACE]
    while len(tokens) < size:
        longer = list(itertools.islice(itertools.product(starts, string.ascii_letters), size - len(tokens)))
        merges += [f"{start} {letter}" for start, letter in longer]
        starts = [start + letter for start, letter in longer]
        tokens += starts
    return tokens, merges


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description="Write a GGUF file with random weights in the shape of a known model.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_model(SHAPES[arguments.name], arguments.file, seed=arguments.seed)


if __name__ == "__main__":
    main()
