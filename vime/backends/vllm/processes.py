"""Engine processes end with the process that started them, and their end is noticed at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator


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
