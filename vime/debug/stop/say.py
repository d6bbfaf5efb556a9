"""The one place where the processes of a debug run speak: stderr, which is where their user looks.

Of vime's actors Ray keeps it in files. What they say goes through the registry as well, and ``run`` says it.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from collections.abc import Iterator

from vime.reward.role import CHILD_ROLE, PID, ROLE

PREFIX = "vime debug: "
SAID = "said"
"""In the registry, below the session: {"text": ...}."""
UNSEEN = ("trainer", "engine", "engine core")
"""Roles of which nobody sees the standard error."""
_said: set[str] = set()
_passing: set[int] = set()
"""Threads that pass something on: what goes wrong there is not passed on in turn."""
_numbers: Iterator[int] = iter(range(sys.maxsize))


def say(text: str, is_announced: bool = False) -> None:
    """One line, at once. ``is_announced``: ``run`` says it in its own words."""
    _write(text)
    here = os.environ.get(PID) == str(os.getpid())
    role = os.environ.get(ROLE if here else CHILD_ROLE)
    if role in UNSEEN and not is_announced and get_ident() not in _passing:
        _passing.add(get_ident())
        try:
            _pass_on(text)
        finally:
            _passing.discard(get_ident())


def _pass_on(text: str) -> None:
    import socket

    from vime.debug.stop.identity import whoami
    from vime.debug.stop.registry import registry_here
    from vime.debug.stop.spec import current

    try:
        if (spec := current()) is not None:
            name = f"{spec.session}/{SAID}/{socket.gethostname()}-{os.getpid()}-{next(_numbers):06d}"
            registry_here(spec).put(name, {"text": f"{whoami().name}: {text}"})
    except Exception as error:  # noqa: BLE001 - a fault of ours must not end the user's process
        _write(f"this is not passed on: {error}")


def _write(text: str) -> None:
    """Past ``sys.stderr`` where that is closed, or fails."""
    line = f"{PREFIX}{text}\n"
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError, RuntimeError):  # closed; none: a daemon; a signal came while it wrote
        try:
            os.write(2, line.encode(errors="backslashreplace"))
        except OSError:
            return  # nobody listens; the user's process goes on


def say_once(text: str) -> None:
    """``say``, unless this process has said just that."""
    if text not in _said:
        _said.add(text)
        say(text)


def duration(seconds: float) -> str:
    """ "30 min", "45 s"."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit - 0.5 and round(seconds) % unit == 0:
            return f"{round(seconds) // unit} {name}"
    return f"{seconds / 60:.0f} min" if seconds > 600 else f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
