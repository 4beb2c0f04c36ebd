"""Computes a ForwardBatch on a CUDA device: Triton kernels, decode under CUDA graphs, and host bytes for every block.

The pool lives on the device; `block_bytes` lends the same block of a pinned mirror on the host. One set says which side
is behind, for each block:

    run writes a block     -> the host is behind  -> copied down when `block_bytes` lends it
    `block_bytes` lends it -> the device may be behind -> copied up before the next run that reads it

So nodes need no calls of their own around a hand-off: whoever writes through a view got it from `block_bytes` first,
and no run reads a block before it is committed.

With the device `cpu` all of it runs, except graphs, when Triton's kernels are interpreted: that is how it is tested.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.forward_batch import ForwardBatch, SequenceSlice, build_batch
from engine.fused_modules import fuse
from engine.ids import BlockId
from engine.model_loader import load_model
from engine.model_runner import max_model_len_of, num_blocks_of, pool_tensor, private_memory
from engine.model_store import ModelFiles
from engine.paged_cache import ATTENTION_NAME, PagedCache
from engine.pinned_memory import PinnedMemory
from kernels import ops

logger = logging.getLogger(__name__)

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LONGEST_BUCKETS = (256, 2048)
"""Graphs are captured for so many sequences and for contexts up to so many tokens; beyond the last, for any context."""

_SPARE_BYTES = 512 * 1024 * 1024
"""Device memory left to activations and graphs when the pool is checked against what is free."""


class CudaRunner:
    """A transformers model and its paged pool on one CUDA device. See Runner.

    Logits stay on the device. Sequences of a batch are attended to independently, to the bit; matrix products are
    cuBLAS's, whose bits can depend on the number of rows.

    Args:
        config: what to compute with; `device` is `cuda`, `cuda:N`, or `cpu` for tests.
        files: the model on disk.

    Raises:
        ConfigError: there is no such device, or the model or the pool cannot work on it.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self._device = _device_of(config.device)
        torch.manual_seed(config.seed)
        loaded = load_model(
            files, dtype=config.dtype, device=config.device, block_size=config.block_size, attention=ATTENTION_NAME
        )
        self.layout = loaded.layout
        self.fingerprint = loaded.fingerprint
        self.vocab_size = loaded.vocab_size
        if self.layout.head_dim % 16:
            raise ConfigError(
                f"the GPU kernels take head dimensions that are multiples of 16, and this model's is "
                f"{self.layout.head_dim}"
            )
        self._model = loaded.model
        self.fused = fuse(self._model)
        self.num_blocks = num_blocks_of(config, self.layout)
        self.max_model_len = max_model_len_of(config, loaded.max_position, self.num_blocks)
        num_bytes = self.num_blocks * self.layout.block_bytes
        self._check_memory(num_bytes)
        self._pinned = PinnedMemory(num_bytes) if self._on_gpu else None
        self._bytes = private_memory(num_bytes) if self._pinned is None else self._pinned.view
        self._mirror = pool_tensor(self._bytes, self.layout, self.num_blocks)
        self.pool = torch.zeros_like(self._mirror, device=self._device)
        # Guards the two sets: `run` has a thread of its own.
        self._lock = threading.Lock()
        self._host_is_behind: set[int] = set()
        self._device_may_be_behind: set[int] = set()
        self._copies = torch.cuda.Stream(self._device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._computed = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._smoke_test()
        self._graphs = self._captured(config.max_num_seqs) if self._on_gpu else None
        logger.info(
            "model_ready model=%s forward=triton fused=%d dtype=%s device=%s num_blocks=%d block_bytes=%d "
            "pool_bytes=%d max_model_len=%d vocab_size=%d",
            self.fingerprint.model_id,
            self.fused,
            self.layout.dtype,
            self._device,
            self.num_blocks,
            self.layout.block_bytes,
            num_bytes,
            self.max_model_len,
            self.vocab_size,
        )

    def _current(self) -> AbstractContextManager[Any]:
        """Makes the device the current one, which is a matter of each thread: nodes call from three."""
        return torch.cuda.device(self._device) if self._on_gpu else nullcontext()

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, *, layers_done: c_int64 | None = None) -> torch.Tensor:
        """See Runner. The batch may be on the host: best so, since it then costs no wait."""
        if batch.max_block_id >= self.num_blocks:
            raise ValueError(f"block {batch.max_block_id} is not of this pool of {self.num_blocks}")
        written = set((batch.slots // self.layout.block_size).tolist())
        with self._current():
            self._copy_up(batch)
            logits = None if self._graphs is None else self._graphs.run(batch)
            if logits is None:
                logits = self.run_eagerly(batch, layers_done)
            elif layers_done is not None:
                layers_done.value += self.layout.num_layers
            if self._computed is not None:
                # A step ends when it is computed: what is measured is true, and neither loop nor mirror meets it.
                self._computed.record()
                self._computed.synchronize()
        with self._lock:
            self._host_is_behind |= written
        return logits

    def run_eagerly(self, batch: ForwardBatch, layers_done: c_int64 | None = None) -> torch.Tensor:
        """Without a graph."""
        plan = ops.gpu_plans()(
            self.pool,
            slots=batch.slots.to(self._device, non_blocking=True),
            query_starts=batch.query_start_list,
            context_lens=batch.context_len_list,
            block_tables=batch.block_tables.to(self._device, non_blocking=True),
        )
        return self.forward(plan, batch.token_ids, batch.positions, batch.logits_rows, layers_done)

    def forward(
        self,
        plan: ops.Plan,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor,
        layers_done: c_int64 | None,
    ) -> torch.Tensor:
        """One pass of the model; `[R, vocab_size]` float32."""
        cache = PagedCache(plan, layers_done=layers_done)
        output = self._model(
            input_ids=token_ids.to(self._device, non_blocking=True)[None],
            position_ids=positions.to(self._device, non_blocking=True)[None],
            cache=cache,
            paged_cache=cache,
            use_cache=True,
            logits_to_keep=logits_rows.to(self._device, non_blocking=True),
        )
        assert cache.num_written == self.layout.num_layers, "loading has refused models that skip layers"
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def copy_block(self, source: BlockId, destination: BlockId) -> None:
        """See Runner."""
        with self._current():
            self._copy_blocks_up([source])
            self.pool[destination].copy_(self.pool[source])
            if self._computed is not None:
                self._computed.record()
        with self._lock:
            self._device_may_be_behind.discard(destination)
            self._host_is_behind.add(destination)

    def block_bytes(self, block_id: BlockId) -> memoryview:
        """See Runner. Waits for the device where the block was computed since it was last lent."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not of this pool of {self.num_blocks}")
        with self._lock, self._current():
            if block_id in self._host_is_behind:
                self._copy_down(block_id)
                self._host_is_behind.discard(block_id)
            self._device_may_be_behind.add(block_id)
        size = self.layout.block_bytes
        return self._bytes[block_id * size : (block_id + 1) * size]

    def _copy_down(self, block_id: int) -> None:
        if self._copies is None or self._computed is None:
            self._mirror[block_id].copy_(self.pool[block_id])
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._computed)
            self._mirror[block_id].copy_(self.pool[block_id], non_blocking=True)
        self._copies.synchronize()

    def _copy_up(self, batch: ForwardBatch) -> None:
        """Blocks of the batch that the host may have written since the device last saw them."""
        with self._lock:
            if not self._device_may_be_behind:
                return
        size = self.layout.block_size
        tables = batch.block_tables.tolist()
        used = {
            block
            for table, context in zip(tables, batch.context_len_list, strict=True)
            for block in table[: -(-context // size)]
        }
        self._copy_blocks_up(sorted(used))

    def _copy_blocks_up(self, block_ids: list[int] | list[BlockId]) -> None:
        with self._lock:
            wanted = [block for block in block_ids if block in self._device_may_be_behind]
            self._device_may_be_behind.difference_update(wanted)
        for first, end in runs_of(wanted):
            self.pool[first:end].copy_(self._mirror[first:end], non_blocking=True)

    def _check_memory(self, num_bytes: int) -> None:
        if not self._on_gpu:
            return
        free = torch.cuda.mem_get_info(self._device)[0]
        if num_bytes + _SPARE_BYTES > free:
            raise ConfigError(
                f"a KV pool of {self.num_blocks} blocks needs {num_bytes} bytes, and {self._device} has {free} bytes "
                f"free, of which {_SPARE_BYTES} are for activations"
            )

    def _captured(self, most: int) -> DecodeGraphs | None:
        try:
            # A capture that fails leaves its own stream the current one.
            with torch.cuda.stream(torch.cuda.current_stream(self._device)):
                return DecodeGraphs(self, most, _CudaCapture())
        except RuntimeError as error:
            # Some models wait for the device in every step; they are right without graphs, only slower.
            logger.warning("graphs_not_used reason=%s", " ".join(str(error).split())[:200])
            return None

    @torch.inference_mode()
    def _smoke_test(self) -> None:
        """A prompt of two tokens and one decoded must give finite logits; compiles both kernels on the way."""
        blocks = [BlockId(0), BlockId(1)]
        prompt = list(range(min(2, self.layout.block_size, self.vocab_size)))
        slices = [
            SequenceSlice(prompt, 0, blocks, "all"),
            SequenceSlice([len(prompt) % self.vocab_size], len(prompt), blocks, "last"),
        ]
        for part in slices:
            batch = build_batch([part], block_size=self.layout.block_size)
            logits = self.run_eagerly(batch)
            if logits.shape[1] != self.vocab_size:
                raise ConfigError(f"the model gives {logits.shape[1]} logits where {self.vocab_size} were expected")
            if not bool(torch.isfinite(logits).all()):
                raise ConfigError("the model's logits are not finite: its weights are broken or its dtype too narrow")
        self.pool[:2].zero_()


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step that `replay` computes again, over the same tensors as when it was captured, into `logits`."""

    replay: Callable[[], None]
    logits: torch.Tensor


class _CudaCapture:
    """Captures steps as CUDA graphs that share their memory: the largest has to come first."""

    def __init__(self) -> None:
        self._memory: Any = None

    def __call__(self, step: Callable[[], torch.Tensor]) -> CapturedStep:
        step()  # Compiles and allocates what may not be done while capturing.
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = step()
        self._memory = graph.pool()
        return CapturedStep(graph.replay, logits)


class DecodeGraphs:
    """Decode steps, captured for buckets of sequences and of contexts, over numbers that lie at fixed places.

    A batch takes the smallest bucket that holds it; the places it leaves over are padding: no context, slot -1.

    Args:
        runner: whose model and pool.
        most: sequences of the largest bucket.
        capture: makes a graph of a step.
    """

    def __init__(
        self, runner: CudaRunner, most: int, capture: Callable[[Callable[[], torch.Tensor]], CapturedStep]
    ) -> None:
        self._runner = runner
        self._sizes = sorted({*(size for size in _BATCH_BUCKETS if size < most), most})
        bounds = {*(longest for longest in _LONGEST_BUCKETS if longest < runner.max_model_len), runner.max_model_len}
        self._bounds = sorted(bounds)
        block_size = runner.layout.block_size
        device = runner.pool.device
        width = -(-runner.max_model_len // block_size)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(most, dtype=torch.int64, device=device)
        self._tables = torch.zeros(most, width, dtype=torch.int64, device=device)
        self._starts = torch.arange(most + 1, device=device)
        # Host side of the first four, so that one step is two copies.
        on_gpu = device.type == "cuda"
        self._numbers = torch.zeros(4, most, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._graphs = self._captured_by(capture)

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits of the batch; None when no bucket fits it."""
        count, longest = len(batch.context_len_list), max(batch.context_len_list)
        size = next((size for size in self._sizes if size >= count), None)
        bound = next((bound for bound in self._bounds if bound >= longest), None)
        if size is None or bound is None or batch.num_tokens != count or len(batch.logits_rows) != count:
            return None
        if self._copied is not None:
            self._copied.synchronize()  # The last step's copies have read the host side.
        numbers = self._numbers
        numbers[:, :size] = 0
        numbers[2, :size] = -1
        for row, values in enumerate((batch.token_ids, batch.positions, batch.slots, batch.context_lens)):
            numbers[row, :count] = values
        for row, target in enumerate((self._token_ids, self._positions, self._slots, self._contexts)):
            target[:size].copy_(numbers[row, :size], non_blocking=True)
        self._tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        captured = self._graphs[size, bound]
        captured.replay()
        return captured.logits[:count].clone()

    @torch.inference_mode()
    def _captured_by(
        self, capture: Callable[[Callable[[], torch.Tensor]], CapturedStep]
    ) -> dict[tuple[int, int], CapturedStep]:
        # The largest first: the others then fit in its memory.
        graphs = {
            (size, bound): capture(partial(self._forward, size, bound))
            for size in reversed(self._sizes)
            for bound in self._bounds
        }
        logger.info("graphs_captured count=%d sequences=%s contexts=%s", len(graphs), self._sizes, self._bounds)
        return graphs

    def _forward(self, size: int, longest: int) -> torch.Tensor:
        plan = ops.gpu_plans().for_decode(
            self._runner.pool,
            slots=self._slots[:size],
            query_starts=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            block_tables=self._tables[:size],
            longest=longest,
        )
        return self._runner.forward(plan, self._token_ids[:size], self._positions[:size], self._starts[:size], None)


def runs_of(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending ids as half-open ranges, so that blocks that lie side by side are one copy."""
    first = 0
    for place, block in enumerate(block_ids, start=1):
        if place == len(block_ids) or block_ids[place] != block + 1:
            yield block_ids[first], block + 1
            first = place


def _device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be one that torch names, not {name!r}") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device must be cpu or cuda, not {name!r}: no other device is supported")
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, and torch finds no such CUDA device here")
    torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())
