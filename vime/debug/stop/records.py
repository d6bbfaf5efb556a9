"""What is written in the registry: the debug run, and each process that has stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from vime.debug.processes import Member
from vime.debug.stop.registry import Registry, rows
from vime.errors import VimeError

WAITING, ATTACHED, RUNNING = "waiting", "attached", "running"
_Kind = TypeVar("_Kind", "Stop", "Run")


@dataclass(frozen=True)
class Stop:
    """A process that has stopped and can be attached to.

    key          what the user calls it by, such as "trainer1-9c2e"
    session      of the debug run
    point        id of the point; "post-mortem", "breakpoint()" or "pause"
    reason       in words: "breakpoint step == 2", "ZeroDivisionError: division by zero", ...
    file, line, function, code     where; ``code``: the line itself, stripped
    role, rank, actor, job, node, address, hostname, pid     who, see ``Identity``; ``address``: of the node
    started, boot                  of the process, see ``Member``: tells it from a later one with the same pid
    thread       its name
    host, port   where its debug adapter listens
    since        Unix time of the stop; ``until``: when it goes on if nobody attaches
    state        waiting; attached: a client holds it; running: a client is connected still and has let it go on
    local_root, remote_root        folder of the code where the command was given, and here; "" where they are one
    """

    key: str
    session: str
    point: str
    reason: str
    file: str
    line: int
    function: str
    code: str
    role: str
    rank: int | None
    pid: int
    hostname: str
    address: str
    started: int
    boot: str
    thread: str
    host: str
    port: int
    since: float
    until: float
    state: str = WAITING
    actor: str = ""
    job: str = ""
    node: str = ""
    local_root: str = ""
    remote_root: str = ""

    @property
    def who(self) -> str:
        """ "trainer 1", "driver"."""
        return self.role if self.rank is None else f"{self.role} {self.rank}"

    @property
    def member(self) -> Member:
        """The process that has stopped."""
        return Member(self.role, self.rank or 0, self.pid, self.hostname, self.started, self.boot)

    @property
    def file_here(self) -> str:
        """``file``, or what it is a copy of in the folder where the command was given."""
        is_copy = bool(self.remote_root) and self.file.startswith(f"{self.remote_root}/")
        return f"{self.local_root}{self.file.removeprefix(self.remote_root)}" if is_copy else self.file


@dataclass(frozen=True)
class Run:
    """A debug run, as ``vime debug-attach run`` notes it at its start; it is forgotten at its end.

    command      what was asked for, one argument each
    pid, started, boot, hostname     of ``vime debug-attach run`` itself
    child_pid    of the process it started; 0 where a job was submitted
    submit       address of the dashboard that the job was submitted to; "" for a local run
    job          submission id of that job
    working_dir  where the command was given
    began        Unix time
    hold_seconds, wait_seconds     see ``Spec``
    """

    session: str
    command: tuple[str, ...]
    pid: int
    started: int
    boot: str
    hostname: str
    working_dir: str
    began: float
    hold_seconds: float
    wait_seconds: float
    child_pid: int = 0
    submit: str = ""
    job: str = ""

    @property
    def watcher(self) -> Member:
        """``vime debug-attach run`` itself."""
        return Member("driver", 0, self.pid, self.hostname, self.started, self.boot)

    @property
    def shares_terminal(self) -> bool:
        """Whether ``run`` lives on this machine and says what has stopped, where its own processes write too."""
        return not self.job and self.watcher.is_here and self.watcher.is_alive


def put_stop(registry: Registry, stop: Stop) -> None:
    """Note a stop, or its new state."""
    registry.put(f"{stop.session}/stop/{stop.key}", asdict(stop))


def forget_stop(registry: Registry, stop: Stop) -> None:
    """It goes on, or is gone."""
    for kind in ("stop", "release"):
        registry.delete(f"{stop.session}/{kind}/{stop.key}")


def stops(registry: Registry, session: str = "") -> list[Stop]:
    """All that are noted, of one debug run or of all, the oldest first. Whether they still live is not asked here."""
    found = [(name, value) for name, value in rows(registry, f"{session}/stop/" if session else "") if "/stop/" in name]
    read = [_read(Stop, registry, name, value) for name, value in found]
    return sorted(read, key=lambda stop: (stop.since, stop.key))


def release(registry: Registry, stops_: Sequence[Stop]) -> None:
    """Tell stopped processes to go on. Those that a client is attached to are told by their client, not by this."""
    for stop in stops_:
        registry.put(f"{stop.session}/release/{stop.key}", {"key": stop.key})


def is_released(registry: Registry, stop: Stop) -> bool:
    """Whether this stop was told to go on."""
    return registry.get(f"{stop.session}/release/{stop.key}") is not None


def put_run(registry: Registry, run: Run) -> None:
    registry.put(f"{run.session}/run", asdict(run))


def run_of(registry: Registry, session: str) -> Run | None:
    """What ``run`` has noted; None where it has not yet."""
    value = registry.get(name := f"{session}/run")
    return None if value is None else _run(registry, name, value)


def runs(registry: Registry) -> list[Run]:
    """All debug runs noted in this registry, the oldest first."""
    found = [(name, value) for name, value in rows(registry, "") if name.endswith("/run") and name.count("/") == 1]
    return sorted((_run(registry, name, value) for name, value in found), key=lambda run: run.began)


def forget_run(registry: Registry, session: str) -> None:
    """Remove every entry of a debug run."""
    for name in registry.names(f"{session}/"):
        registry.delete(name)


def _run(registry: Registry, name: str, value: dict[str, Any]) -> Run:
    run = _read(Run, registry, name, value)
    return replace(run, command=tuple(run.command))


def _read(kind: type[_Kind], registry: Registry, name: str, value: dict[str, Any]) -> _Kind:
    try:
        return kind(**value)
    except TypeError as error:
        raise VimeError(
            f"{registry.where}: this version of vime cannot read the entry {name}: {error}",
            "another version has written it: use that one, or remove the entry",
        ) from error
