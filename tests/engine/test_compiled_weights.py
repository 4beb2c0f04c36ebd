"""On the compiled products any family gives the same bits alone, in a batch and in chunks, and better bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import compiled_weights, model_runner
from engine.compiled_weights import compile_weights
from engine.config import EngineConfig
from engine.forward_batch import SequenceSlice, build_batch
from engine.ids import BlockId
from engine.model_runner import ModelRunner
from engine.model_store import ModelFiles
from kernels.cpu_library import load_library
from tests.engine.tiny_checkpoints import VOCABULARY, logits_of, random_model, save_folder

BLOCK = 4
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SLIDES = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**SLIDES, "query_pre_attn_scalar": 7},
    "phi3": {"sliding_window": 8},
    "gpt2": {},
    "mixtral": EXPERTS,
    "gpt_oss": {**SLIDES, **EXPERTS},
    # Widths are multiples of 64: torch computes the sigmoid of what is left over from whole vectors otherwise.
    "glm4_moe": {**EXPERTS, "num_local_experts": 64, "head_dim": 16, "first_k_dense_replace": 1},
}

pytestmark = pytest.mark.skipif(load_library() is None, reason="the CPU kernels were not compiled for this processor")

Load = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    torch.set_num_threads(1)
    cache_folder = tmp_path_factory.mktemp("cache")
    folder_of = cache(
        lambda name: save_folder(random_model(name, **FAMILIES[name]), tmp_path_factory.mktemp(name), torch.bfloat16)
    )

    @cache
    def build(name: str, dtype: str, compiled: bool = True) -> ModelRunner:
        config = EngineConfig(model=name, dtype=dtype, block_size=BLOCK, num_blocks=40)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PDSERVE_CACHE", str(cache_folder))
            if not compiled:
                patch.setattr(model_runner, "load_library", lambda: None)
            return ModelRunner(config, ModelFiles(name, folder_of(name)))

    return build


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def blocks(first: int, count: int = 6) -> list[BlockId]:
    return [BlockId(first + 3 * place) for place in range(count)]


def run(runner: ModelRunner, *slices: SequenceSlice) -> torch.Tensor:
    return runner.run(build_batch(slices, block_size=BLOCK))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_has_the_same_bits_in_any_company_and_chunks(load: Load, name: str, dtype: str) -> None:
    runner = load(name, dtype)
    assert runner.forward == "compiled"
    tokens = prompt(11, 1)  # past the window
    at_once = run(runner, SequenceSlice(tokens, 0, blocks(0), "all"))
    stored = runner.pool[blocks(0)[:3]].clone()
    for chunk in (1, 4):
        for start in range(0, len(tokens), chunk):
            part = SequenceSlice(tokens[start : start + chunk], start, blocks(1), "all")
            others = [SequenceSlice(prompt(1 + start % 3, seed), 0, blocks(19 + seed, 1), "none") for seed in range(3)]
            rows = run(runner, *others[:2], part, *others[2:])
            assert torch.equal(rows, at_once[start : start + len(part.token_ids)]), (chunk, start)
        assert torch.equal(runner.pool[blocks(1)[:3]], stored)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "mixtral"])
def test_bfloat16_is_nearer_to_float32_than_by_torch(load: Load, name: str) -> None:
    """The weights are exact in bfloat16, so that only the arithmetic differs."""
    part = SequenceSlice(prompt(21, 2), 0, blocks(0), "all")
    exact = run(load(name, "float32"), part)
    compiled, by_torch = (run(load(name, "bfloat16", kind), part) for kind in (True, False))
    assert load(name, "bfloat16", False).forward == "torch"
    # Of most tokens: where two experts are nearly tied, either may take the other one.
    assert (compiled - exact).norm(dim=-1).median() < (by_torch - exact).norm(dim=-1).median()


def test_weights_stay_where_they_are_and_tied_ones_tied(load: Load) -> None:
    model = load("gemma3_text", "bfloat16")._model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert {parameter.dtype for parameter in matrices} == {torch.bfloat16}
    plain = random_model("phi3")
    pointers = {name: parameter.data_ptr() for name, parameter in plain.named_parameters()}
    library = load_library()
    assert library is not None
    compile_weights(plain, library, num_threads=1)
    assert {name: parameter.data_ptr() for name, parameter in plain.named_parameters()} == pointers


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
def test_the_change_can_be_taken_back(name: str) -> None:
    library = load_library()
    assert library is not None
    model = random_model(name, **FAMILIES[name])
    before, parameters = logits_of(model), dict(model.named_parameters())
    take_back = compile_weights(model, library, num_threads=1)
    torch.testing.assert_close(logits_of(model), before, atol=1e-4, rtol=1e-4)
    assert all(parameter is not parameters[name] for name, parameter in model.named_parameters())
    take_back()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(logits_of(model), before)


def test_copies_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library()
    assert library is not None
    monkeypatch.setattr(compiled_weights, "available_bytes", lambda: 1000)
    compile_weights(random_model("phi3"), library, num_threads=1)  # copies nothing
    model = random_model("gpt2")
    parameters = dict(model.named_parameters())
    with pytest.raises(ValueError, match="1000 bytes of memory"):
        compile_weights(model, library, num_threads=1)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_products_that_come_out_otherwise_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = ModelFiles("m", save_folder(random_model("phi3"), tmp_path / "model", torch.float32))
    config = EngineConfig(model="m", dtype="float32", block_size=BLOCK, num_blocks=8)

    def wrong(*arguments: Any, **words: Any) -> Any:
        take_back = compile_weights(*arguments, **words)
        monkeypatch.setattr(arguments[0].lm_head, "forward", lambda hidden: hidden @ torch.ones(48, VOCABULARY).triu())
        return lambda: (take_back(), monkeypatch.undo())

    monkeypatch.setattr(model_runner, "compile_weights", wrong)
    runner = ModelRunner(config, files)
    assert runner.forward == "torch" and "logits_differ" in caplog.text

    def broken(*arguments: Any, **words: Any) -> Any:
        take_back = compile_weights(*arguments, **words)
        arguments[0].lm_head.weight.library = None
        return take_back

    monkeypatch.setattr(model_runner, "compile_weights", broken)
    assert ModelRunner(config, files).forward == "torch"
    assert caplog.text.count("compiled_products_not_used") == 2
