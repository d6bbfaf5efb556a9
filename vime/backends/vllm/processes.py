"""Engine processes end with the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_state = {"registered": False, "active": False}


def _die_with_parent() -> None:
    if _state["active"]:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def forking_dies_with_parent() -> Iterator[None]:
    """Processes forked inside are killed by the kernel when the forking thread's process ends, however it ends.

    A forked engine inherits its parent's sockets: left alone it would keep them open and wait for ever.
    """
    if not _state["registered"]:
        os.register_at_fork(after_in_child=_die_with_parent)
        _state["registered"] = True
    _state["active"] = True
    try:
        yield
    finally:
        _state["active"] = False
