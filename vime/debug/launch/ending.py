"""The end of a debug run: of every process of it on this machine, or of its job; in bounded time, by pid."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from vime.debug.attach.sessions import members_of
from vime.debug.processes import Member, is_in_mask, pids, stat
from vime.errors import VimeError

STEPS = ((signal.SIGINT, 15.0), (signal.SIGTERM, 10.0))
"""What the command is asked with, and how long it may take to leave by itself."""
LEAVE_SECONDS = 2.0
"""How long those below it may take to follow once the command is gone; then, once more, after they were asked to."""
KILL_SECONDS = 10.0
LOOK_SECONDS = 0.1


def end_command(root: Member, session: str, is_urgent: Callable[[], bool] = lambda: False) -> None:
    """End the command ``root`` and every process of the debug run. ``is_urgent``: asked again and again; then at once.

    VimeError where one is still there after SIGKILL.
    """
    seen = family_of(root, session)
    for number, seconds in STEPS:
        if not root.is_alive or is_urgent():
            break
        if is_in_mask(root.pid, "SigIgn", number):
            continue  # as SIGINT where a shell has started it in the background
        _signal([root], number)
        wait_for_end([root], seconds, is_urgent)
        seen |= family_of(root, session)
    if not root.is_alive and not wait_for_end(seen | family_of(root, session), LEAVE_SECONDS, is_urgent):
        _signal(seen | family_of(root, session), signal.SIGTERM)
        wait_for_end(seen | family_of(root, session), LEAVE_SECONDS, is_urgent)
    _kill(root, session, seen)


def _kill(root: Member, session: str, seen: set[Member]) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while left := [one for one in seen | family_of(root, session) if one.is_alive]:
        if time.monotonic() > deadline:
            pids_left = sorted(one.pid for one in left)
            raise VimeError(f"processes {pids_left} did not end within {KILL_SECONDS:g} s of SIGKILL")
        _signal(left, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)


def _signal(members: Iterable[Member], number: int) -> None:
    for one in members:
        if one.is_alive:
            with suppress(ProcessLookupError):
                os.kill(one.pid, number)


def wait_for_end(members: Iterable[Member], seconds: float, is_urgent: Callable[[], bool] = lambda: False) -> bool:
    """Whether all of them have gone within ``seconds``."""
    left = list(members)
    deadline = time.monotonic() + seconds
    while (left := [one for one in left if one.is_alive]) and time.monotonic() < deadline and not is_urgent():
        time.sleep(LOOK_SECONDS)
    return not left


def family_of(root: Member, session: str) -> set[Member]:
    """The command, all below it, its own process session, and whatever was started with the debug run's settings."""
    parents: dict[int, list[int]] = {}
    found = set(members_of(session)) | {root.pid}
    for pid in pids():
        _, parent, _, leader, *_ = stat(pid)
        parents.setdefault(int(parent), []).append(pid)
        if int(leader) == root.pid:
            found.add(pid)
    left = list(found)
    while left:
        below = [pid for pid in parents.get(left.pop(), []) if pid not in found]
        found.update(below)
        left += below
    found.discard(os.getpid())
    members = {root if pid == root.pid else Member.here("child", 0, pid) for pid in found}
    return {one for one in members if one.is_alive}
