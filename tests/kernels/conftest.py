"""What tests of kernels share: the compiled library."""

from __future__ import annotations

import pytest

from kernels.cpu_library import CpuLibrary, load_library


@pytest.fixture(scope="session")
def library() -> CpuLibrary:
    loaded = load_library()
    if loaded is None:
        pytest.skip("the CPU kernels were not compiled for this processor")
    return loaded
