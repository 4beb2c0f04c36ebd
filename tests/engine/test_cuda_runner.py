"""The CUDA runner equals the torch runner token by token, on interpreted kernels; its blocks have bytes on the host."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int64
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.forward_batch import SequenceSlice, build_batch
from engine.ids import BlockId
from engine.model_runner import ModelRunner, Runner
from engine.model_store import ModelFiles
from tests.kernels.triton_interpreter import interpreted, load
from tests.tiny_model import build_tiny_model

load("triton_attention")
load("triton_elementwise")

from engine import fused_modules  # noqa: E402  # over the interpreted kernels
from engine.cuda_runner import CudaRunner  # noqa: E402

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
