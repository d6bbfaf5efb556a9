"""Forked processes end with the process that forked them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_state = {"registered": False, "parent": 0}


def _die_with_parent() -> None:
    if _state["parent"]:
        die_with_parent()
        if os.getppid() != _state["parent"]:  # it ended between the fork and the line above
            os._exit(1)
        _state["parent"] = os.getpid()  # of what this process forks in turn


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, however that comes about."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when ``parent``, which started it, ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def forking_dies_with_parent() -> Iterator[None]:
    """Processes forked inside are killed by the kernel when the forking thread's process ends, however it ends.

    An engine, or the writers of a checkpoint, would otherwise hold their parent's sockets and wait for ever.
    """
    if not _state["registered"]:
        os.register_at_fork(after_in_child=_die_with_parent)
        _state["registered"] = True
    _state["parent"] = os.getpid()
    try:
        yield
    finally:
        _state["parent"] = 0
