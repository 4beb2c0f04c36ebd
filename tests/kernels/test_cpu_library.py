"""Which compiled library is taken, and what happens where there is none."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import cpu_library
from kernels.cpu_library import SETTING, cpu_flags, library_path, load_library
from kernels.cpu_variants import COMPILER_FLAGS, VARIANTS, Variant

SOURCES = Path(cpu_library.__file__).parent / "cpu"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def runnable() -> list[str]:
    machine = platform.machine().lower()
    return [variant.name for variant in VARIANTS if machine in variant.machines and variant.cpu_flags <= cpu_flags()]


@pytest.mark.skipif(shutil.which("c++") is None or not runnable(), reason="no compiler, or a processor too old")
def test_installing_with_a_compiler_made_the_library_of_this_processor(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        library = load_library()
    assert library is not None and library.name == runnable()[0]
    assert f"cpu_kernels variant={library.name}" in caplog.text


def test_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(SETTING, "off")
    with caplog.at_level(logging.INFO):
        assert load_library() is None
    assert "variant=torch reason=switched_off" in caplog.text


def test_a_setting_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "fast")
    with pytest.raises(ValueError, match="must be auto, off or one of"):
        load_library()


def test_a_processor_without_the_instructions_never_gets_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "cpu_flags", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("auto", "avx512", "avx2"):
        monkeypatch.setenv(SETTING, name)
        load_library.cache_clear()
        assert load_library() is None


def test_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "library_path", lambda name: None)
    assert load_library() is None


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize("test_body", ["return 1;", "__builtin_trap();"], ids=["wrong", "dies"])
def test_a_library_that_fails_its_self_test_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, test_body: str
) -> None:
    source, broken = tmp_path / "broken.cpp", tmp_path / "_cpu_broken.so"
    source.write_text(
        f'extern "C" long pdserve_prepare() {{ return 1; }}\nextern "C" long pdserve_self_test() {{ {test_body} }}\n'
    )
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(broken)], check=True)
    monkeypatch.setattr(cpu_library, "library_path", lambda name: broken)
    assert load_library() is None
    if runnable():
        assert "failed_self_test" in caplog.text


def test_a_damaged_file_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "_cpu.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(cpu_library, "library_path", lambda name: damaged)
    assert load_library() is None
    if runnable():
        assert "cpu_kernels_not_loaded" in caplog.text


def test_the_team_survives_a_fork_and_sleeps_when_idle() -> None:
    """In a process of its own: threads of pytest's process should not be forked."""
    if not runnable() or library_path(runnable()[0]) is None:
        pytest.skip("the CPU kernels were not compiled for this processor")
    script = """
import os, time, torch
from kernels.cpu_library import load_library
from kernels.cpu_operations import product
torch.set_num_threads(1)
library = load_library()
tokens, weights = torch.randn(3, 64), torch.randn(640, 64)
expected = product(library, tokens, weights)
assert torch.equal(product(library, tokens, weights, num_threads=2), expected)
if (child := os.fork()) == 0:
    os._exit(0 if torch.equal(product(library, tokens, weights, num_threads=2), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
time.sleep(0.1)
before = time.process_time()
time.sleep(0.5)
assert time.process_time() - before < 0.25, "idle threads burn time"
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent.parent)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)


def test_a_system_that_gives_fewer_threads_is_asked_once_and_computes_the_same() -> None:
    if load_library() is None:
        pytest.skip("the CPU kernels were not compiled for this processor")
    script = """
import os, resource
import torch
from kernels.cpu_library import load_library
from kernels.cpu_operations import product

library = load_library()
tokens, weights = torch.randn(9, 64), torch.randn(300, 64)
alone = product(library, tokens, weights)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = len(os.listdir("/proc/self/task"))
# Room for the stacks of a few threads.
resource.setrlimit(resource.RLIMIT_AS, (size + (40 << 20), resource.RLIM_INFINITY))
counts = set()
for _ in range(5):
    assert torch.equal(product(library, tokens, weights, num_threads=64), alone)
    counts.add(len(os.listdir("/proc/self/task")) - before)
assert len(counts) == 1 and counts.pop() < 63
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if platform.machine().lower() in variant.machines])
def test_every_variant_of_this_architecture_compiles(variant: Variant) -> None:
    """Without optimisation and without output: what cannot run here must at least be correct C++ without warnings."""
    flags = [flag for flag in (*COMPILER_FLAGS, *variant.compiler_flags) if flag != "-O3"]
    command = ["c++", *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(SOURCES / "library.cpp")]
    subprocess.run(command, check=True, timeout=100)
