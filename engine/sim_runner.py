"""A runner without weights: steps take the time of a cost model, and tokens follow from the K/V bytes it finds.

Each token leaves bytes in every layer of its slot that depend on it and its position. Logits are a function of the
bytes read back for the whole context, so a block that is missing, stale, swapped or damaged in a single byte gives
other tokens; right blocks give the same tokens on every node, in any batch, in chunks of any size.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.fingerprint import Fingerprint
from engine.forward_batch import ForwardBatch
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from kernels import torch_sampling

_Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SimCost:
    """Seconds of a step: a constant, plus so much per computed token, plus so much per token of context read."""

    step_s: float = 0.0
    token_s: float = 0.0
    context_token_s: float = 0.0

    def seconds(self, batch: ForwardBatch) -> float:
        """What computing `batch` takes."""
        return self.step_s + self.token_s * batch.num_tokens + self.context_token_s * sum(batch.context_len_list)


class SimRunner:
    """See the module, and `model_runner.Runner` for the contract.

    Args:
        num_blocks: of the pool.
        layout: of a block; head_dim times the dtype's bytes must be a multiple of 8.
        vocab_size: columns of the logits.
        max_model_len: longest sequence; None is what the pool holds.
        cost: what a step takes.
        sleep: spends the seconds; a virtual clock brings its own.
        model_id: goes into the fingerprint.
        allocate_pool: as for ModelRunner.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        layout: KvLayout | None = None,
        vocab_size: int = 512,
        max_model_len: int | None = None,
        cost: SimCost | None = None,
        sleep: Callable[[float], None] = time.sleep,
        model_id: str = "sim",
        allocate_pool: Callable[[int], memoryview] | None = None,
    ) -> None:
        self.layout = layout or KvLayout(num_layers=2, kv_heads=1, head_dim=4, block_size=16, dtype="float32")
        row_bytes = self.layout.layer_bytes // (2 * self.layout.kv_heads * self.layout.block_size)
        if row_bytes % 8:
            raise ValueError("head_dim times the bytes of the dtype must be a multiple of 8")
        self.fingerprint = Fingerprint.of(self.layout, model_id=model_id, weights_digest="sim", rope_digest="sim")
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        pool_len = num_blocks * self.layout.block_size
        self.max_model_len = pool_len if max_model_len is None else min(max_model_len, pool_len)
        self._cost = cost or SimCost()
        self._sleep = sleep
        num_bytes = num_blocks * self.layout.block_bytes
        self._memory = allocate_pool(num_bytes) if allocate_pool else memoryview(mmap.mmap(-1, num_bytes))
        # [num_blocks, num_layers, 2 * kv_heads, block_size, words of a row]
        self._words: _Words = np.frombuffer(self._memory[:num_bytes], dtype=np.uint64).reshape(
            num_blocks, self.layout.num_layers, 2 * self.layout.kv_heads, self.layout.block_size, row_bytes // 8
        )

    def run(self, batch: ForwardBatch, *, layers_done: c_int64 | None = None) -> torch.Tensor:
        """See Runner."""
        if batch.max_block_id >= self.num_blocks:
            raise ValueError(f"block {batch.max_block_id} is not of this pool of {self.num_blocks}")
        layer_s = self._cost.seconds(batch) / self.layout.num_layers
        content = self._content(batch.token_ids.numpy(), batch.positions.numpy())
        slots = batch.slots.numpy()
        blocks, offsets = np.divmod(slots, self.layout.block_size)
        for layer in range(self.layout.num_layers):
            if layer_s > 0:
                self._sleep(layer_s)
            self._words[blocks, layer, :, offsets] = content[:, layer]
            if layers_done is not None:
                layers_done.value += 1
        states = self._states(batch)
        rows = [self._logits(states[row]) for row in batch.logits_rows.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def copy_block(self, source: BlockId, destination: BlockId) -> None:
        """See Runner."""
        self._words[destination] = self._words[source]

    def block_bytes(self, block_id: BlockId) -> memoryview:
        """See Runner."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not of this pool of {self.num_blocks}")
        size = self.layout.block_bytes
        return self._memory[block_id * size : (block_id + 1) * size]

    def _content(self, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> _Words:
        """What each token leaves in its slot: [T, num_layers, 2 * kv_heads, words]."""
        _, num_layers, heads, _, words = self._words.shape
        places: _Words = np.arange(1, num_layers * heads * words + 1, dtype=np.uint64) * _GOLDEN
        mixed = _mix(token_ids.astype(np.uint64) * _GOLDEN + positions.astype(np.uint64))
        return _mix(mixed[:, None, None, None] + places.reshape(num_layers, heads, words))

    def _states(self, batch: ForwardBatch) -> dict[int, int]:
        """For each row with logits, 64 bits that depend on every byte of its context."""
        _, num_layers, heads, _, words = self._words.shape
        factors = _mix(np.arange(1, num_layers * heads * words + 1, dtype=np.uint64)) | np.uint64(1)
        wanted = set(batch.logits_rows.tolist())
        states: dict[int, int] = {}
        tables = batch.block_tables.numpy()
        for index, context_len in enumerate(batch.context_len_list):
            first, last = batch.query_start_list[index], batch.query_start_list[index + 1]
            if wanted.isdisjoint(range(first, last)):
                continue
            table = tables[index, : self.layout.blocks_for(context_len)]
            # [blocks, layers, heads, block_size, words] -> [tokens, layers * heads * words]
            found = self._words[table].transpose(0, 3, 1, 2, 4).reshape(-1, factors.size)[:context_len]
            digests = (found * factors).sum(axis=1, dtype=np.uint64)
            order = _mix(np.arange(1, context_len + 1, dtype=np.uint64)) | np.uint64(1)
            history = np.cumsum(_mix(digests) * order, dtype=np.uint64)
            start = context_len - (last - first)
            states.update((row, int(history[start + row - first])) for row in range(first, last) if row in wanted)
        return states

    def _logits(self, state: int) -> torch.Tensor:
        """Scores [vocab_size] between 0 and 8 that look random and follow from `state`."""
        ids = torch.arange(self.vocab_size, dtype=torch.int32)
        return torch_sampling.noise_bits((state >> 32, state & 0xFFFFFFFF), ids).to(torch.float32) * 2.0**-28


def _mix(value: _Words) -> _Words:
    """The finaliser of splitmix64."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    result: _Words = value ^ (value >> np.uint64(31))
    return result
