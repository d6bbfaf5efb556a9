"""A debug run from its start to its end: what ``vime debug-attach run`` does."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from vime.debug.launch.job import SubmittedJob
from vime.debug.launch.local import LocalCommand
from vime.debug.launch.plan import JOB, Asked, Plan, plan
from vime.debug.launch.summary import summary
from vime.debug.launch.watch import Signals, Watch
from vime.debug.processes import Member
from vime.debug.stop.records import Run, forget_run
from vime.debug.stop.tally import Tally, tallies
from vime.errors import VimeError


@dataclass(frozen=True)
class Terminal:
    """Where a debug run is watched. say: a line of ours; warn: one to be seen; show: the job's own output as it is;
    ask: a question to a person, None where there is none.
    """

    say: Callable[[str], None]
    warn: Callable[[str], None]
    show: Callable[[str], None]
    ask: Callable[[str], str] | None


def run(asked: Asked, terminal: Terminal) -> int:
    """Exit code of the command. ConfigError with every problem before anything is started; nothing is left behind."""
    planned = plan(asked)
    for note in planned.notes:
        terminal.say(note)
    signals = Signals()
    with signals.caught():
        started = _start(planned, terminal)
        watch = Watch(_record(planned, started), terminal.say, terminal.ask, signals)
        try:
            code = watch.until_ended(started)
        finally:
            found = _end(started, planned.spec.session, signals, terminal)
    if failure := started.failure():
        terminal.say(failure)
    for line, is_warning in summary(planned.spec, watch.of_point, found):
        (terminal.warn if is_warning else terminal.say)(line)
    return code


def _start(planned: Plan, terminal: Terminal) -> LocalCommand | SubmittedJob:
    if planned.where == JOB:
        return SubmittedJob.start(planned, terminal.show, terminal.say)
    return LocalCommand.start(planned)


def _end(
    started: LocalCommand | SubmittedJob, session: str, signals: Signals, terminal: Terminal
) -> list[Tally] | None:
    """No process is left, nor an entry; what the processes have noted of the points, None where it cannot be read."""
    found = None
    try:
        started.close(lambda: signals.is_new)
    finally:
        if started.registry is not None:
            try:
                found = tallies(started.registry, session)
                forget_run(started.registry, session)
            except VimeError as error:
                terminal.warn(f"{error.message}: entries of {session} stay in it")
    return found


def _record(planned: Plan, started: LocalCommand | SubmittedJob) -> Run:
    me = Member.here("driver", 0, os.getpid())
    is_job = isinstance(started, SubmittedJob)
    return Run(
        session=planned.spec.session,
        command=planned.command.words,
        pid=me.pid,
        started=me.started,
        boot=me.boot,
        hostname=socket.gethostname(),
        working_dir=os.getcwd(),
        began=time.time(),
        hold_seconds=planned.spec.hold_seconds,
        wait_seconds=planned.spec.wait_seconds,
        child_pid=started.pid,
        submit=planned.address if is_job else "",
        job=started.job if isinstance(started, SubmittedJob) else "",
    )
