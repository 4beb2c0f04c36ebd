"""A tiny real model to measure, and limits that are given rather than measured."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.machine import MachineLimits
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.model_store import ModelFiles
from tests.tiny_model import build_tiny_model

LIMITS = MachineLimits(1, 10.0, {"float32": 8.0}, {"float32": 100.0})
"""10 FLOPs per byte."""


def tiny_runner(folder: Path, *, num_blocks: int = 128) -> ModelRunner:
    """A llama of 2 layers in float32, with blocks of 16 tokens."""
    torch.set_num_threads(1)
    files = ModelFiles("tiny", build_tiny_model(folder))
    return ModelRunner(EngineConfig(model="tiny", dtype="float32", num_blocks=num_blocks, num_threads=1), files)
