"""Bytes that must move and floating-point operations that must be done: for one operation, and for a forward pass.

These are least amounts: each weight and each cached key and value read once, results written once, nothing kept in
between. Measured times are compared with them, so what an implementation moves beyond them shows as a lower share of
the limit. Knows no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.kv_layout import DTYPE_BYTES
from engine.safetensors_file import read_entries, weight_files

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Cost:
    """What an operation cannot do without; costs add up."""

    num_bytes: float
    flops: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.num_bytes * times, self.flops * times)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte."""
        return self.flops / self.num_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a decoder's architecture decides its costs.

    Attributes:
        num_layers: attention layers.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: elements of a head.
        hidden: elements of a hidden state.
        intermediate: elements between the matrices of the feed-forward part.
        vocab: rows of the output matrix.
        layer_weights: elements of all matrices of all layers, experts included.
    """

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    layer_weights: int

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """From a checkpoint folder in Hugging Face style; ConfigError naming what its config.json lacks."""
        try:
            return cls._read(folder)
        except KeyError as error:
            raise ConfigError(
                f"{folder / 'config.json'} does not tell {error}, without which costs are unknown"
            ) from error

    @classmethod
    def _read(cls, folder: Path) -> ModelShape:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        matrices = {
            entry.name: entry.shape
            for file in weight_files(folder)
            for entry in read_entries(file)
            if len(entry.shape) > 1
        }
        outside = {_HEAD} | {name for name in matrices if "embed" in name or ".wte." in name or ".wpe." in name}
        return cls(
            num_layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            layer_weights=sum(math.prod(shape) for name, shape in matrices.items() if name not in outside),
        )

    @property
    def read_weights(self) -> int:
        """Elements that one forward pass reads: the layers and the output matrix."""
        return self.layer_weights + self.vocab * self.hidden


def linear(tokens: int, inputs: int, outputs: int, dtype: str) -> Cost:
    """`[tokens, inputs] @ [inputs, outputs]`."""
    elements = inputs * outputs + tokens * (inputs + outputs)
    return Cost(elements * DTYPE_BYTES[dtype], 2.0 * tokens * inputs * outputs)


def attention(shape: ModelShape, slices: Sequence[tuple[int, int]], dtype: str) -> Cost:
    """Causal attention of one layer.

    Args:
        shape: of the model.
        slices: of each sequence how many tokens it computes and how many it has in the cache afterwards.
        dtype: of the cache and of the queries.
    """
    # The last query of a slice sees the whole context, the one before it one key less, and so on.
    pairs = sum(new * context - new * (new - 1) // 2 for new, context in slices)
    cached = 2 * shape.kv_heads * sum(context for _, context in slices)
    queries = 2 * shape.heads * sum(new for new, _ in slices)  # read once, and as many results written
    return Cost((cached + queries) * shape.head_dim * DTYPE_BYTES[dtype], 4.0 * shape.heads * shape.head_dim * pairs)


def write_kv(shape: ModelShape, tokens: int, dtype: str) -> Cost:
    """Keys and values of one layer, read where they were made and written to their slots."""
    return Cost(2.0 * 2 * shape.kv_heads * shape.head_dim * tokens * DTYPE_BYTES[dtype], 0.0)


def elementwise(elements: int, *, reads: int, flops: int, dtype: str) -> Cost:
    """One pass over `elements` that reads `reads` tensors of that size, writes one and does `flops` per element."""
    return Cost(float((reads + 1) * elements * DTYPE_BYTES[dtype]), float(flops * elements))


def forward_pass(shape: ModelShape, slices: Sequence[tuple[int, int]], logits_rows: int, dtype: str) -> Cost:
    """Matrices and attention of a step, every weight read once.

    What lies between the matrices is left out: it is small, and fits the caches. Of a mixture of experts all experts
    count, which is right for large batches only.

    Args:
        shape: of the model.
        slices: as for `attention`.
        logits_rows: rows of logits that are computed.
        dtype: of weights and cache.
    """
    tokens = sum(new for new, _ in slices)
    flops = 2.0 * (shape.layer_weights * tokens + shape.vocab * shape.hidden * logits_rows)
    weights = Cost(float(shape.read_weights * DTYPE_BYTES[dtype]), flops)
    return weights + attention(shape, slices, dtype) * shape.num_layers
