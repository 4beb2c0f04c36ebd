"""Fixtures of the tests with real processes: one cluster per module, so that starting costs once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster_processes import ClusterProcesses
from tests.tiny_model import build_tiny_model

ClusterFactory = Callable[..., ClusterProcesses]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def make_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterFactory]:
    """Starts clusters; the last one is stopped when the next starts, or with the module."""
    running: list[ClusterProcesses] = []

    def make(**arguments: Any) -> ClusterProcesses:
        while running:
            running.pop().stop()
        cluster = ClusterProcesses(tmp_path_factory.mktemp("cluster"), tiny_model, **arguments)
        running.append(cluster)
        return cluster.start()

    yield make
    while running:
        running.pop().stop()
