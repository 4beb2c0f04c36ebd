"""The simulated runner: right KV gives the same tokens everywhere, wrong KV others; steps cost what they should."""

from __future__ import annotations

from ctypes import c_int64

import pytest
import torch

from engine.forward_batch import SequenceSlice, build_batch
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from engine.sim_runner import SimCost, SimRunner

LAYOUT = KvLayout(num_layers=3, kv_heads=2, head_dim=4, block_size=4, dtype="float32")
TOKENS = [5, 9, 5, 1, 0, 7, 7, 3, 2, 8]


def runner(**options: object) -> SimRunner:
    return SimRunner(num_blocks=16, layout=LAYOUT, vocab_size=97, **options)  # type: ignore[arg-type]


def logits(sim: SimRunner, tokens: list[int], start: int, blocks: list[int], wanted: str = "last") -> torch.Tensor:
    part = SequenceSlice(tokens, start, [BlockId(b) for b in blocks], wanted)  # type: ignore[arg-type]
    return sim.run(build_batch([part], block_size=4))


def test_logits_follow_from_the_history_alone() -> None:
    whole = logits(runner(), TOKENS, 0, [0, 1, 2], "all")
    assert whole.shape == (10, 97) and whole.dtype == torch.float32
    sim = runner()
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 10)):
        chunk = logits(sim, TOKENS[start:end], start, [7, 3, 11], "all")
        assert torch.equal(chunk, whole[start:end])
    assert len({tuple(row.tolist()) for row in whole}) == 10


def test_batch_mates_change_nothing() -> None:
    sim = runner()
    slices = [
        SequenceSlice(TOKENS, 0, [BlockId(b) for b in (4, 5, 6)], "last"),
        SequenceSlice(TOKENS[:3], 0, [BlockId(8)], "none"),
        SequenceSlice(TOKENS[:2], 0, [BlockId(9)], "last"),
    ]
    rows = sim.run(build_batch(slices, block_size=4))
    assert torch.equal(rows[:1], logits(runner(), TOKENS, 0, [0, 1, 2]))
    assert torch.equal(rows[1:], logits(runner(), TOKENS[:2], 0, [0]))


def test_order_and_content_of_the_history_matter() -> None:
    base = logits(runner(), TOKENS, 0, [0, 1, 2])
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    assert not torch.equal(base, logits(runner(), swapped, 0, [0, 1, 2]))


@pytest.mark.parametrize("place", ["first byte", "last byte", "missing", "swapped"])
def test_damaged_kv_gives_other_tokens(place: str) -> None:
    sim = runner()
    logits(sim, TOKENS[:8], 0, [0, 1, 2], "none")
    expected = logits(sim, TOKENS[8:], 8, [0, 1, 2])
    block = sim.block_bytes(BlockId(1))
    blocks = [0, 1, 2]
    if place == "first byte":
        block[0] ^= 1
    elif place == "last byte":
        block[-1] ^= 1
    elif place == "missing":
        block[:] = bytes(len(block))
    else:
        blocks = [1, 0, 2]
    assert not torch.equal(logits(sim, TOKENS[8:], 8, blocks), expected)


def test_blocks_moved_as_bytes_to_another_runner_continue() -> None:
    source, destination = runner(), runner()
    expected = logits(source, TOKENS, 0, [0, 1, 2])
    for block, target in ((0, 9), (1, 4)):
        destination.block_bytes(BlockId(target))[:] = source.block_bytes(BlockId(block))
    destination.copy_block(BlockId(4), BlockId(5))
    assert torch.equal(logits(destination, TOKENS[8:], 8, [9, 5, 1]), expected)
    assert len(source.block_bytes(BlockId(0))) == LAYOUT.block_bytes


def test_stale_content_of_a_reused_block_is_not_read() -> None:
    clean, dirty = runner(), runner()
    for block in range(16):
        dirty.block_bytes(BlockId(block))[:] = b"\xff" * LAYOUT.block_bytes
    assert torch.equal(logits(clean, TOKENS, 0, [0, 1, 2]), logits(dirty, TOKENS, 0, [0, 1, 2]))


def test_layers_are_counted_while_they_are_written() -> None:
    layers_done = c_int64()
    counted: list[int] = []
    sim = runner(cost=SimCost(step_s=3.0), sleep=lambda seconds: counted.append(layers_done.value))
    batch = build_batch([SequenceSlice([5], 0, [BlockId(2)], "last")], block_size=4)
    sim.run(batch, layers_done=layers_done)
    assert counted == [0, 1, 2] and layers_done.value == 3


def test_a_step_costs_what_the_model_says() -> None:
    slept: list[float] = []
    sim = runner(cost=SimCost(step_s=1.0, token_s=0.1, context_token_s=0.01), sleep=slept.append)
    logits(sim, TOKENS, 0, [0, 1, 2])
    assert sum(slept) == pytest.approx(1.0 + 1.0 + 0.1)
    logits(sim, [1], 10, [0, 1, 2])
    assert sum(slept) == pytest.approx(2.1 + 1.0 + 0.1 + 0.11)


def test_block_ids_outside_the_pool_are_refused() -> None:
    with pytest.raises(ValueError):
        logits(runner(), [1], 0, [16])
    with pytest.raises(ValueError):
        runner().block_bytes(BlockId(16))


def test_limits() -> None:
    assert runner().max_model_len == 64
    assert runner(max_model_len=10).max_model_len == 10
    assert runner(max_model_len=1000).max_model_len == 64
    with pytest.raises(ValueError):
        SimRunner(num_blocks=2, layout=KvLayout(1, 1, 3, 4, "float16"))
