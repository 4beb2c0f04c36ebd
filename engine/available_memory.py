"""How much memory this process may still take: the machine's, or its control group's where that is less. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_UNLIMITED_FROM = 1 << 60
"""Version 1 says `no limit` as a number near 2^63."""


def available_bytes(*, cgroup_root: Path = _CGROUP_ROOT, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """Bytes that can be taken without swapping and without meeting a control group's limit."""
    available = int(psutil.virtual_memory().available)
    for folder, limit_name, usage_name, stat_name in _control_groups(cgroup_root, own_cgroups):
        limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED_FROM:
            available = min(available, max(0, limit - usage + _reclaimable(folder / "memory.stat", stat_name)))
    return available


def _control_groups(root: Path, own_cgroups: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folders of our groups and all their parents, of version 2 and 1, with the names of their files.

    In a container the path in /proc/self/cgroup may not exist below the mounted root; the root itself always does.
    """
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return  # no control groups on this system
    for line in lines:
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            yield folder, *names
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _read_number(path: Path) -> int | None:
    """The number in a file; None when it is not there or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path, name: str) -> int:
    """Bytes of file cache that the kernel gives back when asked."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return next((int(pair[1]) for pair in pairs if pair[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0
