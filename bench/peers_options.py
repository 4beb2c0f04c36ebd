"""Every flag of `pdserve bench peers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench.serve_options import flag

WHAT, WHERE = "What to compare", "Where things are"


@dataclass(frozen=True, kw_only=True)
class PeersSettings:
    """Flags of `pdserve bench peers`."""

    peers: Annotated[str, flag(WHAT, "Of vllm, vllm-tuned (Intel's OpenMP, no spinning) and llama.cpp; or ''.")] = (
        "vllm"
    )
    rows: Annotated[str, flag(WHAT, "Of single, prefill, concurrent, prefix and interference.")] = (
        "single,prefill,concurrent,prefix,interference"
    )
    threads: Annotated[str, flag(WHAT, "Of 1, 2, and pd: prefill and decode with one thread each.")] = "1,2,pd"
    repeats: Annotated[
        int | None,
        flag(WHAT, "Rounds of turns; each starts servers anew, but for --together.", show_default="3; 1 with --quick"),
    ] = None
    quick: Annotated[
        bool, flag(WHAT, "Less work in each row, and one round unless --repeats asks for more.", "--quick")
    ] = False
    together: Annotated[
        bool,
        flag(WHAT, "Start every server once, keep all in memory, take turns row by row: less waiting.", "--together"),
    ] = False
    model: Annotated[str, flag(WHAT, "What pdserve takes: a Hugging Face id, a folder or a GGUF file.")] = (
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    dtype: Annotated[str, flag(WHAT, "Of weights and KV, the same for all; auto is what pdserve would take.")] = "auto"
    seed: Annotated[int, flag(WHAT, "Makes prompts repeatable; every repeat has others.")] = 0
    workdir: Annotated[
        Path | None,
        flag(WHERE, "Where peers are installed.", metavar="FOLDER", show_default="bench-peers in the cache folder"),
    ] = None
    vllm_venv: Annotated[
        Path | None, flag(WHERE, "An environment that has vLLM (for pd also NIXL).", metavar="FOLDER")
    ] = None
    llama_cpp_venv: Annotated[
        Path | None, flag(WHERE, "An environment that has llama-cpp-python with its server.", metavar="FOLDER")
    ] = None
    gguf: Annotated[
        Path | None,
        flag(WHERE, "The model as GGUF, in any type, for llama.cpp.", metavar="FILE", show_default="--model"),
    ] = None
    result_filename: Annotated[Path | None, flag(WHERE, "Write everything measured as JSON.", metavar="FILE")] = None
