"""The command of a debug run as a process of this machine, which cannot outlive ``vime debug-attach run``.

It has a process session of its own, so that Ctrl-C is ours to answer. Beside it waits a guard: a process that ends it,
and all below it, and clears the registry, where ``run`` itself was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from vime.debug.attach import gcs
from vime.debug.launch import ending
from vime.debug.launch.plan import Plan
from vime.debug.processes import Member
from vime.debug.stop.records import forget_run
from vime.debug.stop.registry import Registry, check_port, registry_of
from vime.debug.stop.spec import Spec
from vime.errors import UsageError, VimeError

INTERRUPTED = 128
_DONE = b"done"


@dataclass
class LocalCommand:
    """A started command. ``registry``: at once; ``ended`` gives its exit code as a shell does."""

    plan: Plan
    process: subprocess.Popen[bytes]
    member: Member
    registry: Registry | None
    _guard: int
    _pipe: int

    @classmethod
    def start(cls, plan: Plan) -> LocalCommand:
        """Standard streams are the caller's. The guard is forked before a cluster's client has threads.

        VimeError where the registry cannot be used; then nothing is left running.
        """
        words = plan.command.here()
        registry = _folder(plan.spec)
        try:
            process = subprocess.Popen(words, env=plan.environment, start_new_session=True)
        except OSError as error:
            raise UsageError(f"{words[0]} does not start: {error.strerror}") from error
        member = Member.here("driver", 0, process.pid)
        guard, pipe = _start_guard(member, plan.spec)
        found = cls(plan, process, member, registry, guard, pipe)
        try:
            found.registry = registry or _store(plan.spec)
        except VimeError:
            found.close(lambda: True)
            raise
        return found

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> int | None:
        """Exit code, 128 + number of the signal that ended it; None while it runs."""
        code = self.process.poll()
        return None if code is None else code if code >= 0 else INTERRUPTED - code

    def failure(self) -> str:
        """What ended it, where that is not its own exit code."""
        code = self.process.returncode
        return f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else ""

    def stop(self, is_urgent: Callable[[], bool]) -> None:
        """End it and all below it."""
        _end(self.member, self.plan.spec.session, is_urgent)
        self.process.wait(ending.KILL_SECONDS)

    def close(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """What the command has left running is ended; the guard goes home."""
        self.stop(is_urgent)
        os.write(self._pipe, _DONE)
        os.close(self._pipe)
        os.waitpid(self._guard, 0)


def _folder(spec: Spec) -> Registry | None:
    """The registry, where it is a folder; of a cluster only whether something listens there is asked."""
    if spec.folder:
        return registry_of(spec)
    check_port(spec.gcs)
    return None


def _store(spec: Spec) -> Registry:
    gcs.client(spec.gcs)  # says in a word that it wants a token
    return registry_of(spec)


def _end(member: Member, session: str, is_urgent: Callable[[], bool] = lambda: False) -> None:
    """Whatever goes wrong, the command's own group of processes is not left."""
    try:
        ending.end_command(member, session, is_urgent)
    except BaseException:
        if member.is_alive:
            os.killpg(member.pid, signal.SIGKILL)
        raise


def _start_guard(member: Member, spec: Spec) -> tuple[int, int]:
    """(pid, pipe that keeps it waiting)."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writes)
        _guard(reads, member, spec)
    os.close(reads)
    return pid, writes


def _guard(pipe: int, member: Member, spec: Spec) -> NoReturn:
    """Waits for the end of ``run``. Its own end is never an exception in the caller's stack."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if os.read(pipe, len(_DONE)) != _DONE:
            _end(member, spec.session)
            forget_run(registry_of(spec), spec.session)
        code = 0
    except Exception as error:  # noqa: BLE001 - nobody is left who could print it
        os.write(2, f"error: the end of {spec.session}: {error}\n".encode())
    finally:
        os._exit(code)
