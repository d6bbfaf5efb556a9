"""What has stopped, in words: rows of a table, lines while a run waits, plain data."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vime.debug.attach.behind import behind
from vime.debug.attach.gcs import Paused
from vime.debug.attach.sessions import Seen, Session, is_here
from vime.debug.attach.words import clock, short, short_path, span
from vime.debug.stop.records import WAITING, Stop
from vime.debug.stop.registry import GcsRegistry, Registry

FORMAT, SCHEMA_VERSION = "vime-debug-list", 1
COLUMNS = ("key", "where", "why", "who", "node", "pid", "since", "state", "line")
WHOLE = ("key", "pid", "node", "since")
"""Cells that are copied, or make no sense in pieces."""
NOTHING = "nothing is stopped"


def rows(seen: Seen, now: float | None = None) -> list[tuple[str, ...]]:
    """One for each stop, the oldest first, then workers that wait in Ray's own debugger. See ``COLUMNS``."""
    moment = time.time() if now is None else now
    found = [_row(stop, moment) for stop in seen.stops]
    for one in seen.paused:
        state = f"waiting at {one.address}:{one.port}"
        why = "Ray's own debugger" if one.kind == "ray" else "Ray's older debugger (telnet)"
        found.append(("-", one.where or "-", why, "worker", one.address, str(one.pid or "-"), "-", state, ""))
    return found


def num_columns(found: Sequence[Sequence[str]]) -> int:
    """How wide a terminal must be for a table of these rows."""
    return sum(max(map(len, column)) + 3 for column in zip(COLUMNS, *found, strict=True))


def blocks(found: Sequence[Sequence[str]]) -> list[str]:
    """The rows for a terminal that is narrower."""
    written = []
    for key, where, why, who, node, pid, since, state, line in found:
        written += [f"{key}  {who}  pid {pid}  {node}  since {since}  {state}", f"    {where}: {why}"]
        written += [f"        {line}"] if line else []
    return written


def lines(seen: Seen) -> list[str]:
    """What is said beside the table: who waits behind a stop, what could not be seen; or which runs are alive."""
    stopped = [session for session in seen.sessions if session.stops]
    of = {session.name: f"{session.name}: " if len(stopped) > 1 else "" for session in stopped}
    found = [f"{of[session.name]}{line}" for session in stopped for line in behind_lines(session)]
    if not seen.stops and not seen.paused:
        found.append(NOTHING)
    found += [_alive(session) for session in seen.sessions if not session.stops]
    return found + list(seen.notes)


def announcement(stop: Stop, registry: Registry, behind: Sequence[str] = (), now: float | None = None) -> list[str]:
    """What ``run`` prints when a process has stopped (case D03): where, why, who, until when, and how to attach from
    any terminal.
    """
    left = max(0.0, stop.until - (time.time() if now is None else now))
    cluster = f" --address {registry.where}" if isinstance(registry, GcsRegistry) else ""
    at = f"{stop.host}:{stop.port}" + ("" if is_here(stop) else f" of {stop.hostname} ({stop.address})")
    return [
        f"{stop.who} (pid {stop.pid}) has stopped at {place(stop)}: {stop.reason}",
        *([f"    {stop.code}"] if stop.code else []),
        f"attach: vime debug-attach connect {stop.key}{cluster}, or a client of your own to {at}; "
        f"it goes on by itself in {span(left)}",
        *behind,
    ]


def behind_lines(session: Session) -> list[str]:
    """How many processes wait for the stopped ones, and how long they will; or that it is not known."""
    return behind(session.stops, session.registry)


def data(seen: Seen) -> dict[str, Any]:
    """Plain data for ``--json``, see docs/formats.md."""
    stops = [asdict(stop) | {"who": stop.who, "is_here": is_here(stop)} for stop in seen.stops]
    runs = [
        {"session": one.name, "registry": one.registry.where, "num_stops": len(one.stops)}
        | ({"run": asdict(one.run)} if one.run is not None else {"run": None})
        | {"behind": behind_lines(one) if one.stops else []}
        for one in seen.sessions
    ]
    ray = [_paused(one) for one in seen.paused]
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "address": seen.address or None,
        "stops": stops,
        "runs": runs,
        "ray_paused": ray,
        "notes": list(seen.notes),
    }


def place(stop: Stop) -> str:
    """ "work.py:5 compute", the file as short as it can be said from the current folder."""
    return f"{short_path(stop.file_here)}:{stop.line} {stop.function}".rstrip()


def _row(stop: Stop, now: float) -> tuple[str, ...]:
    node = "here" if is_here(stop) else stop.address
    left = f" ({short(max(0.0, stop.until - now))} left)" if stop.state == WAITING else ""
    since = short(max(0.0, now - stop.since))
    return (stop.key, place(stop), stop.reason, stop.who, node, str(stop.pid), since, stop.state + left, stop.code)


def _alive(session: Session) -> str:
    if session.run is None:
        return f"debug run {session.name}: alive"
    run = session.run
    command = shlex.join([Path(run.command[0]).name, *run.command[1:]]) if run.command else ""
    return f"debug run {session.name} is alive, nothing of it is stopped: {command} (since {clock(run.began)})"


def _paused(one: Paused) -> dict[str, Any]:
    return {"kind": one.kind, "pid": one.pid or None, "address": one.address, "node": one.node, "port": one.port} | {
        "where": one.where or None,
        "num_threads": one.threads,
    }
