"""Finds the compiled CPU kernels that this processor can run, and loads them. Knows no models.

The same C++ sources (`kernels/cpu/`) are compiled at install for several instruction sets, one library each, where a
compiler is. Without one, or with `PDSERVE_CPU_KERNELS=off`, there is none, and callers take their path through torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from kernels.cpu_variants import VARIANTS

logger = logging.getLogger(__name__)

SETTING = "PDSERVE_CPU_KERNELS"
"""Environment variable: `auto`, `off`, or the name of a variant."""

INTERFACE_VERSION = 3
"""Must equal kInterfaceVersion of kernels/cpu/interface.h."""

_STATUS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "no memory for the CPU kernels to work in"),
    2: (ValueError, "a token, position, slot or block is out of range"),
}
"""What the functions answer, besides 0 for success."""

_SELF_TEST = (
    "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); "
    "sys.exit(0 if library.pdserve_prepare() and library.pdserve_self_test() == 0 else 1)"
)

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class CpuLibrary:
    """A loaded library; kernels/cpu/interface.h describes the functions. They release Python's lock while they compute.

    Attributes:
        name: of its variant.
    """

    decoder_create: Callable[..., int | None]
    decoder_destroy: Callable[..., None]
    decoder_forward: Callable[..., int]
    attention: Callable[..., int]
    product: Callable[..., int]
    choose_tokens: Callable[..., int]
    rank_tokens: Callable[..., int]

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        library = ctypes.CDLL(str(path))
        version = library.pdserve_interface_version
        version.restype = ctypes.c_int64
        if (found := version()) != INTERFACE_VERSION:
            raise OSError(f"{path.name} has interface version {found}, not {INTERFACE_VERSION}; install again")
        if not library.pdserve_prepare():
            raise OSError(f"the system does not let this process use what {path.name} needs")
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for name, result, *arguments in (
            ("decoder_create", pointer, pointer, pointer, number),
            ("decoder_destroy", None, pointer),
            ("decoder_forward", number, pointer, pointer),
            ("attention", number, pointer, number),
            ("product", number, pointer, number),
            ("choose_tokens", number, pointer, number, number, number),
            ("rank_tokens", number, pointer, number, number, number),
        ):
            function = getattr(library, f"pdserve_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


def check_status(status: int) -> None:
    """Raise what an answer of the library means."""
    if status != 0:
        kind, words = _STATUS[status]
        raise kind(words)


def cpu_flags() -> frozenset[str]:
    """What the kernel says the processor can do; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(
        word for name, _, value in lines if name.strip() in ("flags", "Features") for word in value.split()
    )


def library_path(name: str) -> Path | None:
    """The compiled file of a variant."""
    return next(iter(sorted(Path(__file__).parent.glob(f"_cpu_{name}.*so"))), None)


def passes_self_test(path: Path) -> bool:
    """Whether the library computes rightly here, found out in a process that may die of it."""
    if not sys.executable:
        return False
    command = [sys.executable, "-I", "-S", "-c", _SELF_TEST, str(path)]
    try:
        return subprocess.run(command, capture_output=True, timeout=60.0).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@cache
def load_library() -> CpuLibrary | None:
    """The best library that was compiled and can run here, loaded once; None where there is none.

    Raises:
        ValueError: PDSERVE_CPU_KERNELS names no variant.
    """
    setting = os.environ.get(SETTING, "auto")
    names = [variant.name for variant in VARIANTS]
    if setting not in ("auto", "off", *names):
        raise ValueError(f"{SETTING} must be auto, off or one of {', '.join(names)}, not {setting!r}")
    library, reason = _find(setting)
    logger.info("cpu_kernels variant=%s reason=%s", library.name if library else "torch", reason)
    return library


def _find(setting: str) -> tuple[CpuLibrary | None, str]:
    if setting == "off":
        return None, "switched_off"
    flags = cpu_flags()
    reason = "not_compiled_for_this_processor"
    for variant in VARIANTS:
        if setting not in ("auto", variant.name):
            continue
        if platform.machine().lower() not in variant.machines or not variant.cpu_flags <= flags:
            continue
        path = library_path(variant.name)
        if path is None:
            continue
        if not passes_self_test(path):
            logger.warning("cpu_kernels_not_loaded file=%s error=failed_self_test", path.name)
            reason = "failed_self_test"
            continue
        try:
            return CpuLibrary(variant.name, path), "best_of_this_processor" if setting == "auto" else "asked_for"
        except (OSError, AttributeError) as error:
            logger.warning("cpu_kernels_not_loaded file=%s error=%s", path.name, error)
            reason = "not_loadable"
    return None, reason
