"""Computes a ForwardBatch on a real model: tokens in, logits out, K/V into the pool. Knows no requests."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from ctypes import c_int64
from itertools import pairwise
from typing import Protocol

import torch

from engine.available_memory import available_bytes
from engine.compiled_weights import compile_weights
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.fingerprint import Fingerprint
from engine.forward_batch import ForwardBatch, SequenceSlice, build_batch
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from engine.lean_forward import LeanForward, lean_forward_of
from engine.model_loader import load_model
from engine.model_store import ModelFiles
from engine.paged_cache import ATTENTION_NAME, PagedCache, UnsupportedModel, host_plan
from kernels.cpu_library import load_library

logger = logging.getLogger(__name__)

_SMOKE_TOKENS = 21
_SMOKE_BOUND = {"float32": 1e-3, "bfloat16": 0.2}
"""How far the logits of two correct forward passes may be apart: the median over rows, as a share of a row's spread.
With 16 bits it is the generic one that rounds after every operation, and some tokens suffer most of it: the first of
SmolLM2 is off by a quarter."""


class Runner(Protocol):
    """What a node's engine computes with. `run` is called from one worker thread; the rest from any.

    Attributes:
        layout: of a block.
        fingerprint: of the model.
        vocab_size: columns of the logits.
        max_model_len: longest prompt plus output in tokens.
        num_blocks: blocks of the pool.
    """

    layout: KvLayout
    fingerprint: Fingerprint
    vocab_size: int
    max_model_len: int
    num_blocks: int

    def run(self, batch: ForwardBatch, *, layers_done: c_int64 | None = None) -> torch.Tensor:
        """Compute a batch; returns `[R, vocab_size]` float32, a tensor of the caller's own.

        `layers_done` is counted up, by this thread alone, whenever the K and V of one more layer are in the pool.
        """
        ...

    def copy_block(self, source: BlockId, destination: BlockId) -> None:
        """Copy all layers of a block."""
        ...

    def block_bytes(self, block_id: BlockId) -> memoryview:
        """The writable bytes of one block, `layout.block_bytes` long."""
        ...


class ModelRunner:
    """A transformers model over a paged pool. See Runner.

    Args:
        config: what to compute with.
        files: the model on disk.
        allocate_pool: gives zeroed memory of so many bytes for the pool, which must outlive the runner; None takes
            private memory.

    Attributes:
        forward: `lean` where one call of the compiled kernels computes a batch; else transformers' own forward does,
            and its products are `compiled`, or `torch`'s.

    Raises:
        ConfigError: the model, its lengths or its pool cannot work here.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        *,
        allocate_pool: Callable[[int], memoryview] | None = None,
    ) -> None:
        if config.device != "cpu":
            raise ConfigError(f"device must be cpu, not {config.device!r}: this runner computes on the host")
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        loaded = load_model(
            files, dtype=config.dtype, device=config.device, block_size=config.block_size, attention=ATTENTION_NAME
        )
        self._model = loaded.model
        self.layout = loaded.layout
        self.fingerprint = loaded.fingerprint
        self.vocab_size = loaded.vocab_size
        self.num_blocks = num_blocks_of(config, self.layout)
        self.max_model_len = max_model_len_of(config, loaded.max_position, self.num_blocks)
        num_bytes = self.num_blocks * self.layout.block_bytes
        self._memory = (allocate_pool or private_memory)(num_bytes)
        self.pool = pool_tensor(self._memory, self.layout, self.num_blocks)
        logits = self._smoke_test()
        self._lean = self._lean_forward(logits)
        self.forward = "lean" if self._lean is not None else "compiled" if self._compile_weights(logits) else "torch"
        logger.info(
            "model_ready model=%s forward=%s dtype=%s num_blocks=%d block_bytes=%d pool_bytes=%d max_model_len=%d "
            "vocab_size=%d",
            self.fingerprint.model_id,
            self.forward,
            self.layout.dtype,
            self.num_blocks,
            self.layout.block_bytes,
            num_bytes,
            self.max_model_len,
            self.vocab_size,
        )

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, *, layers_done: c_int64 | None = None) -> torch.Tensor:
        """See Runner."""
        if batch.max_block_id >= self.num_blocks:
            raise ValueError(f"block {batch.max_block_id} is not of this pool of {self.num_blocks}")
        if self._lean is not None:
            return self._lean.run(batch, layers_done)
        return self._run_generic(batch, layers_done)

    def _run_generic(self, batch: ForwardBatch, layers_done: c_int64 | None = None) -> torch.Tensor:
        """By transformers' own forward."""
        cache = PagedCache(host_plan(self.pool, batch), layers_done=layers_done)
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            cache=cache,
            paged_cache=cache,
            use_cache=True,
            logits_to_keep=batch.logits_rows,
        )
        if cache.num_written != self.layout.num_layers:
            raise UnsupportedModel(f"{cache.num_written} of {self.layout.num_layers} layers wrote their K/V")
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def copy_block(self, source: BlockId, destination: BlockId) -> None:
        """See Runner."""
        self.pool[destination].copy_(self.pool[source])

    def block_bytes(self, block_id: BlockId) -> memoryview:
        """See Runner."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not of this pool of {self.num_blocks}")
        size = self.layout.block_bytes
        return self._memory[block_id * size : (block_id + 1) * size]

    def _smoke_test(self) -> torch.Tensor:
        """A short prompt and one decoded token must give logits with meaning.

        A single row may be constant: the embedding of a padding token is often all zeros.
        """
        try:
            logits = self._smoke_logits(self._run_generic)
        except (UnsupportedModel, TypeError, AttributeError) as error:
            raise ConfigError(f"model {self.fingerprint.model_id} cannot run on paged attention: {error}") from error
        if logits.shape[1] != self.vocab_size:
            raise ConfigError(f"the model gives {logits.shape[1]} logits where {self.vocab_size} were expected")
        if not bool(torch.isfinite(logits).all()):
            raise ConfigError("the model's logits are not finite: its weights are broken or its dtype is too narrow")
        if bool((logits.amax(dim=-1) == logits.amin(dim=-1)).all()):
            raise ConfigError("the model's logits are all equal: its weights were not loaded")
        return logits

    @torch.inference_mode()
    def _smoke_logits(self, run: Callable[[ForwardBatch], torch.Tensor], *, whole: bool = False) -> torch.Tensor:
        """Logits of a few tokens, in the first two blocks, which are zeroed again; the last one decoded, or not."""
        blocks = [BlockId(0), BlockId(1)]
        tokens = [(place * 97 + 5) % self.vocab_size for place in range(min(_SMOKE_TOKENS, 2 * self.layout.block_size))]
        ends = [0, len(tokens)] if whole else [0, len(tokens) - 1, len(tokens)]
        slices = [SequenceSlice(tokens[first:last], first, blocks, "all") for first, last in pairwise(ends)]
        passes = [run(build_batch([part], block_size=self.layout.block_size)) for part in slices]
        self.pool[:2].zero_()
        return torch.cat(passes)

    def _lean_forward(self, generic: torch.Tensor) -> LeanForward | None:
        """The compiled forward, if the model has one and it gives the logits that `generic` gave."""
        num_positions = max(self.max_model_len, _SMOKE_TOKENS)
        lean = lean_forward_of(self._model, self.pool, num_positions=num_positions)
        if lean is None:
            return None
        logits = self._smoke_logits(lean.run)
        # A prompt's last token and a decoded one take different ways to the same bits.
        if not torch.equal(logits, self._smoke_logits(lean.run, whole=True)):  # NaN is not equal either
            logger.warning("lean_forward_not_used reason=decoding_differs_from_prefill")
            return None
        if not self._agree(logits, generic):
            logger.warning("lean_forward_not_used reason=logits_differ")
            return None
        return lean

    def _compile_weights(self, generic: torch.Tensor) -> bool:
        """Put the compiled products under the model, if it then gives the logits that `generic` gave."""
        library = load_library()
        if library is None:
            return False
        try:
            take_back = compile_weights(self._model, library, num_threads=torch.get_num_threads())
        except ValueError as error:
            logger.info("compiled_products_not_used reason=%s", error)
            return False
        try:
            agree = self._agree(self._smoke_logits(self._run_generic), generic)
            reason = "logits_differ"
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            # The model does something to its weights that they cannot take.
            agree, reason = False, " ".join(str(error).split())[:200]
        if not agree:
            logger.warning("compiled_products_not_used reason=%s", reason)
            take_back()
        return agree

    def _agree(self, logits: torch.Tensor, generic: torch.Tensor) -> bool:
        """Whether two forward passes computed the same, as near as their dtype lets them."""
        # A constant on all logits of a row means nothing.
        ours, theirs = (rows - rows.mean(-1, keepdim=True) for rows in (logits, generic))
        difference = float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).nanmedian())
        bound = _SMOKE_BOUND[self.layout.dtype]
        logger.debug("smoke_test difference=%g bound=%g", difference, bound)
        return difference <= bound  # NaN is not


def num_blocks_of(config: EngineConfig, layout: KvLayout) -> int:
    """Blocks of the pool, by number or by memory; ConfigError when too few, or more than the machine can hold."""
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = config.kv_memory_bytes // layout.block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"a KV pool of {config.kv_memory_bytes} bytes holds fewer than 2 blocks of {layout.block_bytes} bytes"
            )
    wanted, available = num_blocks * layout.block_bytes, available_bytes()
    if wanted > available:
        raise ConfigError(
            f"a KV pool of {num_blocks} blocks needs {wanted} bytes, and only {available} bytes of memory are available"
        )
    return num_blocks


def max_model_len_of(config: EngineConfig, model_limit: int, num_blocks: int) -> int:
    """The least of what is asked for, what the model can do and what the pool holds; ConfigError above the model's."""
    if config.max_model_len is not None and config.max_model_len > model_limit:
        raise ConfigError(f"max_model_len of {config.max_model_len} is more than the model's {model_limit}")
    pool_limit = num_blocks * config.block_size
    wanted = model_limit if config.max_model_len is None else config.max_model_len
    if wanted > pool_limit:
        logger.warning("max_model_len_reduced wanted=%d pool_holds=%d", wanted, pool_limit)
    return min(wanted, pool_limit)


def pool_tensor(memory: memoryview, layout: KvLayout, num_blocks: int) -> torch.Tensor:
    """The pool `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]` over given memory, without a copy."""
    num_bytes = num_blocks * layout.block_bytes
    if len(memory) < num_bytes:
        raise ValueError(f"{num_blocks} blocks need {num_bytes} bytes, not {len(memory)}")
    flat = torch.frombuffer(memory[:num_bytes], dtype=torch.uint8).view(getattr(torch, layout.dtype))
    return flat.view(num_blocks, layout.num_layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)


def private_memory(num_bytes: int) -> memoryview:
    """Zeroed memory of this process."""
    # Mapped rather than allocated: zeroed, aligned to pages, and taken from the machine only as it is touched.
    return memoryview(mmap.mmap(-1, num_bytes))
