"""One cluster for all tests that hurt it, so that starting costs once; each test leaves it whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.conftest import tiny_model

__all__ = ["tiny_model"]

PROGRESS_DEADLINE_S = 2.0


@pytest.fixture(scope="session")
def shared_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    """Two prefill nodes, two decode nodes, two routers."""
    deadline = ["--progress-deadline", str(PROGRESS_DEADLINE_S)]
    cluster = ClusterProcesses(
        tmp_path_factory.mktemp("cluster"),
        tiny_model,
        prefill_nodes=2,
        decode_nodes=2,
        routers=2,
        node_flags=[*deadline, "--num-blocks", "128"],
        router_flags=deadline,
    )
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def cluster(shared_cluster: ClusterProcesses) -> Iterator[ClusterProcesses]:
    """The shared cluster, whole before and after the test, with nothing held."""
    shared_cluster.wait_for_nodes(4)
    yield shared_cluster
    for member in shared_cluster.members.values():
        assert member.process is not None
        if member.process.poll() is not None:
            member.start()
    for router in (0, 1):
        shared_cluster.wait_for_nodes(4, router)
    shared_cluster.assert_idle(timeout_s=15.0)
