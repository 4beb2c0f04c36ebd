"""What tests of kernels share: the compiled library, and the state that interpreted kernels run in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu_library import CpuLibrary, load_library


@pytest.fixture(scope="session")
def library() -> CpuLibrary:
    loaded = load_library()
    if loaded is None:
        pytest.skip("the CPU kernels were not compiled for this processor")
    return loaded


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Triton kernels are interpreted, and what torch leaves uninitialised is NaN or the largest integer."""
    from tests.kernels.triton_interpreter import interpreted  # Triton is not for every test of kernels

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with interpreted():
        yield
    torch.use_deterministic_algorithms(False)
