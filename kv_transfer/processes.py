"""Which process is that, and does it still live? Reads the kernel's /proc; knows no pools."""

from __future__ import annotations

import os
from pathlib import Path

_STATE, _START_TICKS = 0, 19
"""Places in /proc/PID/stat after the command's name: fields 3 and 22 of proc(5)."""


def boot_id() -> str:
    """Names this boot of this host's kernel; the same in all of its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def can_name_processes() -> bool:
    """Whether pids mean the same to us and to the /proc we see; not so in a PID namespace that kept an outer /proc."""
    return str(Path("/proc/self").readlink()) == str(os.getpid())


def process_start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process or it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command's name is in parentheses and may itself hold parentheses and spaces.
    rest = stat[stat.rindex(b")") + 2 :].split()
    if rest[_STATE] in (b"Z", b"X"):
        return None
    return int(rest[_START_TICKS])


def process_is_alive(pid: int, start_ticks: int) -> bool:
    """Whether the very process that had this pid at this start still runs (a reused pid has another start)."""
    return process_start_ticks(pid) == start_ticks
