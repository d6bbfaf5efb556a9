"""How a command ends when it is told to: in order, with every process that it started."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ends_in_order() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: every process is ended on the way out, which further signals do not disturb.

    (Ray crashes in native code where its shutdown is interrupted.) SIGINT stays ignored where the caller ignores it.
    The tasks that it cuts short are no news: asyncio says nothing of them from then on.
    """
    is_ending = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal is_ending
        if not is_ending:
            is_ending = True
            logging.getLogger("asyncio").disabled = True
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        if number == signal.SIGTERM or before[number] != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
