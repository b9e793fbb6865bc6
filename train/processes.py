"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, how: signal.Signals = signal.SIGTERM) -> None:
    """Let the system send `how` to this process when its parent, whose process id is `parent`, ends, however it ends.

    Linux only; elsewhere it does nothing. It is lost when a program with other privileges is executed.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), how)
