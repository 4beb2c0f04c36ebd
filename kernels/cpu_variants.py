"""For which instruction sets the CPU kernels are compiled, and what each needs. Imports nothing: the build reads it."""

from __future__ import annotations

from dataclasses import dataclass

COMPILER_FLAGS = (
    "-std=c++20",
    "-O3",
    # Products and sums become one rounding everywhere alike; no other liberties: sums keep their order.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-psabi",
    "-g0",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile the sources.

    Attributes:
        name: part of the file's name.
        machines: names of the architecture.
        cpu_flags: what /proc/cpuinfo must list.
        compiler_flags: for GCC and Clang.
    """

    name: str
    machines: frozenset[str]
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


_X86_64 = frozenset({"x86_64", "amd64"})
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_AMX = _AVX512 | {"amx_tile", "amx_bf16"}
VARIANTS = (
    Variant("amx", _X86_64, _AMX, (*_WIDE, "-mamx-tile", "-mamx-bf16", "-DPDSERVE_TILES")),
    Variant("avx512", _X86_64, _AVX512, _WIDE),
    Variant("avx2", _X86_64, _AVX2, ("-march=x86-64-v3",)),
    Variant("neon", frozenset({"aarch64", "arm64"}), frozenset(), ()),
)
"""The best first."""
