"""Puts fused Triton kernels into a loaded model of the common decoder shape, for transformers' element-wise code.

Modules are recognised by what they are made of, and anything else stays as it is: RMSNorm, SiLU times up in an MLP with
gate and up projections (whose two products become one), and the rotary embedding with halves of a head as pairs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from kernels import triton_elementwise

_FAMILIES = (
    "Arcee",
    "Exaone4",
    "Granite",
    "GraniteMoe",
    "HunYuanDenseV1",
    "Llama",
    "Ministral",
    "Mistral",
    "Mixtral",
    "Olmoe",
    "Phi3",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "SeedOss",
    "SmolLM3",
)
"""Whose RMSNorm rounds before the weight, and whose rotary embedding turns halves of a head or of its first part."""

_ROTARY = "apply_rotary_pos_emb"


def fuse(model: torch.nn.Module) -> int:
    """Change the modules of this model, for inference; returns how many were changed. Other models stay as they are."""
    norms = {f"{family}RMSNorm" for family in _FAMILIES}
    mlps = {f"{family}MLP" for family in _FAMILIES}
    attentions = {f"{family}Attention" for family in _FAMILIES}
    changed = 0
    for module in model.modules():
        name = type(module).__name__
        if name in norms:
            module.forward = MethodType(_rms_norm, module)
            changed += 1
        elif name in mlps and _is_gated_silu(module):
            _join_gate_and_up(module)
            module.forward = MethodType(_gated_silu, module)
            changed += 1
        elif name in attentions:
            changed += _fuse_rotary(module)
    return changed


def _rms_norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    output, _ = triton_elementwise.rms_norm(rows, module.weight, epsilon=module.variance_epsilon)
    return output.view(hidden_states.shape)


def _is_gated_silu(module: Any) -> bool:
    projections: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(projection) is not torch.nn.Linear for projection in projections):
        return False
    activation = type(getattr(module, "act_fn", None)).__name__
    return activation in ("SiLU", "SiLUActivation") and all(projection.bias is None for projection in projections[:2])


def _join_gate_and_up(module: Any) -> None:
    """One weight [2 * width, hidden] instead of two; the two become views of it, so that no memory is held twice."""
    width = module.gate_proj.weight.shape[0]
    joined = torch.cat([module.gate_proj.weight.data, module.up_proj.weight.data])
    module.gate_proj.weight.data, module.up_proj.weight.data = joined[:width], joined[width:]
    module.gate_up_weight = joined


def _gated_silu(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    both = torch.nn.functional.linear(hidden_states, module.gate_up_weight)
    rows = both.view(-1, both.shape[-1])
    width = rows.shape[1] // 2
    activated = triton_elementwise.silu_mul(rows[:, :width], rows[:, width:])
    output: torch.Tensor = module.down_proj(activated.view(*both.shape[:-1], width))
    return output


def _fuse_rotary(module: Any) -> bool:
    """Give this one module a copy of its forward in which the name of the rotary function means ours."""
    forward = inspect.unwrap(type(module).forward)
    if _ROTARY not in forward.__code__.co_names:
        return False
    names = {**forward.__globals__, _ROTARY: _rotary_or(forward.__globals__[_ROTARY])}
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copied, module)
    return True


def _rotary_or(original: Callable[..., Any]) -> Callable[..., Any]:
    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if args or kwargs or q.shape[0] != 1 or cos.shape[-1] != q.shape[-1]:
            result: tuple[torch.Tensor, torch.Tensor] = original(q, k, cos, sin, *args, **kwargs)
            return result
        # In place: queries and keys are fresh results of their projections.
        triton_elementwise.rotary(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return q, k

    return rotary
