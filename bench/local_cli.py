"""Commands that measure this machine without a server: kernels, engine, claims; which flags each takes. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.model_store import DEFAULT_MODEL

Model = Annotated[str, typer.Option("--model", help="Hugging Face id, local folder or GGUF file.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Threads that compute.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Batches = Annotated[list[int], typer.Option("--batch", min=1, help="Sequences at once; may be repeated.")]
Contexts = Annotated[list[int], typer.Option("--context", min=1, help="Tokens that each has; may be repeated.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything to this file, too.", show_default=False)]


def kernels(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 1,
    dtype: Dtype = "auto",
    batch: Batches = [1, 4, 16],  # noqa: B006 - typer's way to say the default of a repeated flag
    context: Contexts = [512, 2048],  # noqa: B006
    prompt: Annotated[list[int], typer.Option("--prompt", min=2, help="Tokens of prompts.")] = [512, 2048],  # noqa: B006
    seconds: Annotated[float, typer.Option("--seconds", help="For each operation.", metavar="SECONDS")] = 1.0,
    json: Json = None,
) -> int:
    """Time, bytes and FLOPs of each operation of a model, beside this machine's limits."""
    from bench.local_runs import Setup, run_kernels

    return run_kernels(Setup(model, threads, dtype, json), tuple(batch), tuple(context), tuple(prompt), seconds)


def engine(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 1,
    dtype: Dtype = "auto",
    batch: Batches = [1, 4, 16],  # noqa: B006
    context: Contexts = [128, 1024],  # noqa: B006
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps of each kind.")] = 16,
    prefill_tokens: Annotated[
        int, typer.Option("--prefill-tokens", min=1, help="Prompt tokens to prefill, shared by the prompts of a batch.")
    ] = 2048,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=1, help="Tokens of a prefill step.")
    ] = 512,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Draw tokens, by temperature and top_p, in place of the most likely.")
    ] = False,
    json: Json = None,
) -> int:
    """Where a step of a decode node and of a prefill node goes, without network, beside the bytes that it must read."""
    from bench.local_runs import Setup, run_engine

    return run_engine(
        Setup(model, threads, dtype, json),
        tuple(batch),
        tuple(context),
        steps,
        prefill_tokens,
        max_num_batched_tokens,
        is_sampled=sampled,
    )


def claims(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 1,
    dtype: Dtype = "auto",
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="Lengths to replay, in the form of Mooncake or Azure; may be repeated."),
    ] = None,
    only: Annotated[list[int] | None, typer.Option("--only", help="Number of a claim; may be repeated.")] = None,
    json: Json = None,
) -> int:
    """Check the claims that paged, disaggregated serving rests on; exit code 1 when one does not hold here."""
    from bench.local_runs import Setup, run_claims

    return run_claims(Setup(model, threads, dtype, json), trace or [], set(only or range(1, 7)))
