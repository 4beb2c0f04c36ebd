"""Loads the Triton kernels so that they run under Triton's interpreter, on the CPU, beside other tests.

The interpreter is chosen when a kernel is defined, and Triton is there already when some other test has imported
transformers. So its own library of device functions and our kernel modules are defined anew, with the switch on. No
environment variable is set: processes that other tests start see nothing of it.

The interpreter keeps bfloat16 as 16-bit integers, multiplies matrices of them as integers, and drops the carry when it
rounds to them; both are mended here, to what a GPU does.
"""

from __future__ import annotations

import importlib
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
    return data


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels defined or run inside are interpreted."""
    with triton.knobs.runtime.scope(), pytest.MonkeyPatch.context() as patch:
        triton.knobs.runtime.interpret = True
        patch.setattr(interpreter, "_convert_float", _mended_convert_float)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _mended_dot)
        yield


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
