"""Recognises models of the common decoder shape, and runs them by the compiled CPU kernels over the same weights.

The shape: RMSNorm, rotary positions, grouped heads, SwiGLU. A model qualifies only when its class is known and every
module in it is of the expected class, with nothing added; everything else stays with transformers' own forward.
"""

from __future__ import annotations

import logging
from ctypes import c_int64
from typing import Any

import torch

from engine.forward_batch import ForwardBatch
from kernels.cpu_decoder import CpuDecoder, DecoderWeights, LayerWeights, Linear
from kernels.cpu_library import load_library

logger = logging.getLogger(__name__)

FAMILIES = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "SmolLM3ForCausalLM": "SmolLM3",
    "GraniteForCausalLM": "Granite",
}
"""Classes of transformers that may qualify, and what the names of their modules begin with."""

_POSITION_STEP = 4096
"""Positions whose rotations are computed at once."""


class _Different(Exception):
    """What keeps a model from qualifying."""


class LeanForward:
    """Computes what the model it was made from computes.

    Args:
        decoder: over the model's weights and the pool.
    """

    def __init__(self, decoder: CpuDecoder) -> None:
        self._decoder = decoder

    def run(self, batch: ForwardBatch, layers_done: c_int64 | None = None) -> torch.Tensor:
        """As ModelRunner.run."""
        return self._decoder.run(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            logits_rows=batch.logits_rows,
            layers_done=layers_done,
        )


def lean_forward_of(model: Any, pool: torch.Tensor, *, num_positions: int) -> LeanForward | None:
    """A lean forward of `model` over `pool`, or None where the model or the machine does not qualify.

    Args:
        model: transformers' causal language model, on the CPU.
        pool: `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`.
        num_positions: positions that will be asked for.
    """
    name = type(model).__name__
    library = load_library()
    if library is None:
        return None
    try:
        weights = _weights_of(model, num_positions)
        decoder = CpuDecoder(library, weights, pool, num_threads=torch.get_num_threads())
    except (_Different, ValueError, AttributeError) as error:
        logger.info("lean_forward_not_used class=%s reason=%s", name, error)
        return None
    return LeanForward(decoder)


def _weights_of(model: Any, num_positions: int) -> DecoderWeights:
    family = FAMILIES.get(type(model).__name__)
    if family is None:
        raise _Different("the model's class is not one of the common shape")
    config = model.config
    _expect(model, f"{family}ForCausalLM", {"model", "lm_head"})
    inner = model.model
    _expect(inner, f"{family}Model", {"embed_tokens", "layers", "norm", "rotary_emb"})
    if getattr(config, "hidden_act", None) != "silu":
        raise _Different("its activation is not silu")
    norms = [inner.norm]
    layers = [_layer_of(layer, family, norms) for layer in inner.layers]
    embedding = inner.embed_tokens
    _expect(embedding, "Embedding", set())
    if embedding.max_norm is not None:
        raise _Different("its embedding is normalised")
    epsilons = {norm.variance_epsilon for norm in norms}
    scales = {layer.self_attn.scaling for layer in inner.layers}
    if len(epsilons) != 1 or len(scales) != 1:
        raise _Different("its layers differ in epsilon or scale")
    is_granite = family == "Granite"
    cosines, sines = _rotations(inner.rotary_emb, family, num_positions)
    return DecoderWeights(
        layers=layers,
        embedding=embedding.weight,
        final_norm=_norm_of(inner.norm, family),
        head=_linear_of(model.lm_head),
        cosines=cosines,
        sines=sines,
        heads=config.num_attention_heads,
        norm_epsilon=epsilons.pop(),
        attention_scale=scales.pop(),
        embedding_scale=config.embedding_multiplier if is_granite else 1.0,
        residual_scale=config.residual_multiplier if is_granite else 1.0,
        logits_scale=1.0 / config.logits_scaling if is_granite else 1.0,
    )


def _layer_of(layer: Any, family: str, norms: list[Any]) -> LayerWeights:
    _expect(layer, f"{family}DecoderLayer", {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = family == "Qwen3"
    names = {"q_proj", "k_proj", "v_proj", "o_proj"}
    _expect(attention, f"{family}Attention", names | {"q_norm", "k_norm"} if has_head_norms else names)
    _expect(mlp, f"{family}MLP", {"gate_proj", "up_proj", "down_proj", "act_fn"})
    norms += [layer.input_layernorm, layer.post_attention_layernorm]
    if has_head_norms:
        norms += [attention.q_norm, attention.k_norm]
    # Mistral reads its window from the configuration at each call.
    window = attention.config.sliding_window if family == "Mistral" else getattr(attention, "sliding_window", None)
    return LayerWeights(
        attention_norm=_norm_of(layer.input_layernorm, family),
        query=_linear_of(attention.q_proj),
        key=_linear_of(attention.k_proj),
        value=_linear_of(attention.v_proj),
        output=_linear_of(attention.o_proj),
        feed_forward_norm=_norm_of(layer.post_attention_layernorm, family),
        gate=_linear_of(mlp.gate_proj),
        up=_linear_of(mlp.up_proj),
        down=_linear_of(mlp.down_proj),
        query_norm=_norm_of(attention.q_norm, family) if has_head_norms else None,
        key_norm=_norm_of(attention.k_norm, family) if has_head_norms else None,
        is_rotary=bool(getattr(attention, "use_rope", True)),
        window=window,
    )


def _expect(module: Any, class_name: str, children: set[str]) -> None:
    """The module is of that class, has these submodules and no others, and no hooks."""
    if type(module).__name__ != class_name:
        raise _Different(f"{type(module).__name__} stands where {class_name} was expected")
    if (found := set(dict(module.named_children()))) != children:
        raise _Different(f"{class_name} has {', '.join(sorted(found ^ children))} more or less")
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        raise _Different(f"{class_name} has hooks")


def _linear_of(module: Any) -> Linear:
    _expect(module, "Linear", set())
    return Linear(module.weight, module.bias)


def _norm_of(module: Any, family: str) -> torch.Tensor:
    _expect(module, f"{family}RMSNorm", set())
    weight: torch.Tensor = module.weight
    return weight


def _rotations(module: Any, family: str, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[num_positions, head_dim / 2]` float32, by the model's own module."""
    _expect(module, f"{family}RotaryEmbedding", set())
    cosines: list[torch.Tensor] = []
    sines: list[torch.Tensor] = []
    like = torch.empty(0)
    with torch.inference_mode():
        for first in range(0, num_positions, _POSITION_STEP):
            positions = torch.arange(first, min(first + _POSITION_STEP, num_positions))[None]
            both = module(like, positions)  # two of [1, positions, head_dim], whose halves are equal
            for parts, part in zip((cosines, sines), both, strict=True):
                half = part.shape[-1] // 2
                if not torch.equal(part[..., :half], part[..., half:]):
                    raise _Different("its rotations are not by halves")
                parts.append(part[0, :, :half])
    return torch.cat(cosines), torch.cat(sines)
