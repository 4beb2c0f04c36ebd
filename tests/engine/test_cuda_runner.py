"""The CUDA runner equals the torch runner token by token, on interpreted kernels; its blocks have bytes on the host."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from ctypes import c_int64
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.forward_batch import SequenceSlice, build_batch
from engine.ids import BlockId
from engine.model_loader import SUPPORTED_FAMILIES
from engine.model_runner import ModelRunner, Runner
from engine.model_store import ModelFiles
from kernels import ops
from tests.engine.tiny_checkpoints import VOCABULARY, byte_level_tokenizer, random_model
from tests.kernels.triton_interpreter import interpreted, load
from tests.tiny_model import build_tiny_model

load("triton_attention")
load("triton_elementwise")

from engine import cuda_runner, fused_modules, paged_cache  # noqa: E402  # over the interpreted kernels
from engine.cuda_runner import CapturedStep, CudaRunner, DecodeGraphs, runs_of  # noqa: E402

BLOCK = 4


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    torch.set_num_threads(1)
    with interpreted():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = build_tiny_model(
        tmp_path_factory.mktemp("models") / "wide_heads", hidden_size=64, num_heads=4, num_kv_heads=2, max_position=128
    )
    return ModelFiles(model_id="wide_heads", folder=folder)


def config_of(files: ModelFiles, device: str = "cpu") -> EngineConfig:
    return EngineConfig(model=str(files.folder), dtype="float32", device=device, block_size=BLOCK, num_blocks=24)


@pytest.fixture(scope="module")
def runner(files: ModelFiles) -> CudaRunner:
    with interpreted():
        return CudaRunner(config_of(files), files)


@pytest.fixture(scope="module")
def plain(files: ModelFiles) -> ModelRunner:
    return ModelRunner(config_of(files), files)


def run(runner: Runner, slices: list[SequenceSlice]) -> torch.Tensor:
    return runner.run(build_batch(slices, block_size=BLOCK))


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in ids]


def test_logits_equal_the_torch_runner_over_prefill_chunks_and_decode(runner: CudaRunner, plain: ModelRunner) -> None:
    long, short, one = list(range(3, 20)), [7, 9, 11], [5]
    steps = [
        [SequenceSlice(long[:9], 0, blocks(2, 7, 3, 11, 5), "none"), SequenceSlice(short, 0, blocks(9), "all")],
        [SequenceSlice(long[9:], 9, blocks(2, 7, 3, 11, 5), "last"), SequenceSlice(one, 0, blocks(4), "last")],
        [
            SequenceSlice([31], 17, blocks(2, 7, 3, 11, 5), "last"),
            SequenceSlice([32], 3, blocks(9), "last"),
            SequenceSlice([33], 1, blocks(4), "last"),
        ],
    ]
    for slices in steps:
        expected = run(plain, slices)
        actual = run(runner, slices)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def test_the_common_shape_runs_on_fused_kernels(runner: CudaRunner) -> None:
    # Two layers: two norms, an MLP and an attention each, and the last norm.
    assert runner.fused == 2 * 4 + 1


def test_fused_norms_round_where_the_families_own_do() -> None:
    modules = {name.replace("_", ""): name for name in SUPPORTED_FAMILIES} | {"hunyuandensev1": "hunyuan_v1_dense"}
    generator = torch.Generator().manual_seed(4)
    values, weight = (torch.randn(size, generator=generator).bfloat16() for size in ((6, 64), (64,)))
    for family in fused_modules._FAMILIES:
        name = modules[family.lower()]
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        norm = getattr(module, f"{family}RMSNorm")(64).to(torch.bfloat16)
        with torch.inference_mode():
            norm.weight.copy_(weight)
            expected, actual = norm(values), fused_modules._rms_norm(norm, values)
        # Sums in another order may move a value that lies between two; rounding elsewhere moves every fourth.
        assert (actual != expected).float().mean() < 0.02, family


def test_models_loaded_otherwise_do_not_notice(runner: CudaRunner, plain: ModelRunner) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Kernels that are not interpreted cannot run on a CPU, so a shared one would show.
        patch.setattr(fused_modules, "triton_elementwise", None)
        assert run(plain, [SequenceSlice([3, 4, 5], 0, blocks(0), "all")]).isfinite().all()
        with pytest.raises(AttributeError):
            run(runner, [SequenceSlice([3, 4, 5], 0, blocks(0), "all")])


def test_blocks_move_as_bytes_to_another_pool_and_back(runner: CudaRunner, plain: ModelRunner) -> None:
    prompt = list(range(40, 50))
    run(runner, [SequenceSlice(prompt, 0, blocks(1, 2, 3), "last")])
    run(plain, [SequenceSlice(prompt, 0, blocks(1, 2, 3), "last")])
    for source, target in ((1, 20), (2, 6), (3, 15)):
        computed, moved = runner.block_bytes(BlockId(source)), plain.block_bytes(BlockId(source))
        values = [torch.frombuffer(data, dtype=torch.float32) for data in (computed, moved)]
        torch.testing.assert_close(values[0], values[1], atol=1e-4, rtol=1e-4)
        runner.block_bytes(BlockId(target))[:] = moved
    expected = run(plain, [SequenceSlice([77], 10, blocks(1, 2, 3), "last")])
    torch.testing.assert_close(
        run(runner, [SequenceSlice([77], 10, blocks(20, 6, 15), "last")]), expected, atol=2e-4, rtol=2e-4
    )
    # The new token went into a block that the host had lent before: its bytes follow.
    last = torch.frombuffer(runner.block_bytes(BlockId(15)), dtype=torch.float32)
    wanted = torch.frombuffer(plain.block_bytes(BlockId(3)), dtype=torch.float32)
    torch.testing.assert_close(last, wanted, atol=1e-4, rtol=1e-4)


def test_a_copied_block_is_of_what_the_host_wrote_last(runner: CudaRunner) -> None:
    runner.block_bytes(BlockId(8))[:] = bytes([63]) * runner.layout.block_bytes
    runner.copy_block(BlockId(8), BlockId(10))
    assert runner.block_bytes(BlockId(10)) == runner.block_bytes(BlockId(8))


def test_counts_each_layer_and_refuses_blocks_outside_the_pool(runner: CudaRunner) -> None:
    layers_done = c_int64(5)
    batch = build_batch([SequenceSlice([3, 4], 0, blocks(0), "last")], block_size=BLOCK)
    runner.run(batch, layers_done=layers_done)
    assert layers_done.value == 7
    with pytest.raises(ValueError, match="block 24"):
        run(runner, [SequenceSlice([3], 0, blocks(24), "last")])
    with pytest.raises(ValueError, match="block 24"):
        runner.block_bytes(BlockId(24))


@pytest.mark.parametrize(
    ("device", "message"), [("cuda:99", "no such CUDA device"), ("mps", "must be cpu or cuda"), ("gpu", "torch names")]
)
def test_refuses_devices_that_are_not_there(files: ModelFiles, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CudaRunner(config_of(files, device), files)


def test_refuses_heads_that_the_kernels_do_not_take(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "narrow")
    narrow = ModelFiles(model_id="narrow", folder=folder)
    with pytest.raises(ConfigError, match="multiples of 16"):
        CudaRunner(config_of(narrow), narrow)


# ---------------------------------------------------------------------------------------------------- other families

WINDOW = 5
ONE_SLIDES = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
}
OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {
        **ONE_SLIDES,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 5,
    },
    "gpt_oss": {**ONE_SLIDES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {},
    "phi3": {"sliding_window": WINDOW},
    "qwen3": {},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
}
"""Each with what the llama above lacks: window and soft caps; sinks and experts; heads that turn in part; joined
projections; norms of queries and keys; learned positions."""


def pair_of(folder: Path, model_type: str) -> tuple[CudaRunner, ModelRunner]:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    random_model(model_type, **{**small, "head_dim": 16, **OF_THEIR_OWN[model_type]}).save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    files = ModelFiles(model_id=model_type, folder=folder)
    return CudaRunner(config_of(files), files), ModelRunner(config_of(files), files)


def worst_difference(ours: Runner, theirs: Runner, *, prefill_alone: bool = False) -> float:
    """Of logits, over chunks on both sides of the window and decode, as a share of the largest."""
    long, short = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2)).tolist()
    steps = [
        [SequenceSlice(long[:7], 0, blocks(2, 7, 3), "all"), SequenceSlice(short[:1], 0, blocks(9, 1), "all")],
        [SequenceSlice(long[7:10], 7, blocks(2, 7, 3), "all"), SequenceSlice(short[1:2], 1, blocks(9, 1), "last")],
        [SequenceSlice(long[10:11], 10, blocks(2, 7, 3), "last")],
    ]
    worst = 0.0
    for slices in steps[:1] if prefill_alone else steps:
        actual, expected = run(ours, slices), run(theirs, slices)
        worst = max(worst, float((actual - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("model_type", list(OF_THEIR_OWN))
def test_families_with_something_of_their_own_give_the_torch_runners_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    ours, theirs = pair_of(tmp_path, model_type)
    assert worst_difference(ours, theirs) < 1e-4
    whole = paged_cache.ops.paged_attention
    for lost in {"gemma2": ["soft_cap"], "gpt_oss": ["window", "sinks"]}.get(model_type, []):

        def without(plan: Any, *arguments: Any, lost: str = lost, **words: Any) -> torch.Tensor:
            return whole(plan, *arguments, **(words if isinstance(plan, ops.PagedPlan) else {**words, lost: None}))

        with monkeypatch.context() as patch:
            patch.setattr(paged_cache.ops, "paged_attention", without)
            assert worst_difference(ours, theirs, prefill_alone=True) > 1e-2, f"nobody would see {lost} lost"


# ---------------------------------------------------------------------------------------------------- decode's graphs


class FakeCapture:
    """Replays by computing again, into the tensor that the capture gave. Logits are poisoned before."""

    def __init__(self) -> None:
        self.shapes: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, step: Callable[[], torch.Tensor]) -> CapturedStep:
        logits = step()
        number = len(self.shapes)
        self.shapes.append(logits.shape[0])

        def replay() -> None:
            self.replayed.append(number)
            logits.fill_(torch.nan)
            logits.copy_(step())

        return CapturedStep(replay, logits)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    monkeypatch.setattr(cuda_runner, "_BATCH_BUCKETS", (1, 256))
    monkeypatch.setattr(cuda_runner, "_LONGEST_BUCKETS", (8,))
    return FakeCapture()


def decoded(contexts: list[int]) -> list[SequenceSlice]:
    """A step of one token for each sequence; sequence i has the blocks from 6 i on."""
    return [
        SequenceSlice([30 + index], context - 1, blocks(*range(6 * index, 6 * index + 6)), "last")
        for index, context in enumerate(contexts)
    ]


def test_decode_takes_the_smallest_graph_that_holds_it_and_pads_it(runner: CudaRunner, capture: FakeCapture) -> None:
    with torch.inference_mode():
        graphs = DecodeGraphs(runner, 3, capture)
        assert capture.shapes == [3, 3, 1, 1]  # the largest first; each for 8 tokens and for any
        runner.pool.normal_()
        for contexts, graph in (([20, 3, 9], 1), ([5, 8], 0), ([9], 3)):
            batch = build_batch(decoded(contexts), block_size=BLOCK)
            expected = runner.run_eagerly(batch)
            before = runner.pool.clone()
            actual = graphs.run(batch)
            assert actual is not None
            assert capture.replayed.pop() == graph
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
            # What both write is the same, and padding writes nothing.
            torch.testing.assert_close(runner.pool, before, atol=1e-5, rtol=1e-5)


def test_what_no_graph_holds_is_left_to_be_run_without(runner: CudaRunner) -> None:
    with torch.inference_mode():
        graphs = DecodeGraphs(runner, 2, lambda _: CapturedStep(pytest.fail, torch.empty(0)))
        prompt = [SequenceSlice([3, 4], 0, blocks(0), "last")]
        silent = [SequenceSlice([3], 0, blocks(0), "none"), SequenceSlice([4], 0, blocks(6), "last")]
        too_long = [SequenceSlice([5], runner.max_model_len, blocks(*range(24), 0), "last")]
        for slices in (decoded([3, 3, 3]), too_long, prompt, silent):
            assert graphs.run(build_batch(slices, block_size=BLOCK)) is None


def test_blocks_side_by_side_are_one_copy() -> None:
    assert list(runs_of([2, 3, 4, 7, 9, 10])) == [(2, 5), (7, 8), (9, 11)]
    assert list(runs_of([])) == []
