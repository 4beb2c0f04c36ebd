"""Lets a loaded model compute its products by the compiled CPU kernels, and everything between them in float32.

Weights stay where they are, in the dtype they have. Nothing here knows families: a parameter of two dimensions or more
is multiplied with, whatever module holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from engine.available_memory import available_bytes
from kernels.cpu_library import CpuLibrary
from kernels.cpu_weights import cpu_weight


def compile_weights(model: Any, library: CpuLibrary, *, num_threads: int) -> Callable[[], None]:
    """Change the parameters of a transformers model, for inference.

    Matrices become CpuWeights over the same memory, except that those which a model multiplies from the left (GPT-2's
    and gpt-oss's) are copied, since the kernels read the other order. Vectors become float32.

    Args:
        model: on the CPU.
        library: the compiled kernels.
        num_threads: that share a product, the caller included.

    Returns:
        What takes the change back.

    Raises:
        ValueError: a weight's dtype is not supported, or there is no memory for the copies; nothing was changed.
    """
    before = list(_parameters(model))
    copied = sum(parameter.nbytes for module, _, parameter in before if _is_turned(module, parameter))
    if copied > (available := available_bytes()):
        raise ValueError(f"a copy of {copied} bytes of weights does not fit into {available} bytes of memory")
    changed: dict[int, torch.nn.Parameter] = {}  # by the identity of the old one: tied weights stay tied
    for module, _, parameter in before:
        if id(parameter) not in changed:
            changed[id(parameter)] = _compiled(module, parameter, library, num_threads)
    experts = model.get_experts_implementation()
    for module, name, parameter in before:
        module._parameters[name] = changed[id(parameter)]
    # One product for each expert, instead of one whose bits depend on how many tokens all of them have.
    model.set_experts_implementation("eager")

    def take_back() -> None:
        for module, name, parameter in before:
            module._parameters[name] = parameter
        model.set_experts_implementation(experts)

    return take_back


def _parameters(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def _is_turned(module: torch.nn.Module, parameter: torch.nn.Parameter) -> bool:
    """Whether it is multiplied from the left. What gpt-oss calls so is its experts; its biases are [experts, rows]."""
    if isinstance(module, Conv1D):
        return parameter.ndim == 2
    return parameter.ndim == 3 and bool(getattr(module, "is_transposed", False))


def _compiled(
    module: torch.nn.Module, parameter: torch.nn.Parameter, library: CpuLibrary, num_threads: int
) -> torch.nn.Parameter:
    data = parameter.data
    if data.ndim < 2:
        return torch.nn.Parameter(data.float(), requires_grad=False)
    if _is_turned(module, parameter):
        data = data.transpose(-1, -2).contiguous().transpose(-1, -2)
    return torch.nn.Parameter(cpu_weight(library, data, num_threads=num_threads), requires_grad=False)
