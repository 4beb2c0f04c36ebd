"""Makes the copies of blocks that the scheduler asks for. Knows no requests.

They are made in the step's thread, one by one in the order asked for, before the step computes. So nothing races with
them: no step writes meanwhile, and prefill nodes write only into blocks that were promised to them, none of which the
scheduler promises or frees for others before the step is over (see scheduler.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decode_node.host_copies import RestoreBlocks, SaveBlocks
from decode_node.scheduler import BlockMove, CopyBlock
from engine.ids import BlockId
from engine.model_runner import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MovesMade:
    """What became of a step's moves.

    Attributes:
        seconds: they took altogether.
        host_bytes: copied to and from host memory.
        host_seconds: that took.
        failed: moves that could not be made; the others were.
    """

    seconds: float = 0.0
    host_bytes: int = 0
    host_seconds: float = 0.0
    failed: tuple[BlockMove, ...] = ()


def make_moves(moves: Sequence[BlockMove], runner: Runner, moves_done: c_int64) -> MovesMade:
    """Make them in order. Blocks while it copies; `moves_done` is counted up after each.

    What can be computed again, or placed elsewhere, fails alone; a copy within the pool that fails raises.
    """
    host_bytes, host_seconds, failed = 0, 0.0, list[BlockMove]()
    begun_s = time.perf_counter()
    for move in moves:
        if isinstance(move, CopyBlock):
            runner.copy_block(move.source, move.destination)
        else:
            started_s = time.perf_counter()
            try:
                _save(move, runner) if isinstance(move, SaveBlocks) else _restore(move, runner)
            except Exception as error:  # Whatever it was, it must not end the streams that share the step.
                logger.warning(
                    "swap_failed move=%s blocks=%d error=%s",
                    "save" if isinstance(move, SaveBlocks) else "restore",
                    len(move.block_ids),
                    type(error).__name__,
                )
                failed.append(move)
            else:
                host_bytes += len(move.block_ids) * runner.layout.block_bytes
                host_seconds += time.perf_counter() - started_s
        moves_done.value += 1
    return MovesMade(time.perf_counter() - begun_s, host_bytes, host_seconds, tuple(failed))


def _save(move: SaveBlocks, runner: Runner) -> None:
    if move.copy.data is None:
        # Not zeroed: every byte is written before any is read.
        move.copy.data = np.empty((move.copy.num_blocks, runner.layout.block_bytes), dtype=np.uint8)
    for row, block_id in zip(_rows(move), move.block_ids, strict=True):
        # Unlike slices of a memoryview, numpy copies without holding the interpreter's lock.
        np.copyto(row, _block(runner, block_id))


def _restore(move: RestoreBlocks, runner: Runner) -> None:
    for row, block_id in zip(_rows(move), move.block_ids, strict=True):
        np.copyto(_block(runner, block_id), row)


def _rows(move: SaveBlocks | RestoreBlocks) -> npt.NDArray[np.uint8]:
    data = move.copy.data
    assert isinstance(data, np.ndarray), "what was never saved is never restored"
    return data[move.first_block : move.first_block + len(move.block_ids)]


def _block(runner: Runner, block_id: BlockId) -> npt.NDArray[np.uint8]:
    return np.frombuffer(runner.block_bytes(block_id), dtype=np.uint8)
