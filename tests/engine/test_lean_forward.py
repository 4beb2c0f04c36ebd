"""The lean forward computes what transformers' own does, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.forward_batch import ForwardBatch, SequenceSlice, build_batch
from engine.ids import BlockId
from engine.lean_forward import lean_forward_of
from engine.model_runner import ModelRunner
from engine.model_store import ModelFiles
from kernels.cpu_library import load_library
from tests.engine.tiny_checkpoints import VOCABULARY, random_model, save_folder

BLOCK = 16
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "llama-untied-biased": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-odd-sizes": {"model_type": "llama", "hidden_size": 36, "intermediate_size": 50, "head_dim": 18},
    "mistral": {"head_dim": 24, "sliding_window": None},
    "qwen2": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3": {"head_dim": 20},
    "smollm3": {"no_rope_layer_interval": 2, "num_hidden_layers": 3},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.5,
    },
}

pytestmark = pytest.mark.skipif(load_library() is None, reason="the CPU kernels were not compiled for this processor")


def make_runner(folder: Path, dtype: str = "float32", num_threads: int = 1) -> ModelRunner:
    config = EngineConfig(model="m", dtype=dtype, block_size=BLOCK, num_blocks=40, num_threads=num_threads)
    return ModelRunner(config, ModelFiles("m", folder))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def build(name: str) -> Path:
        settings = dict(FAMILIES[name])
        model = random_model(settings.pop("model_type", name), **settings)
        return save_folder(model, tmp_path_factory.mktemp(name), torch.bfloat16)

    return build


@pytest.fixture(scope="module")
def load(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], ModelRunner]:
    cache_folder = tmp_path_factory.mktemp("cache")

    @cache
    def build(name: str, dtype: str) -> ModelRunner:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PDSERVE_CACHE", str(cache_folder))
            return make_runner(folder_of(name), dtype)

    return build


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(*slices: SequenceSlice) -> ForwardBatch:
    return build_batch(slices, block_size=BLOCK)


def blocks(first: int, count: int) -> list[BlockId]:
    return [BlockId(first + place * 2) for place in range(count)]


Load = Callable[[str, str], ModelRunner]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(load: Load, name: str) -> None:
    runner = load(name, "float32")
    assert runner.forward == "lean"
    ragged = [
        SequenceSlice(tokens(50, 1), 0, blocks(0, 4), "all"),
        SequenceSlice(tokens(1, 2), 0, blocks(20, 1), "last"),
        SequenceSlice(tokens(17, 3), 0, blocks(21, 2), "none"),
    ]
    more = [
        SequenceSlice(tokens(1, 4), 50, blocks(0, 4), "last"),
        SequenceSlice(tokens(3, 5), 17, blocks(21, 2), "all"),
    ]
    for slices in (ragged, more):
        batch = batch_of(*slices)
        lean = runner.run(batch)
        with torch.inference_mode():
            generic = runner._run_generic(batch)
        torch.testing.assert_close(lean, generic, atol=2e-4, rtol=1e-4)
    reference = transformers.AutoModelForCausalLM.from_pretrained(runner_folder(runner), dtype=torch.float32).eval()
    with torch.inference_mode():
        own = reference(torch.tensor([tokens(50, 1)])).logits[0]
    torch.testing.assert_close(runner.run(batch_of(ragged[0])), own, atol=2e-4, rtol=1e-4)


def runner_folder(runner: ModelRunner) -> str:
    return str(runner._model.config._name_or_path)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_is_nearer_to_float32_than_the_generic_path(load: Load, name: str) -> None:
    """The weights are exact in bfloat16, so that only the arithmetic differs."""
    exact, rough = load(name, "float32"), load(name, "bfloat16")
    assert rough.forward == "lean" and rough.pool.dtype == torch.bfloat16
    batch = batch_of(SequenceSlice(tokens(40, 6), 0, blocks(0, 3), "all"))
    expected = exact.run(batch)
    with torch.inference_mode():
        generic_error = (rough._run_generic(batch) - expected).norm()
    assert (rough.run(batch) - expected).norm() < generic_error
    torch.testing.assert_close(rough.run(batch), expected, atol=0.2, rtol=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama-odd-sizes"])
def test_a_sequence_has_the_same_bits_in_any_company_and_chunks(load: Load, name: str, dtype: str) -> None:
    runner = load(name, dtype)
    prompt = tokens(70, 7)
    at_once = runner.run(batch_of(SequenceSlice(prompt, 0, blocks(0, 5), "all")))
    stored = runner.pool[blocks(0, 5)].clone()
    for chunk in (1, 3, 16, 64):
        rows = []
        for start in range(0, len(prompt), chunk):
            part = SequenceSlice(prompt[start : start + chunk], start, blocks(1, 5), "all")
            stranger = SequenceSlice(tokens(5 + start % 7, start), 0, blocks(20, 1), "last")
            logits = runner.run(batch_of(stranger, part) if start % 2 else batch_of(part, stranger))
            rows.append(logits[1:] if start % 2 else logits[:-1])
        assert torch.equal(torch.cat(rows), at_once), chunk
        used = runner.pool[blocks(1, 5)]
        assert torch.equal(used[:4], stored[:4]) and torch.equal(used[4, ..., :6, :], stored[4, ..., :6, :])


def test_threads_do_not_change_bits(load: Load, folder_of: Callable[[str], Path]) -> None:
    batch = batch_of(
        SequenceSlice(tokens(60, 8), 0, blocks(0, 4), "all"), SequenceSlice(tokens(1, 9), 0, blocks(20, 1), "last")
    )
    alone = load("qwen2", "float32").run(batch)
    try:
        shared = make_runner(folder_of("qwen2"), "float32", num_threads=2)
        for _ in range(5):
            assert torch.equal(shared.run(batch), alone)
    finally:
        torch.set_num_threads(1)


def test_without_the_library_the_generic_path_runs(
    folder_of: Callable[[str], Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.lean_forward.load_library", lambda: None)
    runner = make_runner(folder_of("llama"))
    assert runner.forward == "compiled"
    batch = batch_of(SequenceSlice(tokens(20, 1), 0, blocks(0, 2), "all"))
    torch.testing.assert_close(runner.run(batch), load("llama", "float32").run(batch), atol=2e-4, rtol=1e-4)


def test_a_lean_forward_that_computes_something_else_is_not_used(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*arguments: Any, **words: Any) -> Any:
        lean = lean_forward_of(*arguments, **words)
        assert lean is not None
        run = lean.run
        monkeypatch.setattr(lean, "run", lambda batch, layers_done=None: run(batch).flip(-1))
        return lean

    monkeypatch.setattr("engine.model_runner.lean_forward_of", wrong)
    assert make_runner(folder_of("llama")).forward == "compiled"
    assert "logits_differ" in caplog.text


def changed(model: Any, change: str) -> Any:
    layer = model.model.layers[1]
    if change == "hook":
        layer.mlp.register_forward_hook(lambda module, inputs, output: output)
    elif change == "subclass":
        layer.mlp.up_proj.__class__ = type("Quantised", (torch.nn.Linear,), {})
    elif change == "extra module":
        layer.self_attn.sinks = torch.nn.Linear(2, 2)
    elif change == "replaced forward":
        layer.forward = layer.forward
    elif change == "epsilon":
        layer.input_layernorm.variance_epsilon = 0.5
    elif change == "dtype":
        layer.mlp.up_proj.half()
    elif change == "activation":
        model.config.hidden_act = "gelu"
    return model


@pytest.mark.parametrize(
    "change", ["hook", "subclass", "extra module", "replaced forward", "epsilon", "dtype", "activation"]
)
def test_whatever_is_unusual_stays_with_the_generic_path(change: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = torch.zeros(2, 2, 2, 2, BLOCK, 12)
    caplog.set_level("INFO")
    assert lean_forward_of(random_model("llama"), pool, num_positions=32) is not None
    assert lean_forward_of(changed(random_model("llama"), change), pool, num_positions=32) is None
    assert "lean_forward_not_used" in caplog.text


@pytest.mark.parametrize("model_type", ["gemma", "olmo2", "phi3", "gpt_neox"])
def test_other_families_stay_with_the_generic_path(model_type: str) -> None:
    pool = torch.zeros(2, 2, 2, 2, BLOCK, 12)
    assert lean_forward_of(random_model(model_type), pool, num_positions=32) is None


def test_numbers_out_of_range_are_refused_before_anything_is_written(load: Load) -> None:
    runner = load("llama", "float32")
    runner.pool.zero_()
    for token_id, start in ((VOCABULARY, 0), (-1, 0), (5, runner.max_model_len)):
        table = [BlockId(place % 40) for place in range(start // BLOCK + 1)]
        with pytest.raises(ValueError, match="out of range"):
            runner.run(batch_of(SequenceSlice([token_id], start, table, "last")))
    assert not bool(runner.pool.any())
