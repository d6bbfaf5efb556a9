"""Signals to a run reach its driver, and stay as it wants them, whatever Ray does."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

SECONDS = 0.005
SIZE = 512
"""More than a ``struct sigaction`` has on any system."""


@contextmanager
def handler_kept(number: signal.Signals) -> Iterator[None]:
    """What the process does on signal ``number`` stays, in here and after it.

    ``ray.shutdown`` sets SIGTERM to its default early on, beneath Python: a second one would then end the process
    before Ray's own have ended. Python sets handlers in its main thread alone, which is busy; the system in any.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    action = ctypes.create_string_buffer(SIZE)
    libc.sigaction(int(number), None, action)
    is_over = threading.Event()

    def keep() -> None:
        while not is_over.wait(SECONDS):
            libc.sigaction(int(number), action, None)

    thread = threading.Thread(target=keep, name=f"keeps {number.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        libc.sigaction(int(number), action, None)


@contextmanager
def daemons_in_own_groups() -> Iterator[None]:
    """What a ``ray.init`` in here starts is not in this process group, whose signals are the driver's to deal with.

    ``kill -- -PGID`` and ``kill %1`` of a shell signal a whole group. Ray's own answer to Ctrl-C alone is to block
    SIGINT in its processes; a raylet that SIGTERM ends first takes the driver with it, by ``_exit(1)`` in native code,
    wherever that is in its way out. (They end with the driver, however it ends, by PR_SET_PDEATHSIG.)
    """
    from ray._private import services

    before = services.ConsolePopen
    services.ConsolePopen = partial(before, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = before
