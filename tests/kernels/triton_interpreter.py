"""Loads the Triton kernels so that they run under Triton's interpreter, on the CPU, beside other tests.

The interpreter is chosen when a kernel is defined, and Triton is there already when some other test has imported
transformers. So its own library of device functions and our kernel modules are defined anew, with the switch on. No
environment variable is set: processes that other tests start see nothing of it.

The interpreter keeps bfloat16 as 16-bit integers, multiplies matrices of them as integers, and drops the carry when it
rounds to them; both are mended here, to what a GPU does.
"""

from __future__ import annotations

import importlib
import math
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import standard
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


def _mended_convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source == tl.float32 and target == tl.bfloat16:
        floats = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        return floats.to(torch.bfloat16).view(torch.uint16).numpy()
    result: np.ndarray = _convert_float(data, source, target, rounding)
    return result


def _mended_dot(builder: Any, left: Any, right: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    product = np.matmul(_widened(left), _widened(right), dtype=total.data.dtype)
    return interpreter.TensorHandle(product + total.data, total.dtype.scalar)


def dot_row_by_row(builder: Any, left: Any, right: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    """A slower product in which, as on a GPU, the bits of a row do not depend on which row of the tile it is."""
    product = np.einsum("mk,kn->mn", _widened(left), _widened(right), dtype=total.data.dtype)
    return interpreter.TensorHandle(product + total.data, total.dtype.scalar)


def _widened(handle: Any) -> np.ndarray:
    data: np.ndarray = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32) if data.dtype == np.float16 else data  # else numpy multiplies without BLAS


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels defined or run inside are interpreted."""
    with triton.knobs.runtime.scope(), pytest.MonkeyPatch.context() as patch:
        triton.knobs.runtime.interpret = True
        patch.setattr(interpreter, "_convert_float", _mended_convert_float)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _mended_dot)
        yield


def sparse(*shape: int, dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """Zeros that take address space only, with as much before them as a 32-bit offset can reach by mistake."""
    if stride is None:
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python names later than 3.11
    before = 2**31 * 8  # of the widest
    size = before + elements * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype, offset=before).as_strided(shape, stride)


def results_are_sparse(patch: pytest.MonkeyPatch) -> None:
    """What `new_empty` makes takes address space only."""

    new_empty = torch.Tensor.new_empty

    def new_sparse(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        if shape == (0,):  # what the interpreter makes views with
            return new_empty(like, *shape, dtype=dtype, **options)
        return sparse(*shape, dtype=dtype or like.dtype)

    patch.setattr(torch.Tensor, "new_empty", new_sparse)


def only_last_programs_run(patch: pytest.MonkeyPatch, count: int = 1) -> None:
    """So many of each axis of a grid; they see the grid as it is."""
    run = interpreter.GridExecutor.__call__

    def run_last(executor: Any, *arguments: Any, **options: Any) -> None:
        whole = executor.grid + (1,) * (3 - len(executor.grid))
        executor.grid = tuple(min(size, count) for size in whole)

        def set_grid_idx(builder: Any, *place: int) -> None:
            builder.grid_dim = whole
            builder.grid_idx = tuple(
                size - shown + own for size, shown, own in zip(whole, executor.grid, place, strict=True)
            )

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(interpreter.InterpreterBuilder, "set_grid_idx", set_grid_idx)
            run(executor, *arguments, **options)

    patch.setattr(interpreter.GridExecutor, "__call__", run_last)


def load(name: str) -> ModuleType:
    """The kernel module `kernels.<name>`, interpreted."""
    with interpreted():
        if isinstance(tl.sum, triton.JITFunction):
            before = dict(vars(standard))
            importlib.reload(standard)
            for key, function in before.items():
                if isinstance(function, triton.JITFunction) and getattr(tl, key, None) is function:
                    setattr(tl, key, getattr(standard, key))
        module = sys.modules.get(f"kernels.{name}")
        if module is None:
            return importlib.import_module(f"kernels.{name}")
        kernels = [value for value in vars(module).values() if isinstance(value, triton.JITFunction)]
        return importlib.reload(module) if kernels else module
