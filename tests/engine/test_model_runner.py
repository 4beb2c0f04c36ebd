"""The yardstick: greedy tokens through the paged pool equal transformers' `generate`, whatever the batch looks like."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.forward_batch import SequenceSlice, build_batch
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from engine.model_runner import ModelRunner, max_model_len_of, num_blocks_of
from engine.model_store import ModelFiles
from tests.tiny_model import build_tiny_model

VOCAB = 131
BLOCK = 4
NUM_NEW = 9
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 2)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # wide, so that greedy output varies and near ties are rare
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPES: dict[str, Callable[[], Any]] = {
    "llama-9q-3kv": lambda: transformers.LlamaConfig(**_COMMON, num_attention_heads=9, num_key_value_heads=3),
    "llama-untied-llama3-rope": lambda: transformers.LlamaConfig(
        **_COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=18,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON, num_attention_heads=6, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, num_attention_heads=6, num_key_value_heads=2, head_dim=20),
    "gemma-1kv": lambda: transformers.GemmaConfig(
        **_COMMON, num_attention_heads=3, num_key_value_heads=1, head_dim=22, hidden_act="gelu_pytorch_tanh"
    ),
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, make_config in SHAPES.items():
        # The tiny llama brings tokenizer files; its weights are replaced.
        folder = build_tiny_model(tmp_path_factory.mktemp(name))
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(make_config(), dtype=torch.float32).eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)  # biases start at zero, which would hide a lost one
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        folders[name] = folder
    return folders


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def load(model_folders: dict[str, Path]) -> Callable[[str], tuple[ModelRunner, Any]]:
    @cache
    def load_both(name: str) -> tuple[ModelRunner, Any]:
        folder = model_folders[name]
        config = EngineConfig(model=str(folder), dtype="float32", block_size=BLOCK, num_blocks=160)
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return ModelRunner(config, ModelFiles(model_id=name, folder=folder)), reference

    return load_both


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(reference: Any, tokens: list[int]) -> list[int]:
    """Greedy continuation by transformers alone."""
    return _generate(reference, tuple(tokens))


@cache
def _generate(reference: Any, tokens: tuple[int, ...]) -> list[int]:
    output = reference.generate(
        torch.tensor([tokens]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    continuation: list[int] = output[0, len(tokens) :].tolist()
    return continuation


@dataclass
class Stream:
    """One sequence driven by hand."""

    tokens: list[int]
    blocks: list[BlockId]
    num_prompt: int
    computed: int = 0
    chunk: int = 10_000
    output: list[int] = field(default_factory=list)

    def slice(self) -> SequenceSlice:
        end = min(self.computed + self.chunk, len(self.tokens))
        return SequenceSlice(
            self.tokens[self.computed : end], self.computed, self.blocks, "last" if end == len(self.tokens) else "none"
        )


class Streams:
    """Runs streams together until each has its tokens. Block ids are scattered: order in the pool is no help."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        generator = torch.Generator().manual_seed(3)
        self.free = [BlockId(i) for i in torch.randperm(runner.num_blocks, generator=generator).tolist()]

    def add(self, tokens: list[int], *, chunk: int = 10_000, shared: list[BlockId] | None = None) -> Stream:
        shared = shared or []
        needed = self.runner.layout.blocks_for(len(tokens) + NUM_NEW) - len(shared)
        blocks = shared + [self.free.pop() for _ in range(needed)]
        return Stream(list(tokens), blocks, len(tokens), computed=len(shared) * BLOCK, chunk=chunk)

    def run(self, streams: list[Stream]) -> None:
        while running := [s for s in streams if len(s.output) < NUM_NEW]:
            slices = [s.slice() for s in running]
            logits = self.runner.run(build_batch(slices, block_size=BLOCK))
            rows = iter(logits)
            for stream, part in zip(running, slices, strict=True):
                stream.computed += len(part.token_ids)
                if part.logits == "last":
                    token = int(next(rows).argmax())
                    stream.tokens.append(token)
                    stream.output.append(token)
            assert next(rows, None) is None


Load = Callable[[str], tuple[ModelRunner, Any]]


def test_alone_at_every_length_around_a_block(load: Load, shape: str) -> None:
    runner, reference = load(shape)
    for length in LENGTHS:
        streams = Streams(runner)
        stream = streams.add(prompt(length, length))
        streams.run([stream])
        assert stream.output == generate(reference, prompt(length, length)), length


def test_the_tiny_models_say_something(load: Load, shape: str) -> None:
    """Parity of constant output would prove nothing."""
    _, reference = load(shape)
    outputs = {tuple(generate(reference, prompt(length, length))) for length in LENGTHS}
    assert len(outputs) >= len(LENGTHS) - 1
    assert len({token for output in outputs for token in output}) > NUM_NEW


@pytest.mark.parametrize("chunk", [1, 3, BLOCK])
def test_prefill_in_chunks_of_any_size(load: Load, shape: str, chunk: int) -> None:
    runner, reference = load(shape)
    streams = Streams(runner)
    running = [streams.add(prompt(length, length), chunk=chunk) for length in LENGTHS]
    streams.run(running)
    for length, stream in zip(LENGTHS, running, strict=True):
        assert stream.output == generate(reference, prompt(length, length)), length


def test_batched_with_strangers_that_prefill_while_others_decode(load: Load, shape: str) -> None:
    runner, reference = load(shape)
    streams = Streams(runner)
    running = [
        streams.add(prompt(length, 50 + i), chunk=chunk)
        for i, (length, chunk) in enumerate([(3, 9), (22, 3), (8, 99), (1, 1), (17, 5), (12, 12)])
    ]
    streams.run(running[:2])
    for stream in running[:2]:
        stream.tokens, stream.computed = stream.tokens[: stream.num_prompt], 0  # preempted: starts over in its blocks
        stream.output.clear()
    streams.run(running)
    for stream in running:
        assert stream.output == generate(reference, stream.tokens[: stream.num_prompt])


@pytest.mark.parametrize("shared_blocks", [1, 3])
def test_prefix_from_the_blocks_of_another_sequence(load: Load, shape: str, shared_blocks: int) -> None:
    runner, reference = load(shape)
    streams = Streams(runner)
    prefix = prompt(shared_blocks * BLOCK, 77)
    first = streams.add(prefix + prompt(2, 78), chunk=3)
    streams.run([first])
    others = [
        streams.add(prefix + prompt(length, 80 + length), chunk=chunk, shared=first.blocks[:shared_blocks])
        for length, chunk in ((1, 9), (BLOCK, 9), (BLOCK + 2, 2))
    ]
    streams.run(others)
    for stream in (first, *others):
        assert stream.output == generate(reference, stream.tokens[: stream.num_prompt])


def test_blocks_moved_as_bytes_continue_in_other_places(load: Load, shape: str) -> None:
    """What a hand-off does: copy the bytes of each block elsewhere, then decode from there."""
    runner, reference = load(shape)
    streams = Streams(runner)
    stream = streams.add(prompt(2 * BLOCK + 1, 5))
    part = stream.slice()
    first = int(runner.run(build_batch([part], block_size=BLOCK))[0].argmax())
    moved = [streams.free.pop() for _ in stream.blocks]
    for source, destination in zip(stream.blocks, moved, strict=True):
        if source == stream.blocks[0]:
            runner.copy_block(source, destination)
        else:
            runner.block_bytes(destination)[:] = runner.block_bytes(source)
        runner.block_bytes(source)[:] = b"\xff" * runner.layout.block_bytes  # NaN, if anyone still looked
    stream.blocks, stream.computed = moved, len(stream.tokens)
    stream.tokens.append(first)
    stream.output.append(first)
    streams.run([stream])
    assert stream.output == generate(reference, stream.tokens[: stream.num_prompt])


def test_stale_nan_in_a_reused_block_reaches_nobody(load: Load) -> None:
    runner, reference = load("llama-9q-3kv")
    for block in range(runner.num_blocks):
        runner.block_bytes(BlockId(block))[:] = b"\xff" * runner.layout.block_bytes
    streams = Streams(runner)
    running = [streams.add(prompt(length, length), chunk=3) for length in LENGTHS]
    streams.run(running)
    for length, stream in zip(LENGTHS, running, strict=True):
        assert stream.output == generate(reference, prompt(length, length))


def test_logits_of_all_rows_equal_transformers(load: Load, shape: str) -> None:
    runner, reference = load(shape)
    tokens, other = prompt(2 * BLOCK + 1, 1), prompt(3, 2)
    slices = [
        SequenceSlice(other, 0, [BlockId(9)], "none"),
        SequenceSlice(tokens, 0, [BlockId(5), BlockId(2), BlockId(7)], "all"),
        SequenceSlice(other, 0, [BlockId(1)], "last"),
    ]
    logits = runner.run(build_batch(slices, block_size=BLOCK))
    with torch.inference_mode():
        expected = torch.cat(
            [reference(torch.tensor([tokens])).logits[0], reference(torch.tensor([other])).logits[0, -1:]]
        )
    assert logits.shape == (len(tokens) + 1, runner.vocab_size) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_a_batch_may_want_no_logits(load: Load) -> None:
    runner, _ = load("qwen2")
    batch = build_batch([SequenceSlice([3, 4], 0, [BlockId(0)], "none")], block_size=BLOCK)
    assert runner.run(batch).shape == (0, runner.vocab_size)


def test_layers_are_counted_up_once_each(load: Load, shape: str) -> None:
    runner, _ = load(shape)
    layers_done = c_int64(5)
    batch = build_batch([SequenceSlice([3, 4], 0, [BlockId(3)], "last")], block_size=BLOCK)
    runner.run(batch, layers_done=layers_done)
    assert layers_done.value == 5 + runner.layout.num_layers


def test_a_block_outside_the_pool_is_refused_before_anything_is_written(load: Load) -> None:
    runner, _ = load("qwen2")
    batch = build_batch([SequenceSlice([3], 0, [BlockId(160)], "last")], block_size=BLOCK)
    with pytest.raises(ValueError, match="160"):
        runner.run(batch)
    with pytest.raises(ValueError):
        runner.block_bytes(BlockId(-1))


def test_the_pool_lies_in_the_memory_it_is_given(model_folders: dict[str, Path]) -> None:
    folder = model_folders["qwen2"]
    asked: list[bytearray] = []

    def allocate_pool(num_bytes: int) -> memoryview:
        asked.append(bytearray(num_bytes))
        return memoryview(asked[-1])

    config = EngineConfig(model="m", dtype="float32", block_size=BLOCK, num_blocks=3)
    runner = ModelRunner(config, ModelFiles("m", folder), allocate_pool=allocate_pool)
    size = runner.layout.block_bytes
    assert len(asked[0]) == 3 * size and not any(asked[0])
    runner.run(build_batch([SequenceSlice([3, 4, 5, 6], 0, [BlockId(1)], "none")], block_size=BLOCK))
    assert not any(asked[0][:size]) and any(asked[0][size : 2 * size]) and not any(asked[0][2 * size :])
    assert bytes(runner.block_bytes(BlockId(1))) == bytes(asked[0][size : 2 * size])
    assert runner.max_model_len == 3 * BLOCK


def test_bfloat16_stays_near_float32(
    model_folders: dict[str, Path], load: Load, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    exact, _ = load("llama-9q-3kv")
    config = EngineConfig(model="m", dtype="bfloat16", block_size=BLOCK, num_blocks=8)
    runner = ModelRunner(config, ModelFiles("m", model_folders["llama-9q-3kv"]))
    assert runner.layout.dtype == "bfloat16" and runner.pool.dtype == torch.bfloat16
    slices = [SequenceSlice(prompt(6, 1), 0, [BlockId(1), BlockId(2)], "all")]
    batch = build_batch(slices, block_size=BLOCK)
    rough, fine = runner.run(batch), exact.run(batch)
    assert rough.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(rough, fine, dim=-1).min() > 0.98


LAYOUT = KvLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=16, dtype="float32")
CONFIG = EngineConfig(model="m", block_size=16)


def test_pool_size_comes_from_blocks_or_bytes() -> None:
    assert num_blocks_of(replace(CONFIG, num_blocks=7), LAYOUT) == 7
    assert num_blocks_of(replace(CONFIG, kv_memory_bytes=LAYOUT.block_bytes * 5 + 1), LAYOUT) == 5
    with pytest.raises(ConfigError, match="fewer than 2 blocks"):
        num_blocks_of(replace(CONFIG, kv_memory_bytes=LAYOUT.block_bytes), LAYOUT)


def test_a_pool_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model_runner.available_bytes", lambda: LAYOUT.block_bytes * 10)
    assert num_blocks_of(replace(CONFIG, num_blocks=10), LAYOUT) == 10
    with pytest.raises(ConfigError, match="11 blocks"):
        num_blocks_of(replace(CONFIG, num_blocks=11), LAYOUT)


def test_max_model_len_is_the_least_of_three() -> None:
    assert max_model_len_of(CONFIG, 128, 100) == 128
    assert max_model_len_of(CONFIG, 128, 4) == 64
    assert max_model_len_of(replace(CONFIG, max_model_len=50), 128, 4) == 50
    assert max_model_len_of(replace(CONFIG, max_model_len=100), 128, 4) == 64
    with pytest.raises(ConfigError, match="129"):
        max_model_len_of(replace(CONFIG, max_model_len=129), 128, 100)


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "not finite"), (0.0, "all equal")])
def test_broken_weights_stop_the_start(tmp_path: Path, value: float, message: str) -> None:
    folder = build_tiny_model(tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.fill_(value)
    model.save_pretrained(folder)
    config = EngineConfig(model="m", dtype="float32", block_size=BLOCK, num_blocks=4)
    with pytest.raises(ConfigError, match=message):
        ModelRunner(config, ModelFiles("m", folder))


def test_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        ModelRunner(EngineConfig(model="m", device="cuda"), ModelFiles("m", Path("nowhere")))
