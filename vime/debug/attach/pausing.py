"""Stop a process of a debug run that runs: by SIGUSR2, which every prepared process takes as "stop where you are".

Who a process is stands in the roster of a run of vime, in the environment it was started with, or is not known; then
its pid is what it is called by. A process without the handler would be ended by the signal: it is not sent there.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vime.debug.attach import clusters, gcs
from vime.debug.attach.sessions import DRIVER, RANK, Seen, Session, members_of, rank_of
from vime.debug.everywhere import call_on
from vime.debug.processes import family, is_in_mask, live_runs, read_roster
from vime.debug.stop.records import Stop, stops
from vime.errors import OutOfTime, UsageError, VimeError, first_line
from vime.reward.role import CHILD_RANK, CHILD_ROLE

PAUSE_SECONDS = 20.0
POLL_SECONDS = 0.1
REMOTE_SECONDS = 60.0


@dataclass(frozen=True)
class Target:
    """A process of a debug run that can be stopped. role: "" where it is not known. node: Ray's; "": this machine."""

    session: str
    pid: int
    role: str = ""
    rank: int | None = None
    node: str = ""
    host: str = field(default_factory=socket.gethostname)

    @property
    def name(self) -> str:
        who = self.role if self.rank is None else f"{self.role or 'rank'} {self.rank}"
        return f"{who} (pid {self.pid})" if who else f"pid {self.pid}"


def pause(seen: Seen, text: str | None, seconds: float = PAUSE_SECONDS) -> Stop:
    """Stop the process that ``text`` means (``rank=N``, ``driver``, ``trainer0``, a pid; None: the only one).

    UsageError where that is none, or several, or it has stopped already. OutOfTime where it does not stop in time.
    """
    found = _chosen(targets(seen), text)
    if (stop := _stop_of(seen.sessions, found, 0.0)) is not None:
        raise UsageError(f"{found.name} has stopped already: {stop.key}", f"vime debug-attach connect {stop.key}")
    began = time.time()
    _signal(seen, found)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (stop := _stop_of(seen.sessions, found, began)) is not None:
            return stop
        time.sleep(POLL_SECONDS)
    raise OutOfTime(
        f"{found.name} has not stopped within {seconds:g} s: it is inside C code (a collective, a kernel, a lock) "
        "that Python does not interrupt, and stops as soon as that returns",
        "vime debug-attach stacks shows where it is",
    )


def targets(seen: Seen) -> list[Target]:
    """All processes of all debug runs that can be stopped, on every node of the cluster that was asked."""
    names = [(session.name, session.registry.where) for session in seen.sessions]
    found = targets_here(names)
    drivers = {session.run.child_pid for session in seen.sessions if session.run is not None}
    found = [replace(t, role=DRIVER) if t.pid in drivers and not t.role else t for t in found]
    return found + (_targets_away(seen.address, names) if seen.address and names else [])


def targets_here(names: Sequence[Sequence[str]]) -> list[Target]:
    """Those of this machine. ``names``: (debug run, where its registry is) each."""
    members = [m for run in live_runs() for m in family(read_roster(run).members)]
    known = {member.pid: member for member in members if member.is_here and member.is_alive}
    found = []
    pids = {pid: name for name, where in names for pid in members_of(name, where)}
    for pid, name in sorted(pids.items()):
        if not has_handler(pid):
            continue
        if (member := known.get(pid)) is not None:
            role, rank = member.role, None if member.role == DRIVER else member.rank
        else:
            role, rank = _said(pid)
        found.append(Target(name, pid, role, rank))
    return found


def has_handler(pid: int) -> bool:
    """Whether the process catches SIGUSR2; one that does not would end."""
    return is_in_mask(pid, "SigCgt", signal.SIGUSR2)


def signal_here(pid: int) -> bool:
    """False where the process has gone, or has no handler."""
    if not has_handler(pid):
        return False
    try:
        os.kill(pid, signal.SIGUSR2)
    except ProcessLookupError:
        return False
    return True


def _said(pid: int) -> tuple[str, int | None]:
    """(role, rank) from the environment that the process was started with."""
    environment = clusters.environment_of(pid)
    rank = environment.get(CHILD_RANK) or environment.get("RANK", "")
    return environment.get(CHILD_ROLE, ""), int(rank) if rank.isdigit() else None


def _chosen(found: Sequence[Target], text: str | None) -> Target:
    listed = "\n".join(f"  {t.name}  of {t.session}{f'  on node {t.node[:8]}' if t.node else ''}" for t in found)
    if not found:
        raise UsageError("no process of a debug run can be paused", "start one with vime debug-attach run")
    matching = [t for t in found if is_meant(t, text)]
    if not matching:
        raise UsageError(
            f"{text}: no such process\n{listed}",
            "give rank=N, driver, trainer0 or a pid",
        )
    if len(matching) > 1:
        what = "which one?" if text is None else f"{text}: {len(matching)} processes are meant"
        names = "\n".join(line for line, t in zip(listed.splitlines(), found, strict=True) if t in matching)
        raise UsageError(f"{what}\n{names}", "give a role and its rank such as trainer0, or a pid")
    return matching[0]


def is_meant(target: Target, text: str | None) -> bool:
    """Whether ``text`` (see ``pause``) names this process."""
    if text is None:
        return True
    name = text.replace("-", "").replace(" ", "")
    if name in (role := target.role.replace(" ", ""), f"{role}{target.rank}") and role:
        return True
    if text.startswith(RANK):
        return target.rank == rank_of(text)
    return str(target.pid) == text


def _stop_of(sessions: Iterable[Session], target: Target, since: float) -> Stop | None:
    registry = next(one.registry for one in sessions if one.name == target.session)
    for stop in stops(registry, target.session):
        same = (stop.pid, stop.hostname) == (target.pid, target.host)
        if same and stop.since >= since:
            return stop
    return None


def _signal(seen: Seen, target: Target) -> None:
    if target.node:
        was_sent = _on_nodes(seen.address, {target.node: (signal_here, (target.pid,))})[target.node]
    else:
        was_sent = signal_here(target.pid)
    if not was_sent:
        raise VimeError(f"{target.name} has gone, or cannot be paused any more", "vime debug-attach list")


def rows_here(names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """On another node: its targets as plain data."""
    return [asdict(target) for target in targets_here(names)]


def _targets_away(address: str, names: Sequence[Sequence[str]]) -> list[Target]:
    own = set(clusters.own_nodes())
    others = [number for number, node in gcs.nodes(address).items() if node.is_alive and number not in own]
    if not others:
        return []
    answers = _on_nodes(address, {node: (rows_here, (list(names),)) for node in others})
    return [replace(Target(**row), node=node) for node, rows in answers.items() for row in rows]


def _on_nodes(address: str, calls: dict[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """Call functions on nodes of the cluster. VimeError where one does not answer."""
    import ray

    from vime.debug.attach.tunnel import connected

    with connected(address):
        asked = {node: call_on(node, function, *args) for node, (function, args) in calls.items()}
        try:
            return {node: ray.get(answer, timeout=REMOTE_SECONDS) for node, answer in asked.items()}
        except ray.exceptions.RayError as error:
            why = first_line(error)
            raise VimeError(f"a node of the cluster does not answer: {why}", "vime debug-attach list") from error
