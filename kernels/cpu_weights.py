"""Weights whose products are computed by the compiled CPU kernels, whatever code of a model asks for them.

A CpuWeight is a tensor over the memory of another one. Where torch is asked for a product with it (`linear`, `@`,
`addmm`) or for rows of it (`embedding`), the result is float32, and a row of it has the same bits whatever other rows
are computed beside it. So 16 bits are where weights lie, and nothing between products is rounded to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional

from kernels.cpu_library import ELEMENT_TYPES, CpuLibrary
from kernels.cpu_operations import product


class CpuWeight(torch.Tensor):
    """`[..., rows, depth]`, or `[..., depth, rows]` where it is multiplied from the left. Made by `cpu_weight`."""

    library: CpuLibrary
    num_threads: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of `func`."""
        own = _OWN.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            result = None if own is None else own(*args, **(kwargs or {}))
            if result is None:
                result = func(*args, **(kwargs or {}))
                if func in _STILL_WEIGHTS:
                    return _like(result, args[0])
        return result


def cpu_weight(library: CpuLibrary, weight: torch.Tensor, *, num_threads: int) -> CpuWeight:
    """A CpuWeight over the memory of `weight`.

    Raises:
        ValueError: its dtype is not supported.
    """
    if weight.dtype not in ELEMENT_TYPES:
        raise ValueError(f"weights of {weight.dtype} are not supported")
    view = weight.detach().as_subclass(CpuWeight)
    view.library, view.num_threads = library, num_threads
    return view


def _like(tensor: torch.Tensor, weight: CpuWeight) -> CpuWeight:
    view = tensor.as_subclass(CpuWeight)
    view.library, view.num_threads = weight.library, weight.num_threads
    return view


def _linear(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if not isinstance(weight, CpuWeight) or weight.ndim != 2 or not weight.is_contiguous():
        return None
    rows = product(
        weight.library,
        tokens.float().reshape(-1, tokens.shape[-1]),
        weight,
        None if bias is None else bias.float().contiguous(),
        num_threads=weight.num_threads,
    )
    return rows.view(*tokens.shape[:-1], weight.shape[0])


def _matmul(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(weight, CpuWeight) or weight.ndim != 2 or not weight.t().is_contiguous():
        return None
    return _linear(tokens, _like(weight.t(), weight))


def _addmm(bias: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(weight, CpuWeight) or weight.ndim != 2 or not weight.t().is_contiguous() or bias.ndim != 1:
        return None
    return _linear(tokens, _like(weight.t(), weight), bias)


def _embedding(ids: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return functional.embedding(ids, weight, *args, **kwargs).float()


_OWN: dict[Any, Callable[..., torch.Tensor | None]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    functional.embedding: _embedding,
}
_STILL_WEIGHTS = {
    torch.Tensor.__getitem__,
    torch.Tensor.detach,
    torch.Tensor.t,
    torch.Tensor.to,
    torch.Tensor.transpose,
    torch.Tensor.type,
}
