"""A whole forward pass of a llama-like decoder in one call of the compiled CPU kernels.

The result of a row has the same bits whatever else is in the batch, in whichever chunks its sequence was computed, and
with any number of threads; see kernels/cpu/matmul.h and attention.h. Weights are used where they lie; products and
sums are in float32.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu_library import ELEMENT_TYPES, CpuLibrary, check_status


@dataclass(frozen=True, slots=True)
class Linear:
    """`[rows, depth]` weights in the decoder's dtype, and a bias or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer.

    Attributes:
        attention_norm: [hidden].
        query: [heads * head_dim, hidden].
        key: [kv_heads * head_dim, hidden].
        value: as key.
        output: [hidden, heads * head_dim].
        feed_forward_norm: [hidden].
        gate: [intermediate, hidden].
        up: as gate.
        down: [hidden, intermediate].
        query_norm: [head_dim], or None.
        key_norm: as query_norm.
        is_rotary: whether queries and keys are rotated by their positions.
        window: how many tokens back a query sees, itself included; None is all.
    """

    attention_norm: torch.Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    feed_forward_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    is_rotary: bool = True
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder.

    Attributes:
        layers: in order.
        embedding: [vocabulary, hidden].
        final_norm: [hidden].
        head: [vocabulary, hidden]; may be the embedding.
        cosines: [positions, head_dim / 2] float32.
        sines: as cosines.
        heads: query heads.
        norm_epsilon: of all norms.
        attention_scale: factor on scores.
        embedding_scale: factor on embeddings.
        residual_scale: factor on what a layer's two halves add.
        logits_scale: factor on logits.
    """

    layers: Sequence[LayerWeights]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: Linear
    cosines: torch.Tensor
    sines: torch.Tensor
    heads: int
    norm_epsilon: float
    attention_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "attention_norm", "query", "query_bias", "query_norm", "key", "key_bias", "key_norm", "value", "value_bias",
            "output", "output_bias", "feed_forward_norm", "gate", "gate_bias", "up", "up_bias", "down", "down_bias",
        )),
        ("is_rotary", ctypes.c_int64),
        ("window", ctypes.c_int64),
    )  # fmt: skip


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "weight_type",
            "kv_type", "block_size", "num_blocks", "num_positions",
        )),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "embedding", "final_norm", "head", "head_bias")),
        *((name, ctypes.c_float) for name in (
            "norm_epsilon", "attention_scale", "embedding_scale", "residual_scale", "logits_scale", "unused",
        )),
    )  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sequences", "num_logits", "table_stride")),
        *((name, ctypes.c_void_p) for name in (
            "token_ids", "positions", "slots", "query_starts", "context_lens", "block_tables", "logits_rows", "pool",
            "logits",
        )),
        ("layers_done", ctypes.POINTER(ctypes.c_int64)),
    )  # fmt: skip


class CpuDecoder:
    """Computes batches over one pool. For one thread at a time.

    Args:
        library: the compiled kernels.
        weights: float32 or bfloat16, contiguous, on the CPU; kept alive.
        pool: `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`, float32 or bfloat16; kept alive.
        num_threads: that share the work, the caller included.

    Raises:
        ValueError: shapes or dtypes do not fit, or are not supported.
    """

    def __init__(self, library: CpuLibrary, weights: DecoderWeights, pool: torch.Tensor, *, num_threads: int) -> None:
        num_blocks, num_layers, _, kv_heads, block_size, head_dim = pool.shape
        self.vocab_size, hidden = weights.embedding.shape
        intermediate = weights.layers[0].gate.weight.shape[0]
        dtype = weights.embedding.dtype
        if dtype not in ELEMENT_TYPES or pool.dtype not in ELEMENT_TYPES or not pool.is_contiguous():
            raise ValueError(f"weights of {dtype} and a pool of {pool.dtype} are not supported")
        if len(weights.layers) != num_layers:
            raise ValueError(f"{len(weights.layers)} layers do not fit a pool of {num_layers}")
        self._library = library
        self._pool = pool
        self._kept: list[torch.Tensor] = [pool]

        def matrix(tensor: torch.Tensor, rows: int, depth: int) -> int:
            if tensor.dtype != dtype or tensor.shape != (rows, depth) or not tensor.is_contiguous():
                raise ValueError(f"a weight is {tensor.dtype} {list(tensor.shape)}, not {dtype} {[rows, depth]}")
            self._kept.append(tensor)
            return tensor.data_ptr()

        def vector(tensor: torch.Tensor | None, *shape: int) -> int | None:
            """A float32 copy, where it is not float32 already."""
            if tensor is None:
                return None
            if tensor.shape != shape:
                raise ValueError(f"a vector is {list(tensor.shape)}, not {list(shape)}")
            self._kept.append(tensor.detach().float().contiguous())
            return self._kept[-1].data_ptr()

        queries, keys = weights.heads * head_dim, kv_heads * head_dim
        layers = (_Layer * num_layers)()
        for layer, given in zip(layers, weights.layers, strict=True):
            layer.attention_norm = vector(given.attention_norm, hidden)
            layer.feed_forward_norm = vector(given.feed_forward_norm, hidden)
            layer.query_norm = vector(given.query_norm, head_dim)
            layer.key_norm = vector(given.key_norm, head_dim)
            for name, rows, depth in (
                ("query", queries, hidden),
                ("key", keys, hidden),
                ("value", keys, hidden),
                ("output", hidden, queries),
                ("gate", intermediate, hidden),
                ("up", intermediate, hidden),
                ("down", hidden, intermediate),
            ):
                linear: Linear = getattr(given, name)
                setattr(layer, name, matrix(linear.weight, rows, depth))
                setattr(layer, f"{name}_bias", vector(linear.bias, rows))
            layer.is_rotary = given.is_rotary
            layer.window = given.window or 0
        num_positions = weights.cosines.shape[0]
        shape = _Shape(
            num_layers=num_layers,
            hidden=hidden,
            heads=weights.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocabulary=self.vocab_size,
            weight_type=ELEMENT_TYPES[dtype],
            kv_type=ELEMENT_TYPES[pool.dtype],
            block_size=block_size,
            num_blocks=num_blocks,
            num_positions=num_positions,
            cosines=vector(weights.cosines, num_positions, head_dim // 2),
            sines=vector(weights.sines, num_positions, head_dim // 2),
            embedding=matrix(weights.embedding, self.vocab_size, hidden),
            final_norm=vector(weights.final_norm, hidden),
            head=matrix(weights.head.weight, self.vocab_size, hidden),
            head_bias=vector(weights.head.bias, self.vocab_size),
            norm_epsilon=weights.norm_epsilon,
            attention_scale=weights.attention_scale,
            embedding_scale=weights.embedding_scale,
            residual_scale=weights.residual_scale,
            logits_scale=weights.logits_scale,
        )
        self._handle = library.decoder_create(ctypes.byref(shape), ctypes.byref(layers), num_threads)
        if self._handle is None:
            raise ValueError("the CPU kernels do not support this shape")
        weakref.finalize(self, library.decoder_destroy, self._handle)

    def run(
        self,
        *,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        logits_rows: torch.Tensor,
        layers_done: ctypes.c_int64 | None = None,
    ) -> torch.Tensor:
        """Compute a ragged batch; returns logits `[R, vocabulary]` float32.

        Args:
            token_ids: [T] int64, like all that follow; contiguous.
            positions: [T].
            slots: [T].
            query_starts: [S + 1].
            context_lens: [S].
            block_tables: [S, longest].
            logits_rows: [R].
            layers_done: counted up once a layer's K and V are in the pool.

        Raises:
            ValueError: a number is out of range; nothing was written.
            MemoryError: for lack of working memory; nothing was written.
        """
        logits = torch.empty(logits_rows.shape[0], self.vocab_size)
        batch = _Batch(
            token_ids.shape[0],
            context_lens.shape[0],
            logits_rows.shape[0],
            block_tables.shape[1],
            token_ids.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            block_tables.data_ptr(),
            logits_rows.data_ptr(),
            self._pool.data_ptr(),
            logits.data_ptr(),
            None if layers_done is None else ctypes.pointer(layers_done),
        )
        status = self._library.decoder_forward(self._handle, ctypes.byref(batch))
        check_status(status)
        return logits
