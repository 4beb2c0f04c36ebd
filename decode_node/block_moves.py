"""Makes the copies of blocks that the scheduler asks for. Knows no sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from decode_node.costs import Costs
from decode_node.scheduler import BlockMove, CopyBlock, RestoreBlocks, SaveBlocks
from engine.model_runner import Runner

logger = logging.getLogger(__name__)


def make_moves(moves: Sequence[BlockMove], runner: Runner, costs: Costs) -> None:
    """Make them in order; blocks while it copies, some milliseconds for a thousand tokens."""
    for move in moves:
        match move:
            case CopyBlock(source, destination):
                runner.copy_block(source, destination)
            case SaveBlocks() | RestoreBlocks():
                started_s = time.perf_counter()
                _save(move, runner) if isinstance(move, SaveBlocks) else _restore(move, runner)
                num_bytes = len(move.block_ids) * runner.layout.block_bytes
                costs.copied.record(num_bytes, time.perf_counter() - started_s)


def _save(move: SaveBlocks, runner: Runner) -> None:
    size = runner.layout.block_bytes
    try:
        # Not zeroed: every byte is written below.
        data = np.empty(len(move.block_ids) * size, dtype=np.uint8).data
    except MemoryError:
        logger.warning("swap_failed blocks=%d reason=out_of_memory", len(move.block_ids))
        return  # Without data the scheduler has it computed again.
    for index, block_id in enumerate(move.block_ids):
        data[index * size : (index + 1) * size] = runner.block_bytes(block_id)
    move.copy.data = data


def _restore(move: RestoreBlocks, runner: Runner) -> None:
    size = runner.layout.block_bytes
    data = move.copy.data
    assert isinstance(data, memoryview), "a copy without data is never restored"
    for index, block_id in enumerate(move.block_ids, start=move.first_block):
        runner.block_bytes(block_id)[:] = data[index * size : (index + 1) * size]
