"""End a debug run from another terminal: what ``vime debug-attach stop`` does."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress

from vime.debug.attach import sessions
from vime.debug.attach.sessions import Session
from vime.debug.attach.words import clock
from vime.debug.launch import ending
from vime.debug.launch.job import client_of, stop_job
from vime.debug.processes import Member
from vime.debug.stop.linger import ENDING
from vime.debug.stop.records import Run, forget_run
from vime.errors import UsageError, VimeError

RUN_SECONDS = 90.0
"""How long ``run`` itself may take to end its command: longer than all its own limits together."""


def stop_runs(name: str | None, is_all: bool, address: str | None) -> Iterator[str]:
    """End one debug run, or all; a line for each. UsageError where it is not clear which, or there is none."""
    for session in _chosen(list(sessions.look(address).sessions), name, is_all):
        yield from _stop(session)


def _chosen(found: Sequence[Session], name: str | None, is_all: bool) -> Sequence[Session]:
    if name is not None and is_all:
        raise UsageError(f"{name} and --all: one of them", "give a session, or --all")
    if name is not None:
        named = [one for one in found if one.name == name]
        if not named:
            raise UsageError(f"{name}: no such debug run is alive\n{_listed(found)}".rstrip(), _HINT)
        return named
    if not found:
        raise UsageError("no debug run of yours is alive", _HINT)
    if len(found) > 1 and not is_all:
        raise UsageError(f"{len(found)} debug runs are alive, which one?\n{_listed(found)}", "name it, or give --all")
    return found


_HINT = "vime debug-attach list shows what there is; --address HOST:PORT looks in a cluster"


def _listed(found: Sequence[Session]) -> str:
    return "\n".join(f"  {one.name}{_described(one.run)}" for one in found)


def _described(run: Run | None) -> str:
    return "" if run is None else f"  {shlex.join(run.command)}  since {clock(run.began)} on {run.hostname}"


def _stop(session: Session) -> Iterator[str]:
    run = session.run
    if run is not None and (watcher := _watcher(run)) is not None:
        with suppress(ProcessLookupError):
            os.kill(watcher.pid, signal.SIGTERM)
        if not ending.wait_for_end([watcher], RUN_SECONDS):
            raise VimeError(f"{session.name}: vime debug-attach run (pid {run.pid}) has not ended it", "try it again")
        yield f"{session.name} has ended, by its vime debug-attach run (pid {run.pid})"
    elif run is not None and run.job:
        session.registry.put(f"{session.name}/{ENDING}", {})
        stop_job(client_of(run.submit), run.job, run.submit)
        yield f"{session.name} has ended: job {run.job}"
    else:
        yield _end_here(session)
    forget_run(session.registry, session.name)


def _watcher(run: Run) -> Member | None:
    """``vime debug-attach run`` of this debug run, where it is a process of this machine that still lives."""
    found = run.watcher
    return found if found.is_here and found.is_alive else None


def _end_here(session: Session) -> str:
    """Nobody watches over it any more: its processes are ended, where they are of this machine."""
    pids = sessions.members_of(session.name, session.registry.where)
    if not pids:
        raise VimeError(f"{session.name}: none of its processes is on this machine", "give this command where they are")
    for pid in pids:
        ending.end_command(Member.here("driver", 0, pid), session.name)
    return f"{session.name} has ended: {len(pids)} process{'es' * (len(pids) != 1)} of this machine"
