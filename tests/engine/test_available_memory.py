"""Memory that may still be taken: the least of the machine's and every control group's above us."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import available_memory


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 10_000

    monkeypatch.setattr(available_memory.psutil, "virtual_memory", Memory)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def available(tmp_path: Path, own: str) -> int:
    (tmp_path / "own").write_text(own)
    return available_memory.available_bytes(cgroup_root=tmp_path / "root", own_cgroups=tmp_path / "own")


def test_without_control_groups(tmp_path: Path) -> None:
    assert available_memory.available_bytes(cgroup_root=tmp_path, own_cgroups=tmp_path / "absent") == 10_000
    assert available(tmp_path, "0::/\n") == 10_000


def test_version_2_counts_file_cache_as_available_and_parents_too(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root / "a/b", memory__max="5000", memory__current="4000", memory__stat="anon 1\ninactive_file 500")
    assert available(tmp_path, "0::/a/b\n") == 1500
    write(root / "a", memory__max="1200", memory__current="1000")
    assert available(tmp_path, "0::/a/b\n") == 200
    write(root / "a", memory__max="max", memory__current="1000")
    assert available(tmp_path, "0::/a/b\n") == 1500


def test_in_a_container_the_root_of_the_mount_is_our_group(tmp_path: Path) -> None:
    write(tmp_path / "root", memory__max="3000", memory__current="1000")
    assert available(tmp_path, "0::/path/seen/from/the/host\n") == 2000


def test_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "root/memory/docker/x"
    write(folder, memory__limit_in_bytes="7000", memory__usage_in_bytes="6500", memory__stat="total_inactive_file 100")
    assert available(tmp_path, "5:cpu:/\n4:memory:/docker/x\n") == 600
    write(folder, memory__limit_in_bytes=str(2**63 - 4096))
    assert available(tmp_path, "4:memory:/docker/x\n") == 10_000


def test_a_group_already_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "root", memory__max="3000", memory__current="4000")
    assert available(tmp_path, "0::/\n") == 0
