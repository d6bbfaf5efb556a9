"""Which debug runs there are, and what of them has stopped: on this machine, and in a cluster.

What a process that was killed leaves in a registry is found by liveness and removed, by whoever looks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vime.debug.attach import clusters, gcs
from vime.debug.attach.gcs import Node, Paused, Worker
from vime.debug.processes import boot_id, pids
from vime.debug.stop import registry as registries
from vime.debug.stop.identity import ROLES
from vime.debug.stop.records import WAITING, Run, Stop, forget_run, forget_stop, runs, stops
from vime.debug.stop.registry import FolderRegistry, GcsRegistry, Registry
from vime.debug.stop.spec import Spec
from vime.errors import UsageError, VimeError
from vime.reward.breakpoints import DEBUG_SPEC

LATE_SECONDS = 60.0
"""A stop that is this long past the time when it goes on by itself is no more, where its process cannot be asked."""
DRIVER, RANK = "driver", "rank="


@dataclass(frozen=True)
class Session:
    """One debug run. run: what it noted at its start; None where that is gone and stops of it are not."""

    name: str
    registry: Registry
    run: Run | None
    stops: tuple[Stop, ...]


@dataclass(frozen=True)
class Seen:
    """What there is to attach to.

    address   of the cluster that was asked; "" for none
    paused    workers in Ray's own debugger
    notes     what could not be seen, in words
    """

    sessions: tuple[Session, ...] = ()
    address: str = ""
    paused: tuple[Paused, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def stops(self) -> list[Stop]:
        """Of all debug runs, the oldest first."""
        return sorted((stop for one in self.sessions for stop in one.stops), key=lambda stop: (stop.since, stop.key))

    def session_of(self, stop: Stop) -> Session:
        return next(one for one in self.sessions if one.name == stop.session and stop in one.stops)

    def registry_of(self, session: str) -> Registry:
        return next(one.registry for one in self.sessions if one.name == session)


def look(address: str | None = None, key: str | None = None) -> Seen:
    """All debug runs of this user on this machine, and those of the cluster that is meant, see ``clusters.chosen``.

    ``key``: all that is wanted; where it is one of this machine's, no cluster is asked unless one was named. What else
    means one stop of this machine alone is taken for it where there are several clusters.
    VimeError where a cluster was named and does not answer; one that was only found is noted.
    """
    here = look_here()
    found = [stop for one in here for stop in one.stops]
    if not address and any(stop.key == key for stop in found):
        return Seen(here)
    try:
        target = clusters.chosen(address)
    except UsageError as error:
        if address or not key or len(matches(found, key)) != 1:
            raise
        return Seen(here, notes=(f"{error.message.splitlines()[0]} None was asked: {key} is a stop of this machine",))
    if target is None:
        return Seen(here)
    is_named = bool(address or os.environ.get(clusters.ADDRESS))
    try:
        there, paused, notes = _look_there(target)
    except VimeError as error:
        if is_named:
            raise
        return Seen(here, notes=(f"{error.message}; what is stopped there is not listed ({error.hint})",))
    return Seen((*here, *there), target, tuple(paused), tuple(notes))


def look_here() -> tuple[Session, ...]:
    """The debug runs of this machine's folder; entries of what has been killed are removed."""
    folder = registries.root()
    if not os.path.lexists(folder):
        return ()
    return _sessions(FolderRegistry(folder), lambda stop: stop.member.is_alive, lambda run: False)


def find(found: Sequence[Stop], text: str) -> Stop:
    """The stop that ``text`` means: a key or its beginning, ``rank=N``, a role. UsageError for none, or several."""
    matching = matches(found, text)
    if len(matching) == 1:
        return matching[0]
    if not found:
        raise UsageError(f"{text}: nothing is stopped", "vime debug-attach list shows what is")
    if not matching:
        raise UsageError(
            f"{text}: no such stop\n{candidates(found)}", "give a key, its beginning, rank=N or a role such as driver"
        )
    raise UsageError(f"{text}: {len(matching)} stops are meant\n{candidates(matching)}", "give a key")


def matches(found: Sequence[Stop], text: str) -> list[Stop]:
    """The stops that ``text`` may mean; an exact key means one alone."""
    if exact := [stop for stop in found if stop.key == text]:
        return exact
    if (role := text.replace("-", " ")) in ROLES:
        return [stop for stop in found if stop.role == role]
    if text.startswith(RANK):
        return [stop for stop in found if stop.rank == rank_of(text)]
    return [stop for stop in found if text and stop.key.startswith(text)]


def rank_of(text: str) -> int:
    """N of ``rank=N``."""
    number = text.removeprefix(RANK)
    if not number.isdigit():
        raise UsageError(f"{text}: rank=N wants a whole number from 0", "such as rank=1")
    return int(number)


def is_here(stop: Stop) -> bool:
    """Whether it is, or was, a process of this machine as this process sees it."""
    return stop.hostname == socket.gethostname() and stop.boot == boot_id()


def members_of(session: str, where: str = "") -> list[int]:
    """Processes on this machine of a debug run (in the registry ``where``, if given), by their environment."""
    found = []
    for pid in pids():
        if not (text := clusters.environment_of(pid).get(DEBUG_SPEC)):
            continue
        try:
            spec = Spec.loads(text)
        except ValueError:
            continue  # of another version of vime
        if spec.session == session and (not where or spec.folder in ("", where)):
            found.append(pid)
    return found


def candidates(found: Sequence[Stop]) -> str:
    """One line each."""
    return "\n".join(f"  {s.key}  {s.who}  {s.file_here}:{s.line} {s.function}  pid {s.pid}" for s in found)


def _look_there(address: str) -> tuple[tuple[Session, ...], list[Paused], list[str]]:
    asked = gcs.client(address)
    table, nodes = gcs.workers(address), gcs.nodes(address)
    known = {(worker.node, worker.pid): worker for worker in table}

    def is_alive(stop: Stop) -> bool:
        return stop.member.is_alive if is_here(stop) else _is_alive_there(stop, known, nodes)

    def has_job(run: Run) -> bool:
        return bool(run.job) and gcs.is_job_alive(asked, run.job)

    found = _sessions(GcsRegistry(address), is_alive, has_job)
    ours = {(stop.node, stop.pid) for one in found for stop in one.stops}
    paused = [p for p in gcs.paused(address, table) if (p.node, p.pid) not in ours]
    notes = []
    if not gcs.has_dashboard(asked):
        notes.append(
            f"the cluster at {address} has no dashboard: editors list nothing of it, and ray job submit needs one"
        )
    return found, paused, notes


def _is_alive_there(stop: Stop, known: Mapping[tuple[str, int], Worker], nodes: Mapping[str, Node]) -> bool:
    """By Ray's tables; of a process that is no worker (a child) only its node and its time limit are known."""
    node = gcs.node_of(stop, nodes)
    if node and (node not in nodes or not nodes[node].is_alive):
        return False
    if (worker := known.get((node, stop.pid))) is not None and not worker.is_alive:
        return False
    return time.time() < stop.until + LATE_SECONDS or stop.state != WAITING


def _sessions(
    registry: Registry, is_alive: Callable[[Stop], bool], has_job: Callable[[Run], bool]
) -> tuple[Session, ...]:
    noted = {run.session: run for run in runs(registry)}
    living: dict[str, list[Stop]] = {name: [] for name in noted}
    for stop in stops(registry):
        if is_alive(stop):
            living.setdefault(stop.session, []).append(stop)
        else:
            forget_stop(registry, stop)
    found = []
    for name, of_run in living.items():
        run = noted.get(name)
        if of_run or (run is not None and (_is_run_alive(run, registry.where) or has_job(run))):
            found.append(Session(name, registry, run, tuple(of_run)))
        else:
            forget_run(registry, name)
    return tuple(found)


def _is_run_alive(run: Run, where: str) -> bool:
    """Whether its command lives, or any process with its settings; of one started elsewhere that is not known."""
    if run.hostname != socket.gethostname():
        return True
    if run.boot != boot_id():
        return False
    return run.watcher.is_alive or bool(members_of(run.session, where))
