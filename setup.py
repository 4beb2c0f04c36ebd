"""Compiles the CPU kernels, once for each instruction set of this architecture; everything else is in pyproject.toml.

Without a C++ compiler, or with one too old for an instruction set, the library of that set is left out and the rest is
installed: `kernels/cpu_library.py` then takes the next one, or torch.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
SOURCES = "kernels/cpu"


def extensions() -> list[Extension]:
    """One for each variant that this architecture can run."""
    if sys.platform == "win32":
        return []
    # By its path: neither the package nor torch is there while pip builds.
    specification = importlib.util.spec_from_file_location("cpu_variants", ROOT / "kernels" / "cpu_variants.py")
    assert specification is not None and specification.loader is not None
    variants = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = variants
    specification.loader.exec_module(variants)
    return [
        Extension(
            f"kernels._cpu_{variant.name}",
            sources=[f"{SOURCES}/library.cpp"],
            depends=["kernels/cpu_variants.py", *(f"{SOURCES}/{path.name}" for path in (ROOT / SOURCES).glob("*.h"))],
            extra_compile_args=[*variants.COMPILER_FLAGS, *variant.compiler_flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for variant in variants.VARIANTS
        if platform.machine().lower() in variant.machines
    ]


setup(ext_modules=extensions())
