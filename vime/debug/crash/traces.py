"""What the processes of a crashed attempt wrote on stderr: signals with their Python stacks, and exceptions."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+)(?: in (.*))?$')
_RAISED_FRAME = re.compile(r'^\s+File "(.*)", line (\d+), in (.*)$')
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*): ?(.*)$")
_PREFIX = re.compile(r"^\([A-Za-z_]\w*(?: [^)]*)?pid=\d+\) ?", re.MULTILINE)
SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
}
LATER = ("EngineDeadError", "VimeError", "EngineGenerateError", "CancelledError")
"""Exceptions that say no more than that something ended before."""


@dataclass(frozen=True)
class Trace:
    """``what``: "SIGSEGV", or "RuntimeError: text". ``frames``: "function (file:line)", the innermost first."""

    what: str
    frames: tuple[str, ...]
    is_signal: bool


def find(text: str) -> Trace | None:
    """The first cause: the first signal, else the first exception that is not about another's end."""
    text = _PREFIX.sub("", text)
    if fatal := _FATAL.search(text):
        frames = _frames(text[fatal.end() :])
        return Trace(SIGNALS.get(fatal[1], fatal[1]), frames, True)
    raised = [trace for part in text.split(_TRACEBACK)[1:] if (trace := _exception(part)) is not None]
    return next((trace for trace in raised if not trace.what.partition(":")[0].endswith(LATER)), None)


def _frames(text: str) -> tuple[str, ...]:
    """The thread in which the signal came: the first one listed as current, up to the next blank line."""
    at = text.find("Current thread")
    lines = text[at if at >= 0 else 0 :].splitlines()[1:]
    found: list[str] = []
    for line in lines:
        match = _FRAME.match(line)
        if match is None:
            if found:
                break
            continue
        found.append(f"{match[3]} ({match[1]}:{match[2]})")
    return tuple(found)


def _exception(part: str) -> Trace | None:
    frames: list[str] = []
    what = ""
    for line in part.splitlines():
        if match := _RAISED_FRAME.match(line):
            frames.append(f"{match[3]} ({match[1]}:{match[2]})")
        elif frames and line[:1].strip() and (found := _EXCEPTION.match(line)):
            what = f"{found[1].rpartition('.')[2]}: {found[2]}".rstrip(": ")
            break
        elif frames and line[:1].strip():
            what = line.strip()  # an exception without a text
            break
    return Trace(what, tuple(reversed(frames)), False) if what else None
