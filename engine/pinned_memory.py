"""Host memory that a GPU copies from and to directly, of exactly the size asked for.

torch's own pinned allocations are rounded up to a power of two, which for most of a host's memory is too much.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch

from engine.errors import ConfigError

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""


class PinnedMemory:
    """Zeroed and page-locked as long as this lives. Call with the device current.

    Args:
        num_bytes: more than 0; all of it is taken from the machine at once.

    Attributes:
        view: its bytes. Views of it may outlive this: then they are ordinary memory.

    Raises:
        ConfigError: the system does not let so much be pinned.
    """

    def __init__(self, num_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, num_bytes))
        address = torch.frombuffer(self.view, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
        if status != runtime.cudaError.success:
            raise ConfigError(
                f"{num_bytes} bytes of host memory cannot be pinned as the mirror of the KV pool "
                f"({runtime.cudaGetErrorString(status)}): choose a smaller pool"
            )
        weakref.finalize(self, _release, runtime, address, self.view)


def _release(runtime: Any, address: int, view: memoryview) -> None:
    # Takes the view so that the memory is still mapped. At the end of a process it does not matter what is answered.
    runtime.cudaHostUnregister(address)
