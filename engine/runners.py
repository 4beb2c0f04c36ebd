"""Which runner computes on a device. Loads nothing of the others."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_runner import ModelRunner, Runner
from engine.model_store import ModelFiles


def make_runner(
    config: EngineConfig, files: ModelFiles, *, allocate_pool: Callable[[int], memoryview] | None = None
) -> Runner:
    """The runner for `config.device`. Blocks while the model loads.

    Args:
        config: what to compute with.
        files: the model on disk.
        allocate_pool: as ModelRunner takes it; for the device `cpu` alone, since other pools are not host memory.

    Raises:
        ConfigError: the device, the model, its lengths or its pool cannot work here.
    """
    if config.device == "cpu":
        return ModelRunner(config, files, allocate_pool=allocate_pool)
    assert allocate_pool is None, "only the host's memory can be lent to a pool"
    try:
        from engine.cuda_runner import CudaRunner
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            f"device {config.device!r} needs the package triton: install pdserve with the extra gpu"
        ) from error
    return CudaRunner(config, files)
