"""Engine processes end with the process that started them, and their end is noticed at once."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Iterator

_PR_SET_PDEATHSIG = 1
_state = {"registered": False, "parent": 0}


def _die_with_parent() -> None:
    if _state["parent"]:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _state["parent"]:  # it ended between the fork and the line above
            os._exit(1)
        _state["parent"] = os.getpid()  # of what this process forks in turn


@contextlib.contextmanager
def forking_dies_with_parent() -> Iterator[None]:
    """Processes forked inside are killed by the kernel when the forking thread's process ends, however it ends.

    A forked engine inherits its parent's sockets: left alone it would keep them open and wait for ever.
    """
    if not _state["registered"]:
        os.register_at_fork(after_in_child=_die_with_parent)
        _state["registered"] = True
    _state["parent"] = os.getpid()
    try:
        yield
    finally:
        _state["parent"] = 0


class DeathWatch:
    """Cancels the calls under way when one of the processes ends.

    vLLM fails the requests that it knows of, but a call that still waits for an answer of the engine core (a pause, a
    weight update, the first request) would wait for ever.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self.dead: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Task] = set()
        self._files = {os.pidfd_open(pid): pid for pid in pids}
        for file in self._files:
            self._loop.add_reader(file, self._ended, file)

    def _ended(self, file: int) -> None:
        self.dead.append(self._files[file])
        self._forget(file)
        for call in self._calls:
            call.cancel()

    def _forget(self, file: int) -> None:
        self._loop.remove_reader(file)
        os.close(file)
        del self._files[file]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The current task is cancelled on a death. Raises ProcessDied in its place."""
        call = asyncio.current_task()
        assert call is not None
        if self.dead:
            raise ProcessDied
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if self.dead:
                raise ProcessDied from None
            raise
        finally:
            self._calls.discard(call)

    def close(self) -> None:
        for file in list(self._files):
            self._forget(file)


class ProcessDied(Exception):
    """A watched process ended."""
