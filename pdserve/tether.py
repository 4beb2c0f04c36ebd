"""Ends this process when its parent does, even when the parent was killed. Linux only; elsewhere it does nothing.

Run as a program (`python -m pdserve.tether PARENT_PID PROGRAM ARGUMENT...`) it ties itself and then becomes PROGRAM,
for programs that cannot do it themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID = "PDSERVE_PARENT_PID"
"""Environment variable by which the launcher tells its children whom to follow."""

_PR_SET_PDEATHSIG = 1


def follow_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; exit now if that has happened already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def follow_parent_from_environment() -> None:
    """Follow the process that the environment names, if it names one."""
    parent_pid = os.environ.pop(PARENT_PID, "")
    if parent_pid.isdigit():
        follow_parent(int(parent_pid))


if __name__ == "__main__":
    follow_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
