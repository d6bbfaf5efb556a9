"""The one place where the processes of a debug run speak: stderr, which is where their user looks."""

from __future__ import annotations

import os
import sys

PREFIX = "vime debug: "
_said: set[str] = set()


def say(text: str) -> None:
    """One line, at once. Past ``sys.stderr`` where that is closed, or fails."""
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
