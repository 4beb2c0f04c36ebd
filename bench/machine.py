"""What this machine is, and what it can do at best: read bandwidth, matrix-vector bandwidth, matmul rate.

Limits are the best of several tries, since whatever else runs on the machine only ever makes a try slower. They belong
to one number of threads and to the minute in which they were measured: compare with them only figures of the same run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as functional

from engine.kv_layout import DTYPE_BYTES
from kernels import cpu_operations
from kernels.cpu_library import ELEMENT_TYPES, load_library

MATMUL_SIZE = 2048
WEIGHTS_BYTES = 256 * 1024 * 1024
"""What bandwidth is measured over unless a model says otherwise: well beyond any cache."""

_MATVEC_COLUMNS = 2048
_TELLING_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")


@dataclass(frozen=True, slots=True)
class Machine:
    """Which machine it is, as far as figures depend on it.

    Attributes:
        kind: of the processor.
        cores: that this process may use.
        features: instruction sets that decide speeds.
        torch: its version.
    """

    kind: str
    cores: int
    features: tuple[str, ...]
    torch: str

    def __str__(self) -> str:
        return (
            f"{self.kind}, {self.cores} cores, {' '.join(self.features) or 'no known extensions'}, torch {self.torch}"
        )


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The best that was seen.

    Attributes:
        threads: of torch, while measuring.
        read_gb_per_s: reading memory of the size of the weights.
        matvec_gb_per_s: by dtype, a matrix-vector product over as much memory.
        matmul_gflop_per_s: by dtype, a product of two square matrices of that dtype or of float32, which can stand in
            for a narrower one: where a processor has no instructions for bfloat16, float32 is what it can do.
    """

    threads: int
    read_gb_per_s: float
    matvec_gb_per_s: dict[str, float]
    matmul_gflop_per_s: dict[str, float]

    def best(self, other: MachineLimits) -> MachineLimits:
        """The better of two measurements, each figure by itself."""
        return MachineLimits(
            self.threads,
            max(self.read_gb_per_s, other.read_gb_per_s),
            {dtype: max(rate, other.matvec_gb_per_s[dtype]) for dtype, rate in self.matvec_gb_per_s.items()},
            {dtype: max(rate, other.matmul_gflop_per_s[dtype]) for dtype, rate in self.matmul_gflop_per_s.items()},
        )

    def balance(self, dtype: str) -> float:
        """FLOPs per byte at which arithmetic and reading take equally long."""
        return self.matmul_gflop_per_s[dtype] / self.read_gb_per_s

    def seconds(self, num_bytes: float, flops: float, dtype: str) -> float:
        """The least time that this takes here: whichever of the two limits binds."""
        return max(num_bytes / self.read_gb_per_s, flops / self.matmul_gflop_per_s[dtype]) / 1e9


def describe_machine() -> Machine:
    """This machine."""
    kind, flags = platform.processor() or platform.machine(), set[str]()
    with contextlib.suppress(OSError):  # Elsewhere than on Linux the architecture must do.
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            match name.strip():
                case "model name":
                    kind = value.strip()
                case "flags" | "Features":
                    flags |= set(value.split())
    features = tuple(feature for feature in _TELLING_FEATURES if feature in flags)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(kind, cores, features, torch.__version__)


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Use this many threads of torch for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_seconds(call: Callable[[], object], repeats: int, *, enough_s: float = 2.0) -> float:
    """The shortest of `repeats` calls and one to warm up; no further call starts once they took `enough_s` together."""
    seconds: list[float] = []
    while not seconds or (len(seconds) <= repeats and sum(seconds) < enough_s):
        started_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)


@torch.inference_mode()
def measure_limits(
    threads: int,
    *,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    weights_bytes: int = WEIGHTS_BYTES,
    matmul_size: int = MATMUL_SIZE,
    repeats: int = 10,
) -> MachineLimits:
    """Measure with this many threads. Products are torch's or the compiled kernels', whichever is faster.

    Args:
        threads: that compute.
        dtypes: for which products are measured.
        weights_bytes: memory that is read.
        matmul_size: rows and columns of the square matrices; smaller ones are tried, too.
        repeats: tries, of which the best counts.
    """
    with torch_threads(threads):
        matvec = {dtype: _matvec_gb_per_s(dtype, weights_bytes, repeats) for dtype in dtypes}
        return MachineLimits(
            threads=threads,
            # A product shows what can be read, too.
            read_gb_per_s=max(_read_gb_per_s(weights_bytes, repeats), *matvec.values()),
            matvec_gb_per_s=matvec,
            matmul_gflop_per_s={dtype: _matmul_gflop_per_s(dtype, matmul_size, repeats) for dtype in dtypes},
        )


def _read_gb_per_s(num_bytes: int, repeats: int) -> float:
    # Two readers, because torch spreads only some of its loops over threads; both read each byte once.
    words = torch.ones(num_bytes // 4)
    half = words.numel() // 2
    readers: list[Callable[[], object]] = [words.sum, lambda: torch.dot(words[:half], words[half : 2 * half])]
    return num_bytes / min(best_seconds(reader, repeats) for reader in readers) / 1e9


def _matvec_gb_per_s(dtype: str, num_bytes: int, repeats: int) -> float:
    rows = max(1, num_bytes // (_MATVEC_COLUMNS * DTYPE_BYTES[dtype]))
    matrix = torch.full((rows, _MATVEC_COLUMNS), 0.5, dtype=getattr(torch, dtype))
    vector = matrix[:1].clone()
    return matrix.nbytes / min(best_seconds(partial(way, vector, matrix), repeats) for way in _ways(dtype)) / 1e9


def _matmul_gflop_per_s(dtype: str, size: int, repeats: int) -> float:
    best, ways = 0.0, [(kind, way) for kind in dict.fromkeys((dtype, "float32")) for way in _ways(kind)]
    for side in (size // 4, size // 2, size):
        rates = []
        for kind, way in ways:
            matrix = torch.full((side, side), 0.5, dtype=getattr(torch, kind))
            rates.append(2 * side**3 / best_seconds(partial(way, matrix, matrix), repeats) / 1e9)
        best = max(best, *rates)
        # A way without the right instructions is slower a hundredfold, and would take minutes at the next size.
        ways = [way for way, rate in zip(ways, rates, strict=True) if rate > max(rates) / 4]
    return best


def _ways(dtype: str) -> list[Callable[[torch.Tensor, torch.Tensor], object]]:
    """How `tokens @ weights.T` can be computed for weights of this dtype."""
    library = load_library()
    if library is None or getattr(torch, dtype) not in ELEMENT_TYPES:
        return [functional.linear]
    return [
        functional.linear,
        lambda tokens, weights: cpu_operations.product(
            library, tokens.float(), weights, num_threads=torch.get_num_threads()
        ),
    ]
