"""One cluster for all tests that hurt it, so that starting costs once; each test leaves it whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import ClusterProcesses, slow_steps, wait_until
from tests.e2e.conftest import tiny_model

__all__ = ["tiny_model"]

PROGRESS_DEADLINE_S = 2.0

Footprints = dict[int, tuple[str, int, int]]


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
        faults={"decode-0": slow_steps(0.01), "decode-1": slow_steps(0.01)},
    )
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def cluster(shared_cluster: ClusterProcesses) -> Iterator[ClusterProcesses]:
    """The shared cluster, whole before and after the test; afterwards nothing is held, stale or left behind."""
    shared_cluster.wait_for_nodes(4)
    before = shared_cluster.footprints()
    yield shared_cluster
    for member in shared_cluster.members.values():
        assert member.process is not None
        if member.process.poll() is not None:
            member.start()
    for router in (0, 1):
        shared_cluster.wait_for_nodes(4, router)
    shared_cluster.assert_idle(timeout_s=15.0)
    wait_until(lambda: not shared_cluster.dead_directory_entries(), 5.0, "no entry of a dead incarnation is left")
    wait_until(lambda: not _grown(before, shared_cluster.footprints()), 10.0, "files and threads are back")
    assert not [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("pdserve")]


def _grown(before: Footprints, now: Footprints) -> list[str]:
    """Processes that have more open files or threads than before; a few connections to restarted peers may differ."""
    return [
        f"{name}: {files} files, {threads} threads; before: {before[pid][1:]}"
        for pid, (name, files, threads) in now.items()
        if pid in before and (files > before[pid][1] + 6 or threads > before[pid][2] + 2)
    ]
