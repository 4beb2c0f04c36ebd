"""Every family that is named as running gives transformers' own greedy tokens, whatever the batch looks like."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import model_runner, paged_cache
from engine.config import EngineConfig
from engine.forward_batch import SequenceSlice, build_batch
from engine.ids import BlockId
from engine.model_loader import SUPPORTED_FAMILIES
from engine.model_runner import ModelRunner
from engine.model_store import ModelFiles
from kernels import ops
from tests.engine.tiny_checkpoints import VOCABULARY, byte_level_tokenizer, random_model

BLOCK = 4
WINDOW = 8
NUM_NEW = 5
NUM_BLOCKS = 64

ALL_SLIDE = {"sliding_window": WINDOW}
ONE_SLIDES = {**ALL_SLIDE, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 5, "head_dim": 16}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("apertus", {}),
    ("arcee", {}),
    ("biogpt", {}),
    ("codegen", {"rotary_dim": 8}),
    ("cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    ("cohere2", ONE_SLIDES),
    ("ernie4_5", {"head_dim": 16}),
    ("exaone4", ONE_SLIDES),
    ("gemma", {"head_dim": 20, "num_key_value_heads": 1}),
    ("gemma2", {**ONE_SLIDES, **CAPPED}),
    ("gemma3_text", {**ONE_SLIDES, "head_dim": 16, "query_pre_attn_scalar": 7}),
    ("glm", {"head_dim": 16}),
    ("glm4", {"head_dim": 16}),
    ("glm4_moe", {"head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1, **EXPERTS}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_bigcode", {"multi_query": True}),
    ("gpt_neox", {"use_parallel_residual": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_oss", {**ONE_SLIDES, **EXPERTS, "head_dim": 16}),
    ("gptj", {"rotary_dim": 8}),
    ("granite", {"logits_scaling": 2.0, "attention_multiplier": 0.4, "residual_multiplier": 0.5}),
    ("granitemoe", {**EXPERTS, "attention_multiplier": 0.4}),
    ("helium", {"head_dim": 12}),
    ("hunyuan_v1_dense", {"head_dim": 12}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 18, "attention_bias": True}),
    ("minimax_m2", {**EXPERTS, "head_dim": 12, "rotary_dim": 8}),
    ("ministral", {**ONE_SLIDES, "head_dim": 12}),
    ("mistral", ALL_SLIDE),
    ("mixtral", {**ALL_SLIDE, **EXPERTS}),
    ("nanochat", {}),
    ("olmo", {"clip_qkv": 0.5}),
    ("olmo2", {}),
    ("olmo3", ONE_SLIDES),
    ("olmoe", EXPERTS),
    ("opt", {"word_embed_proj_dim": 24}),
    ("persimmon", {}),
    ("phi", {}),
    ("phi3", ALL_SLIDE),
    ("phimoe", EXPERTS),
    ("qwen2", {**ONE_SLIDES, "use_sliding_window": True}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    ("qwen3", {"head_dim": 20}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 12}),
    ("seed_oss", {"head_dim": 12}),
    ("smollm3", {**ONE_SLIDES, "use_sliding_window": True, "no_rope_layers": [1, 0]}),
    ("starcoder2", ALL_SLIDE),
    ("vaultgemma", {**ONE_SLIDES, **CAPPED}),
]
"""Model types and what is not as usual in them; small enough that a prompt runs in milliseconds."""


@dataclass(frozen=True)
class Pair:
    """The same weights twice.

    Attributes:
        runner: ours, loaded from a folder.
        reference: transformers' model.
    """

    runner: ModelRunner
    reference: Any

    def generate(self, tokens: list[int]) -> list[int]:
        """Greedy continuation by transformers alone."""
        output = self.reference.generate(
            torch.tensor([tokens]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        continuation: list[int] = output[0, len(tokens) :].tolist()
        return continuation


@cache
def tokenizer_json() -> str:
    return byte_level_tokenizer().to_str()


def make_pair(folder: Path, model_type: str, settings: dict[str, Any]) -> Pair:
    reference = random_model(model_type, **settings)
    reference.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    config = EngineConfig(model=model_type, dtype="float32", block_size=BLOCK, num_blocks=NUM_BLOCKS)
    return Pair(ModelRunner(config, ModelFiles(model_type, folder)), reference)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Stream:
    """One sequence driven by hand, `chunk` tokens at a time."""

    tokens: list[int]
    blocks: list[BlockId]
    chunk: int
    computed: int
    output: list[int] = field(default_factory=list)

    def slice(self) -> SequenceSlice:
        end = min(self.computed + self.chunk, len(self.tokens))
        wanted: Any = "last" if end == len(self.tokens) else "none"
        return SequenceSlice(self.tokens[self.computed : end], self.computed, self.blocks, wanted)


def run(runner: ModelRunner, streams: list[Stream]) -> None:
    """Run streams together until each has its tokens."""
    while running := [stream for stream in streams if len(stream.output) < NUM_NEW]:
        slices = [stream.slice() for stream in running]
        rows = iter(runner.run(build_batch(slices, block_size=BLOCK)))
        for stream, part in zip(running, slices, strict=True):
            stream.computed += len(part.token_ids)
            if part.logits == "last":
                stream.output.append(int(next(rows).argmax()))
                stream.tokens.append(stream.output[-1])


def check_parity(pair: Pair) -> list[list[int]]:
    """Ragged batches, chunks and prefix hits on both sides of a block and of the window; returns all outputs."""
    free = [BlockId(i) for i in torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()]
    expected: list[list[int]] = []

    def stream(tokens: list[int], chunk: int, shared: list[BlockId]) -> Stream:
        expected.append(pair.generate(tokens))
        needed = pair.runner.layout.blocks_for(len(tokens) + NUM_NEW) - len(shared)
        blocks = shared + [free.pop() for _ in range(needed)]
        return Stream(list(tokens), blocks, chunk, len(shared) * BLOCK)

    longest = prompt(23, 1)
    lengths_and_chunks = [(1, 99), (WINDOW - 1, 99), (WINDOW, 3), (WINDOW + 1, 99), (WINDOW + 1, 5)]
    first = [stream(prompt(length, length + chunk), chunk, []) for length, chunk in lengths_and_chunks]
    first.append(stream(longest, 6, []))
    run(pair.runner, first)
    second = [
        stream(longest[: blocks * BLOCK] + prompt(rest, 9 + blocks), chunk, first[-1].blocks[:blocks])
        for blocks, rest, chunk in [(1, 2, 99), (2, 1, 99), (3, 6, 4), (5, 2, 1)]
    ]
    run(pair.runner, second)
    outputs = [stream.output for stream in first + second]
    assert outputs == expected
    return outputs


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize(("model_type", "settings"), CASES, ids=[model_type for model_type, _ in CASES])
def test_tokens_equal_those_of_transformers(tmp_path: Path, model_type: str, settings: dict[str, Any]) -> None:
    outputs = check_parity(make_pair(tmp_path, model_type, settings))
    assert len({tuple(output) for output in outputs}) >= 7  # parity of constant output would prove nothing


@pytest.mark.parametrize("model_type", ["granite", "llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_the_generic_forward_gives_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Where the machine has no compiled forward for these, or the model is a little different."""
    monkeypatch.setattr(model_runner, "lean_forward_of", lambda *_, **__: None)
    check_parity(make_pair(tmp_path, model_type, dict(CASES)[model_type]))


def test_families_named_as_running_are_those_tested() -> None:
    assert sorted({model_type for model_type, _ in CASES}) == list(SUPPORTED_FAMILIES)
    table = (Path(__file__).parents[2] / "docs" / "models.md").read_text().split("|---|---|\n")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == list(SUPPORTED_FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "lost"),
    [("gemma2", "window"), ("gemma2", "soft_cap"), ("gpt_oss", "window"), ("gpt_oss", "sinks"), ("gemma2", "scale")],
)
def test_a_lost_feature_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, lost: str
) -> None:
    pair = make_pair(tmp_path, model_type, dict(CASES)[model_type])
    whole = ops.paged_attention

    def without(*arguments: Any, **words: Any) -> torch.Tensor:
        return whole(*arguments, **{**words, lost: 0.2 if lost == "scale" else None})

    monkeypatch.setattr(paged_cache.ops, "paged_attention", without)
    with pytest.raises(AssertionError):
        check_parity(pair)


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_window_off_by_one_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    pair = make_pair(tmp_path, "gpt_oss", dict(CASES)["gpt_oss"])
    whole = ops.paged_attention

    def moved(*arguments: Any, **words: Any) -> torch.Tensor:
        return whole(*arguments, **{**words, "window": words["window"] and window})

    monkeypatch.setattr(paged_cache.ops, "paged_attention", moved)
    with pytest.raises(AssertionError):
        check_parity(pair)


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
ROPES = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32},
    "dynamic": {"factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 40,
    },
}


@pytest.mark.parametrize("rope_type", list(ROPES))
def test_rope_variants(tmp_path: Path, rope_type: str) -> None:
    rope = {**PLAIN, "rope_type": rope_type, **ROPES[rope_type]}
    pair = make_pair(tmp_path / rope_type, "llama", {"rope_parameters": rope})
    outputs = check_parity(pair)
    assert pair.runner.max_model_len == (40 if rope_type == "longrope" else 256)
    plain = make_pair(tmp_path / "plain", "llama", {"rope_parameters": PLAIN})
    # Up to the length it was trained for, `dynamic` is plain rope, and it is served no further.
    assert (check_parity(plain) == outputs) == (rope_type == "dynamic")
