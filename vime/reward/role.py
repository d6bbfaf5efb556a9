"""What a process of a run is, said in its environment: read by ``vime.debug.stop.identity``. Imports nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ROLE, RANK, PID = "VIME_ROLE", "VIME_RANK", "VIME_ROLE_PID"
"""What a process says of itself, and its pid: those below inherit the variables, and with them no role."""
CHILD_ROLE, CHILD_RANK = "VIME_CHILD_ROLE", "VIME_CHILD_RANK"
"""What is said of the processes that are started with them."""
when_introduced: list[Callable[[], None]] = []
"""Called when this process has said who it is."""


def introduce(role: str, rank: int | None = None) -> None:
    """Say who this process is. What it starts is its ``child``, until it says otherwise itself."""
    for name in (RANK, CHILD_ROLE, CHILD_RANK):
        os.environ.pop(name, None)
    os.environ |= {ROLE: role, PID: str(os.getpid())}
    if rank is not None:
        os.environ[RANK] = str(rank)
    for told in when_introduced:
        told()


def of_child(role: str, rank: int | None = None) -> dict[str, str]:
    """The variables to start a process with whose role is known, so that it has it from its first line on."""
    return {CHILD_ROLE: role} | ({} if rank is None else {CHILD_RANK: str(rank)})


@contextmanager
def children_are(role: str, rank: int | None = None) -> Iterator[None]:
    """What is started inside, and everything below it, has this role: processes of a library, which say nothing."""
    before = {name: os.environ.pop(name, None) for name in (CHILD_ROLE, CHILD_RANK)}
    os.environ |= of_child(role, rank)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
