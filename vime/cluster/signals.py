"""A handler that native code takes away is put back."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
